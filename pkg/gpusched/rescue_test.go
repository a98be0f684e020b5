// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// noted reads what a file says is off, as a rescuer would.
func noted(t *testing.T, path string) (list [][]fakeName) {
	t.Helper()
	d := newFakeGPU()
	copied := filepath.Join(t.TempDir(), "copy")
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(copied, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ResumeLeftovers(copied, d.open, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	for _, l := range d.take() {
		if l.off {
			t.Errorf("channels are turned off: %#x", l.channels)
		}
		list = append(list, l.channels)
	}
	return list
}

// notes is a file of what is off, as the container's guard makes it.
func (c *fakeContainer) notes() *rescue {
	c.Helper()
	r, err := newRescue(c.Config)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(r.close)
	return r
}

// TestRescueFile: what is noted is what is resumed, on the GPU where it is.
func TestRescueFile(t *testing.T) {
	c := newFakeContainer(t, 3)
	r := c.notes()
	if st, err := os.Stat(r.path); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	first := c.channels(fakeClient, workGroup, 0x100, 3)
	last := c.channels(fakeClient, workGroup+2, 0x200, 1)
	r.note(0, c.Channels(0, false))
	r.note(2, c.Channels(2, false))
	d := newFakeGPU()
	for _, ch := range slices.Concat(first, last) {
		d.off[ch] = true
	}
	n, err := ResumeLeftovers(r.path, d.open, slog.New(slog.DiscardHandler))
	if err != nil || n != 4 || d.offNow() != 0 {
		t.Fatalf("%d resumed, %d still off: %v", n, d.offNow(), err)
	}
	if l := d.take(); len(l) != 2 || l[0].sub == l[1].sub || len(l[0].channels) != 3 || !slices.Equal(l[1].channels, last) {
		t.Errorf("%+v", l)
	}
	if _, err := os.Stat(r.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
	if n, err := ResumeLeftovers(r.path, d.open, slog.New(slog.DiscardHandler)); err == nil || n != 0 {
		t.Errorf("without a file: %d, %v", n, err)
	}
}

// TestRescueForget: what runs again is not resumed, and other GPUs are not forgotten.
func TestRescueForget(t *testing.T) {
	c := newFakeContainer(t, 2)
	r := c.notes()
	c.channels(fakeClient, workGroup, 0x100, 3)
	second := c.channels(fakeClient, workGroup+1, 0x200, 2)
	for gpu := range 2 {
		r.note(gpu, c.Channels(gpu, false))
	}
	r.forget(0)
	if l := noted(t, r.path); len(l) != 1 || len(l[0]) != len(second) || l[0][0].handle&^1 != 0x200 {
		t.Errorf("%#x", l)
	}
	r.forget(1)
	if l := noted(t, r.path); len(l) != 0 {
		t.Errorf("%#x", l)
	}
	(*rescue)(nil).forget(0) // before the first pause
}

// TestRescueNoteAnyMoment: while a list grows, because cgpu pause comes in the off phase of a cap, the old one is valid until
// the new one is.
func TestRescueNoteAnyMoment(t *testing.T) {
	c := newFakeContainer(t, 1)
	r := c.notes()
	work := c.channels(fakeClient, workGroup, 0x100, 8)
	r.note(0, c.Channels(0, false))
	before := r.count(0).Load()
	c.channels(fakeClient, copyGroup, 0x200, 8)
	r.note(0, c.Channels(0, true))
	if n := r.count(0).Load(); n != 16 {
		t.Errorf("%d noted, want 16", n)
	}
	// A guard that is killed just before the last instruction leaves everything written but the count.
	r.count(0).Store(before)
	l := slices.Concat(noted(t, r.path)...)
	slices.SortFunc(l, func(a, b fakeName) int { return int(a.handle) - int(b.handle) })
	if !slices.Equal(l, work) {
		t.Errorf("%#x is what would be resumed of %#x", l, work)
	}
}

// TestRescueFull: more than the file has room for does not spill into the next GPU's list.
func TestRescueFull(t *testing.T) {
	c := newFakeContainer(t, 2)
	c.Config.Settings.MaxChannels = 64
	r := c.notes()
	c.channels(fakeClient, workGroup, 0x100, 100)
	r.note(0, c.Channels(0, false))
	if l := noted(t, r.path); len(l) != 1 || len(l[0]) != 64 {
		t.Errorf("%d lists", len(l))
	}
}

// TestRescueDamaged: a file that is not whole is refused, without a panic and without a call.
func TestRescueDamaged(t *testing.T) {
	c := newFakeContainer(t, 2)
	r := c.notes()
	c.channels(fakeClient, workGroup, 0x100, 3)
	r.note(0, c.Channels(0, false))
	whole := bytes.Clone(r.mem)
	for _, x := range []struct {
		name   string
		change func(b []byte) []byte
	}{
		{"empty", func([]byte) []byte { return nil }},
		{"a word", func(b []byte) []byte { return b[:4] }},
		{"the header in part", func(b []byte) []byte { return b[:rescueHeader-1] }},
		{"only the header", func(b []byte) []byte { return b[:rescueHeader] }},
		{"a byte is missing", func(b []byte) []byte { return b[:len(b)-1] }},
		{"a length beyond the header", func(b []byte) []byte { rm.PutU32(b, 0, rescueHeader); return b }},
		{"a length beyond everything", func(b []byte) []byte { rm.PutU32(b, 0, 0xffffffff); return b }},
		{"no JSON", func(b []byte) []byte { b[8] = 'x'; return b }},
		{"zeroes", func(b []byte) []byte { clear(b); return b }},
		{"more entries than there are", func(b []byte) []byte { rm.PutU32(b, 4, 0xffffffff); return b }},
	} {
		t.Run(x.name, func(t *testing.T) {
			b := x.change(bytes.Clone(whole))
			path := filepath.Join(t.TempDir(), "n.pause")
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			d := newFakeGPU()
			n, err := ResumeLeftovers(path, d.open, slog.New(slog.DiscardHandler))
			if err == nil || n != 0 || !strings.Contains(err.Error(), "damaged") || len(d.take()) > 0 {
				t.Errorf("%d, %v", n, err)
			}
			again, err := newResumer(c.Config, d, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			// it was whole when the rescuer began
			if n, err := again.resume(path); err == nil && len(b) < rescueHeader || n != 0 && len(b) < rescueHeader {
				t.Errorf("read again: %d, %v", n, err)
			}
		})
	}
	t.Run("more noted than there is room for", func(t *testing.T) {
		b := bytes.Clone(whole)
		rm.PutU32(b, rescueHeader, 0xffffffff)
		path := filepath.Join(t.TempDir(), "n.pause")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		d := newFakeGPU()
		if n, err := ResumeLeftovers(path, d.open, slog.New(slog.DiscardHandler)); err != nil || n != r.entries {
			t.Errorf("%d of %d, %v", n, r.entries, err)
		}
	})
}

// TestRescueRefused: what the driver does not resume stays noted, for the next try.
func TestRescueRefused(t *testing.T) {
	c := newFakeContainer(t, 2)
	r := c.notes()
	c.channels(fakeClient, workGroup, 0x100, 3)
	c.channels(fakeClient, workGroup+1, 0x200, 3)
	for gpu := range 2 {
		r.note(gpu, c.Channels(gpu, false))
	}
	d := newFakeGPU()
	d.refuse = func(l fakeList) uint32 {
		if slices.Contains(l.channels, fakeName{fakeClient, 0x101}) {
			return rm.StatusBusyRetry
		}
		return 0
	}
	if n, err := ResumeLeftovers(r.path, d.open, slog.New(slog.DiscardHandler)); err == nil || n != 5 {
		t.Errorf("%d, %v", n, err)
	}
	d.refuse = nil
	d.gone[fakeName{fakeClient, 0x101}] = true // its program has ended
	if n, err := ResumeLeftovers(r.path, d.open, slog.New(slog.DiscardHandler)); err != nil || n != 6 {
		t.Errorf("again: %d, %v", n, err)
	}
}

// TestInsureKeepsTheList: a rescuer that dies is replaced before the next pause, and the new one knows what is off already.
func TestInsureKeepsTheList(t *testing.T) {
	c := newFakeContainer(t, 2)
	c.channels(fakeClient, workGroup, 0x100, 2)
	c.channels(fakeClient, workGroup+1, 0x200, 2)
	cards := c.gpus
	c.turn(cards[0], true)
	c.rescue.gone.Store(true)
	c.turn(cards[1], true)
	if c.rescuers.Load() != 2 {
		t.Errorf("%d rescuers", c.rescuers.Load())
	}
	if l := noted(t, c.rescue.path); len(l) != 2 {
		t.Errorf("%#x is noted, 4 channels are off", l)
	}
	c.turn(cards[0], false)
	if l := noted(t, c.rescue.path); len(l) != 1 {
		t.Errorf("%#x is noted, 2 channels are off", l)
	}
}

// TestRescueListEnds: while some channels are off for as long as their client's file is hidden, a hard cap pauses and resumes
// others. The list must not fill up with those.
func TestRescueListEnds(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.Config.Settings.MaxChannels = 64
	c.client(fakeClient + 1)
	hidden := c.channels(fakeClient+1, workGroup, 0x100, 1)
	x := c.gpu()
	x.lost[c.ofClient(fakeClient+1)] = &absence{off: true}
	for i := range uint32(100) {
		now := c.channels(fakeClient, workGroup, 0x1000+i, 1)
		c.turn(x, true)
		if l := slices.Concat(noted(t, c.rescue.path)...); !slices.Contains(l, now[0]) {
			t.Fatalf("%#x is off, %#x noted", now, l)
		}
		c.turn(x, false)
		if l := slices.Concat(noted(t, c.rescue.path)...); !slices.Equal(l, hidden) {
			t.Fatalf("%#x are noted, want %#x", l, hidden)
		}
		c.freeChannel(now[0])
	}
}

// TestRescueOver: processes and address spaces end after the container's end too, when the file is unmapped.
func TestRescueOver(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.channels(fakeClient, workGroup, 0x100, 2)
	c.turn(c.gpu(), true)
	path := c.rescue.path
	c.End()
	c.Lock()
	defer c.Unlock()
	c.Forget()
	c.Stop(0, c.Channels(0, true))
	c.LetRun(0, c.Channels(0, true))
	if err := c.insure(); err == nil || c.rescue != nil {
		t.Errorf("somebody is to resume what is over: %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
}

// What follows are real processes: this binary as a guard, and again as its rescuer. The driver is a file to which all write
// what they do.

const rescueLog = "calls"

// loggingGPU writes each list to a file, also before it is carried out.
func loggingGPU(dir string) (*fakeGPU, error) {
	f, err := os.OpenFile(filepath.Join(dir, rescueLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	d := newFakeGPU()
	d.refuse = func(l fakeList) uint32 {
		word := "on"
		if l.off {
			word = "off"
		}
		names := []string{}
		for _, ch := range l.channels {
			names = append(names, fmt.Sprintf("%x:%x", ch.client, ch.handle))
		}
		slices.Sort(names)
		fmt.Fprintln(f, word, strings.Join(names, " "))
		return rm.StatusOK
	}
	return d, nil
}

// rescuerMain is what cgpu-guard does under its other name.
func rescuerMain() {
	err := Rescue(os.Args[1], os.Stdin, func(cfg guardcfg.Config) (rmclient.Driver, error) { return loggingGPU(cfg.RunDir) },
		func() { fmt.Println("ok") }, func(guardcfg.Config) *slog.Logger { return slog.New(slog.DiscardHandler) })
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// TestMain is a guard to be killed, or its rescuer, where it is called as one.
func TestMain(m *testing.M) {
	switch dir := os.Getenv(victimEnv); {
	case filepath.Base(os.Args[0]) == RescueName && os.Getenv(silentEnv) != "":
		_, _ = io.Copy(io.Discard, os.Stdin) // is never ready
	case filepath.Base(os.Args[0]) == RescueName:
		rescuerMain()
	case os.Getenv(leaderEnv) != "":
		leaderMain(os.Getenv(leaderEnv))
	case dir != "":
		victim(dir, os.Getenv(dieEnv) != "")
	default:
		os.Exit(m.Run())
	}
}

const (
	victimEnv = "CGPU_TEST_VICTIM" // where it works
	dieEnv    = "CGPU_TEST_DIE"
	silentEnv = "CGPU_TEST_SILENT"
)

// victim pauses two channels on the second GPU, says so, and waits.
func victim(dir string, die bool) {
	d, err := loggingGPU(dir)
	if err == nil && die { // between the note and the driver
		d.at = func(cmd uint32) {
			if cmd == controlDisableChannels {
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		}
	}
	cfg := fakeConfig(dir, 2)
	c := &fakeContainer{d: d, over: map[fakeName]bool{}}
	abi, _ := rm.ForDriver(cfg.DriverVersion, false)
	if err == nil {
		c.own, err = rmclient.New(d, abi, fakeControl, []uint32{0x100, 0x200})
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	c.Scheduler = New(Options{Config: cfg, Container: c, Driver: d, ABI: abi, LogOnce: func(string, string, ...any) {}, Warn: func(string) {}})
	for i := range uint32(2) {
		name := fakeName{fakeClient, 0x100 + i}
		c.list = append(c.list, fakeChannel{Channel{Client: fakeClient, Handle: name.handle, PID: os.Getppid(), Object: name}, workGroup + 1})
	}
	c.Turn(1, true)
	fmt.Println("ok", c.gpus[1].off)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startVictim runs a guard to be killed.
func startVictim(t *testing.T, dir string, die bool) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victimEnv+"="+dir)
	if die {
		cmd.Env = append(cmd.Env, dieEnv+"=1")
	}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := readLine(out); !die && (err != nil || line != "ok true") {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd
}

func readLine(r io.Reader) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := r.Read(b); err != nil || b[0] == '\n' {
			return string(line), err
		}
		line = append(line, b[0])
	}
}

func calls(t *testing.T, dir string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, rescueLog))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(b)
}

// TestKilledGuard: kill -9 at any moment leaves nothing off.
func TestKilledGuard(t *testing.T) {
	const both = " c1d00005:100 c1d00005:101\n"
	for _, x := range []struct {
		name string
		die  bool
		want string
	}{
		{"while its container is off", false, "off" + both + "on" + both},
		{"between the note and the driver", true, "on" + both},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			cmd := startVictim(t, dir, x.die)
			if !x.die {
				if got := calls(t, dir); got != "off"+both {
					t.Fatalf("before it is killed: %q", got)
				}
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "resumed", func() bool { return calls(t, dir) == x.want })
			eventually(t, "the file is gone", func() bool {
				_, err := os.Stat(filepath.Join(dir, "n"+LeftoversSuffix))
				return errors.Is(err, os.ErrNotExist)
			})
		})
	}
}

// TestKilledRescuer: another one is started before the next pause, and both gone, the file is left for cgpu resume.
func TestKilledRescuer(t *testing.T) {
	c := newFakeContainer(t, 1)
	c.StartRescuer = startRescuer // the real one: this very binary
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	c.turn(c.gpu(), true)
	c.isOff(names)
	first := c.rescue.process
	if first == nil {
		t.Fatal("there is no rescuer")
	}
	if err := first.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its end is noticed", c.rescue.gone.Load)
	if l := noted(t, c.rescue.path); len(l) != 1 || len(l[0]) != 2 {
		t.Errorf("%#x is noted", l)
	}
	c.turn(c.gpu(), false)
	c.turn(c.gpu(), true)
	second := c.rescue.process
	if second.Pid == first.Pid || c.rescue.gone.Load() {
		t.Error("there is no new rescuer")
	}
	c.turn(c.gpu(), false)
	path, gone := c.rescue.path, &c.rescue.gone
	c.End()
	eventually(t, "the rescuer ends with the guard", gone.Load)
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
	if got := calls(t, c.Config.RunDir); got != "" {
		t.Errorf("the rescuer made calls: %q", got)
	}
}

// TestRescuerRefuses: one that cannot get ready is none.
func TestRescuerRefuses(t *testing.T) {
	var gone atomic.Bool
	if _, _, err := startRescuer(filepath.Join(t.TempDir(), "none"), &gone); err == nil ||
		!strings.Contains(err.Error(), "read what is paused") {
		t.Error(err)
	}
	t.Setenv(silentEnv, "1")
	if _, _, err := startRescuerWithin(time.Second/10, "", &gone); err == nil ||
		!strings.Contains(err.Error(), "does not say that it is ready") {
		t.Error(err)
	}
	cfg := fakeConfig(t.TempDir(), 1)
	said, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ID = strings.Repeat("x", rescueHeader-len(said))
	if r, err := newRescue(cfg); err == nil {
		r.close()
		t.Error("a configuration that does not fit was written")
	}
	if err := Rescue(filepath.Join(cfg.RunDir, "none"), strings.NewReader(""), nil, nil, nil); !errors.Is(err, syscall.ENOENT) {
		t.Error(err)
	}
}
