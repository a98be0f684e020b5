// SPDX-License-Identifier: Apache-2.0

package process

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The processes are real: this program, which is one if it is called so. What they and the test know is in a file that all map.

func TestMain(m *testing.M) {
	if os.Args[0] == Name {
		child()
		return
	}
	os.Exit(m.Run())
}

// told is what Start's configuration says here.
type told struct {
	Dir string
	Times
}

const uuid = "GPU-0"

// board is shared by the processes and the test.
type board struct {
	path string
	mem  []byte
}

const (
	wordLiving  = iota * 4 // guards; set by the test
	wordLeader             // who decides, as it says itself
	wordStandby            // who was made ready last
	wordReady              // how many were
	wordBegins             // how many began to decide
	wordSteps
	wordTwo   // how often one that decides saw that another one does
	wordPanic // set by the test: steps panic once there is a standby
	boardSize = 64
)

func openBoard(dir string) (*board, error) {
	b := &board{path: filepath.Join(dir, "state")}
	f, err := os.OpenFile(b.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(boardSize); err != nil {
		return nil, err
	}
	b.mem, err = unix.Mmap(int(f.Fd()), 0, boardSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return b, err
}

func (b *board) word(i int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b.mem[i])) }
func (b *board) get(i int) int             { return int(b.word(i).Load()) }

// decider is one that writes down who it is, and sees whether somebody else does.
type decider struct {
	*board
	begun bool
}

func (d *decider) Step(time.Duration) time.Duration {
	if !d.begun {
		d.begun = true
		d.word(wordLeader).Store(uint32(os.Getpid()))
		d.word(wordBegins).Add(1)
	}
	if d.get(wordLeader) != os.Getpid() {
		d.word(wordTwo).Add(1)
	}
	if d.get(wordPanic) != 0 && d.get(wordReady) > d.get(wordBegins) {
		panic("as asked")
	}
	d.word(wordSteps).Add(1)
	return time.Millisecond
}

func (d *decider) Living() int { return d.get(wordLiving) }

func (d *decider) Wakes() []func() bool { return nil }

// child is such a process.
func child() {
	runtime.GOMAXPROCS(1)
	text, err := io.ReadAll(os.Stdin)
	var t told
	if err == nil {
		err = json.Unmarshal(text, &t)
	}
	if err != nil {
		os.Exit(1) // who started it was killed meanwhile
	}
	f, err := os.OpenFile(filepath.Join(t.Dir, "log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		panic(err)
	}
	_ = unix.Dup3(int(f.Fd()), 2, 0) // for panics
	log := slog.New(slog.NewTextHandler(f, nil))
	err = Run(Options{RunDir: t.Dir, UUID: uuid, Config: text, Now: monotonic, Log: log, Times: t.Times}, func() (Decider, error) {
		b, err := openBoard(t.Dir)
		if err != nil {
			return nil, err
		}
		b.word(wordStandby).Store(uint32(os.Getpid()))
		b.word(wordReady).Add(1)
		return &decider{board: b}, nil
	})
	if err != nil {
		log.Error("ends", "pid", os.Getpid(), "err", err)
		os.Exit(1)
	}
}

func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// quick are times for tests.
func quick() Times {
	return Times{Linger: 20 * time.Millisecond, Look: 10 * time.Millisecond, Steady: time.Millisecond,
		PauseFrom: time.Millisecond, PauseMost: 10 * time.Millisecond}
}

// rig is a GPU with processes.
type rig struct {
	*testing.T
	*board
	told
}

func newRig(t *testing.T, times Times) *rig {
	dir := t.TempDir()
	b, err := openBoard(dir)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t, b, told{dir, times}}
	t.Cleanup(func() {
		r.word(wordLiving).Store(0)
		r.word(wordPanic).Store(0)
		r.await("all to end", r.nobody)
		if n := r.get(wordTwo); n > 0 {
			t.Errorf("two decided at once, %d times", n)
		}
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("log:\n%s", log)
		}
	})
	return r
}

func (r *rig) start() {
	r.Helper()
	text, err := json.Marshal(r.told)
	if err == nil {
		err = Start(r.Dir, uuid, text)
	}
	if err != nil {
		r.Fatal(err)
	}
}

// await waits for something; the bound is for a machine that is very busy.
func (r *rig) await(what string, done func() bool) {
	r.Helper()
	for end := time.Now().Add(time.Minute); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			r.Fatalf("waited too long for %s", what)
		}
	}
}

// free says whether nobody has a lock.
func (r *rig) free(which string) bool {
	f, err := openLock(r.Dir, uuid, which)
	if err != nil {
		r.Fatal(err)
	}
	defer f.Close()
	free, err := takeIfFree(f)
	if err != nil {
		r.Fatal(err)
	}
	return free
}

func (r *rig) nobody() bool { return r.free(standbyLock) && r.free(leaderLock) }

// leader is who decides; 0: nobody.
func (r *rig) leader() int {
	l, lives, err := Find(r.Dir, uuid)
	if err != nil {
		r.Fatal(err)
	}
	if !lives || r.get(wordLeader) != l.PID {
		return 0
	}
	return l.PID
}

// both waits for a leader and a standby, which are others than those.
func (r *rig) both(but ...int) (leader, standby int) {
	r.Helper()
	r.await("a leader and a standby", func() bool {
		leader, standby = r.leader(), r.get(wordStandby)
		return leader != 0 && leader != standby && !slices.Contains(but, leader) && !slices.Contains(but, standby)
	})
	return leader, standby
}

func (r *rig) kill(pid int) {
	r.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		r.Errorf("kill %d: %v", pid, err)
	}
}

// TestReplaced: the standby goes on when the leader is killed, and there is another standby; one that dies is replaced.
func TestReplaced(t *testing.T) {
	r := newRig(t, quick())
	r.word(wordLiving).Store(1)
	r.start()
	leader, standby := r.both()
	if r.free(leaderLock) || r.free(standbyLock) {
		t.Error("a lock is free")
	}
	begin := time.Now()
	r.kill(leader)
	r.await("the standby to decide", func() bool { return r.leader() == standby })
	t.Logf("the standby decides after %v", time.Since(begin))
	_, second := r.both(leader)
	r.kill(second)
	if now, third := r.both(leader, second); now != standby || third == standby {
		t.Errorf("leader %d, standby %d: want leader %d", now, third, standby)
	}
	if n := r.get(wordBegins); n != 2 {
		t.Errorf("%d began to decide", n)
	}
}

// TestStartedOften: of many that start one there is but one, and one standby.
func TestStartedOften(t *testing.T) {
	r := newRig(t, quick())
	r.word(wordLiving).Store(1)
	for range 50 {
		r.start()
	}
	leader, standby := r.both()
	for range 50 {
		r.start()
	}
	if again, other := r.both(); again != leader || other != standby || r.get(wordReady) != 2 {
		t.Errorf("leader %d, standby %d, %d processes: want %d, %d, 2", again, other, r.get(wordReady), leader, standby)
	}
}

// TestBothKilled: whoever starts one then has both again.
func TestBothKilled(t *testing.T) {
	r := newRig(t, quick())
	r.word(wordLiving).Store(1)
	r.start()
	leader, standby := r.both()
	r.kill(standby)
	r.kill(leader) // which may have started another one
	r.await("one that decides", func() bool {
		r.start() // again: the locks are a killed one's until it is gone
		now := r.leader()
		return now != 0 && now != leader
	})
	r.both(leader, standby)
}

// TestEnds: with the last guard both end, and leave no name behind; the next guard has both.
func TestEnds(t *testing.T) {
	r := newRig(t, quick())
	for range 3 {
		r.word(wordLiving).Store(2)
		r.start()
		leader, _ := r.both()
		r.word(wordLiving).Store(1)
		steps := r.get(wordSteps)
		r.await("steps", func() bool { return r.get(wordSteps) > steps+10 })
		if r.leader() != leader {
			t.Error("it has ended while a guard lives")
		}
		r.word(wordLiving).Store(0)
		r.await("both to end", r.nobody)
		if l, lives, err := Find(r.Dir, uuid); l.PID != 0 || lives || err != nil {
			t.Errorf("%+v, %v, %v", l, lives, err)
		}
	}
	log, _ := os.ReadFile(filepath.Join(r.Dir, "log"))
	if strings.Contains(string(log), "level=WARN") || strings.Contains(string(log), "hasty=1") {
		t.Errorf("an end counts as a death:\n%s", log)
	}
}

// TestFolderGone: with the run directory gone both end all the same, and make nothing in its place.
func TestFolderGone(t *testing.T) {
	r := newRig(t, quick())
	r.word(wordLiving).Store(1)
	r.start()
	leader, standby := r.both()
	folder := filepath.Dir(lockPath(r.Dir, uuid, leaderLock))
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	r.word(wordLiving).Store(0)
	ended := func(pid int) bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(text), ") Z ")
	}
	r.await("both to end", func() bool { return ended(leader) && ended(standby) })
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("%s: %v", folder, err)
	}
}

// TestStartAtTheEnd: a guard that comes while they end has one.
func TestStartAtTheEnd(t *testing.T) {
	times := quick()
	times.Linger, times.Look = time.Millisecond, time.Millisecond
	r := newRig(t, times)
	for i := range 50 {
		r.word(wordLiving).Store(1)
		r.start()
		r.await(fmt.Sprintf("one that decides, round %d", i), func() bool { return r.leader() != 0 })
		r.word(wordLiving).Store(0)
		time.Sleep(time.Duration(rand.IntN(4000)) * time.Microsecond)
	}
}

// TestKills: whoever is killed when, there are both again, and never do two decide.
func TestKills(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t, quick())
	r.word(wordLiving).Store(1)
	r.start()
	kills := 80 // a seed of its own each time
	if testing.Short() {
		kills = 20
	}
	for range kills {
		leader, standby := r.both()
		victims := [][]int{{leader}, {standby}, {leader, standby}, {standby, leader}}[random.IntN(4)]
		time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond)
		for _, pid := range victims {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		r.await("one that decides", func() bool {
			r.start()
			leader := r.leader()
			return leader != 0 && !slices.Contains(victims, leader)
		})
		r.both(victims...)
	}
	t.Logf("%d processes, %d decided", r.get(wordReady), r.get(wordBegins))
}

// TestPanics: one that cannot decide says why, and they do not follow each other without a pause.
func TestPanics(t *testing.T) {
	times := quick()
	times.Steady, times.PauseMost = time.Hour, time.Hour
	times.PauseFrom = time.Hour
	r := newRig(t, times)
	r.word(wordLiving).Store(1)
	r.word(wordPanic).Store(1)
	r.start()
	r.await("the last of them", func() bool { return r.get(wordBegins) == forgiven+1 && r.leader() != 0 })
	steps := r.get(wordSteps)
	r.await("steps", func() bool { return r.get(wordSteps) > steps+20 })
	if begins, ready := r.get(wordBegins), r.get(wordReady); begins != forgiven+1 || ready != begins {
		t.Errorf("%d processes, %d decided", ready, begins)
	}
	if log, _ := os.ReadFile(filepath.Join(r.Dir, "log")); !strings.Contains(string(log), "as asked") {
		t.Errorf("log:\n%s", log)
	}
	r.kill(r.leader()) // it would wait for a standby
}

func TestPause(t *testing.T) {
	times := Times{PauseFrom: time.Second, PauseMost: 10 * time.Second}
	for hasty, want := range map[int]time.Duration{0: 0, forgiven - 1: 0, forgiven: time.Second, forgiven + 2: 4 * time.Second,
		forgiven + 4: 10 * time.Second, 1 << 40: 10 * time.Second} {
		if got := times.pause(hasty); got != want {
			t.Errorf("%d: %v, want %v", hasty, got, want)
		}
	}
}
