// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/test/walk"
)

// A walk at random (test/walk) in a container of this guard. After every step the driver's own books are compared with the guard's: the
// driver must never have given out more than is charged, nor more than the limit and, of page tables, tableSlack. When all processes are
// gone nothing may be left.

const (
	walkEnv      = "CGPU_WALK"       // seed; or the file of a list, as a failure prints it
	walkForEnv   = "CGPU_WALK_FOR"   // how long
	walkTraceEnv = "CGPU_WALK_TRACE" // not empty: every operation is shown with its result
	walkShrink   = 30 * time.Second  // how long a failure is made shorter
	walkSteps    = 300
	walkFileEnv  = "CGPU_TEST_WALK_LIST"  // the child's: where its list is
	walkHangEnv  = "CGPU_TEST_WALK_HANGS" // the child's: how long a call may take
	walkPatience = 20 * time.Second
	walkHaste    = 300 * time.Millisecond // while a failure is made shorter
)

// childWalk carries out a list. It says "sync STEP [end]" between the steps, and goes on when it gets a line.
func childWalk(s *childState, _ []int) (string, error) {
	f, err := os.Open(os.Getenv(walkFileEnv))
	if err != nil {
		return "", err
	}
	defer f.Close()
	ops, err := walk.Parse(f)
	if err != nil {
		return "", err
	}
	if err := os.Setenv(childEnv, "walk"); err != nil {
		return "", err
	}
	var trace io.Writer
	if os.Getenv(walkTraceEnv) != "" {
		trace = os.Stderr
	}
	hangs, _ := time.ParseDuration(os.Getenv(walkHangEnv))
	stats, err := walk.Run(ops, walk.Options{Patience: hangs, Args: os.Args, Env: os.Environ(), Nodes: s.nodes, Trace: trace,
		Sync: func(step int, end bool) error {
			fmt.Println("sync", step, end)
			if !s.in.Scan() || s.in.Text() != "go" {
				return errors.New("told to stop")
			}
			return nil
		}})
	return fmt.Sprint(stats.Made, " ", stats.Refused, " ", stats.LeftOut), err
}

// neighbour has memory on the same GPU, and opens it to everybody.
type neighbour struct {
	s *sim.Session
	r *rig
}

const neighbourHas = 64 * quota.MiB

func newNeighbour(r *rig) neighbour {
	n := neighbour{r.sim.Session([]int{0}), r}
	f, err := n.s.OpenFile(sim.Control, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	var client uint32
	call := func(nr uint32, outer, params []byte) {
		c := &rm.Call{Cmd: uint32(testCmd(nr, len(outer))), Outer: outer}
		if params != nil {
			c.Blocks = []rm.Block{{In: -1, Off: rm.AllocParams, Data: params}}
		}
		off := map[uint32]int{rm.EscAlloc: 40, rm.EscShare: rm.ShareStatus}[nr]
		if e := n.s.Ioctl(f, 1, 1, c); e != 0 || rm.U32(outer, off) != 0 {
			r.t.Fatalf("the neighbour: %v, %#x", e, rm.U32(outer, off))
		}
	}
	alloc := func(parent, handle, class uint32, params []byte) uint32 {
		o := make([]byte, 48)
		rm.PutU32(o, rm.AllocRoot, client)
		rm.PutU32(o, rm.AllocParent, parent)
		rm.PutU32(o, rm.AllocObject, handle)
		rm.PutU32(o, rm.AllocClass, class)
		call(rm.EscAlloc, o, params)
		return rm.U32(o, rm.AllocObject)
	}
	client = alloc(0, 0, rmclient.ClassClient, nil)
	alloc(client, 0x5c000001, rmclient.ClassDevice, make([]byte, 56))
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, uint64(neighbourHas))
	alloc(0x5c000001, 0x5c000002, classVidmem, p)
	o := make([]byte, rm.ShareSize)
	rm.PutU32(o, rm.ShareClient, client)
	rm.PutU32(o, rm.ShareObject, 0x5c000002)
	o[rm.SharePolicy+rm.SharePolicyType] = shareTypeAll
	call(rm.EscShare, o, nil)
	return n
}

// walker is a container in which lists are carried out one after the other.
type walker struct {
	*rig
	c        *child
	list     string
	next     neighbour
	before   sim.Snapshot  // what the guard and the neighbour have
	patience time.Duration // how long books may differ: ends of files and processes are seen a moment later
	each     int           // so many steps apart the guard is handed over; 0: never
	booked   *bookTest     // nil: nobody looks at the guard's books
	unnamed  int           // files of which a guard that has fallen may have told the driver, and not yet its books
	falling  sync.Mutex    // held while another guard goes on
}

func newWalker(t *testing.T, patience time.Duration, prepare ...func(*rig)) *walker {
	w := &walker{rig: newRig(t), list: filepath.Join(t.TempDir(), "list"), patience: patience}
	for _, f := range prepare {
		f(w.rig)
	}
	if _, err := w.guard.guardClient(); err != nil { // else it is made when it is first needed
		t.Fatal(err)
	}
	w.next = newNeighbour(w.rig)
	w.before = w.sim.Snapshot()
	w.c = w.start(withEnv(walkFileEnv+"="+w.list), withEnv(fmt.Sprint(walkHangEnv, "=", min(10*patience, time.Minute))))
	return w
}

// run carries out a list, and returns what is wrong and after which step.
func (w *walker) run(ops []walk.Op) (step int, err error) {
	if err := os.WriteFile(w.list, []byte(walk.Text(ops)), 0o600); err != nil {
		w.t.Fatal(err)
	}
	w.c.send("walk")
	for {
		select {
		case line, ok := <-w.c.out:
			words := strings.Fields(line)
			switch {
			case !ok || len(words) == 0:
				return step, errors.New("the container's first process has ended")
			case words[0] == "ok":
				return step, nil
			case words[0] != "sync":
				return step, errors.New(line)
			}
			step, _ = strconv.Atoi(words[1])
			if err := w.books(words[2] == "true"); err != nil {
				return step, err
			}
			if w.booked != nil {
				if err := w.booked.compare(); err != nil {
					return step, err
				}
			}
			if w.each > 0 && step%w.each == 0 {
				if err := w.handOver(); err != nil {
					return step, err
				}
			}
			w.c.send("go")
		case <-time.After(90 * time.Second):
			return step, errors.New("a call hangs")
		}
	}
}

// books compares the driver's with the guard's until they agree.
func (w *walker) books(end bool) (err error) {
	for deadline := time.Now().Add(w.patience); ; time.Sleep(time.Millisecond) {
		if err = w.compare(end); err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

func (w *walker) compare(end bool) error {
	w.falling.Lock()
	defer w.falling.Unlock()
	s := w.sim.Snapshot()
	card := s.GPUs[0]
	a := w.guard.account
	a.mu.Lock()
	used, clients, tsgs, channels, objects, zombies := a.gpus[0].used, len(a.clients), a.gpus[0].tsgs, a.gpus[0].channels, a.objects, a.zombies
	old, host := len(w.guard.oldClients), a.hostUsed
	a.mu.Unlock()
	if !end { // those of guards that have fallen end with their windows
		s.Clients -= old
	}
	truth, mapped := int64(card.Used)-int64(neighbourHas), w.mapped()
	s.Clients, s.Files, s.Objects = s.Clients-w.before.Clients, s.Files-w.before.Files, s.Objects-w.before.Objects
	if end && s.Files > 0 && s.Files <= w.unnamed { // no process has them; a simulated driver's do not close by themselves
		s.Files = 0
	}
	groups, inGroups := len(card.TSGs), 0
	for _, g := range card.TSGs {
		inGroups += g.Channels
	}
	switch {
	case used > testLimit+tableSlack:
		return fmt.Errorf("the guard has charged %v of a limit of %v", used, quota.Bytes(testLimit))
	case truth < 0:
		return errors.New("the neighbour has lost its memory")
	case truth > int64(used):
		return fmt.Errorf("the driver has given out %v, the guard has charged %v", quota.Bytes(truth), used)
	case int64(used) > truth+int64(mapped):
		return fmt.Errorf("the guard has charged %v, the driver has given out %v, and address spaces hold %v", used, quota.Bytes(truth), mapped)
	case s.Host-w.before.Host > host:
		w.guard.sweep() // a simulated driver's files do not close by themselves
		return fmt.Errorf("the driver has made %v of host memory, the guard has charged %v", s.Host-w.before.Host, host)
	case s.GPUs[1].Used > 0:
		return fmt.Errorf("the other GPU has given out %v", s.GPUs[1].Used)
	case s.Clients > clients, groups > tsgs, inGroups > channels:
		return fmt.Errorf("the driver has %d clients, %d groups, %d channels; the guard knows %d, %d, %d",
			s.Clients, groups, inGroups, clients, tsgs, channels)
	case !end:
		return nil
	case truth != 0 || s.Clients+s.Files+s.Objects+s.Exports != 0:
		return fmt.Errorf("the processes are gone, and the driver has %v, %d clients, %d files, %d objects, %d exports",
			quota.Bytes(truth), s.Clients, s.Files, s.Objects, s.Exports)
	case used != 0 || host != 0 || clients+tsgs+channels+objects+zombies+w.guard.files.count() != 0:
		return fmt.Errorf("the processes are gone, and the guard counts %v, %v of the host's, %d clients, %d groups, %d channels, %d objects, "+
			"%d zombies, %d files", used, host, clients, tsgs, channels, objects, zombies, w.guard.files.count())
	}
	return nil
}

// mapped is what UVM address spaces hold by the guard's books. Of a mapping that is taken away in parts it keeps the whole until the end.
func (w *walker) mapped() (sum quota.Bytes) {
	seen := map[*charge]bool{}
	for _, f := range w.guard.files.snapshot() {
		f.mu.Lock()
		for _, r := range f.ranges {
			for _, ch := range r.tables {
				sum += ch.size
			}
		}
		for _, list := range f.maps {
			for _, m := range list {
				for _, ch := range []*charge{m.charge, m.tables} {
					if ch != nil && !seen[ch] {
						seen[ch] = true
						sum += ch.size
					}
				}
			}
		}
		f.mu.Unlock()
	}
	return sum
}

// over ends the container and its neighbour: then nothing is left at all.
func (w *walker) over() error {
	w.c.kill()
	_ = w.next.s.Close()
	if s := w.sim.Snapshot(); s.GPUs[0].Used != 0 || s.Clients != w.before.Clients-1 {
		return fmt.Errorf("the neighbour is gone, and the driver has %v and %d clients", s.GPUs[0].Used, s.Clients)
	}
	return nil
}

func TestWalk(t *testing.T) {
	seed, limit := uint64(time.Now().UnixNano()), 25*time.Second
	if d, err := time.ParseDuration(os.Getenv(walkForEnv)); err == nil {
		limit = d
	}
	if testing.Short() {
		limit = 2 * time.Second
	}
	if s := os.Getenv(walkEnv); s != "" {
		n, err := strconv.ParseUint(s, 0, 64)
		if err != nil {
			replayWalk(t, s)
			return
		}
		seed = n
	}
	w := newWalker(t, walkPatience)
	lists, operations := 0, 0
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); lists++ {
		ops := walk.Generate(seed+uint64(lists), walk.Kind{Steps: walkSteps, Procs: 3, Limit: uint64(testLimit), Malformed: lists%4 != 3})
		operations += len(ops)
		step, err := w.run(ops)
		if err == nil {
			continue
		}
		t.Logf("seed %#x, step %d: %v", seed+uint64(lists), step, err)
		fails := func(ops []walk.Op) bool {
			w := newWalker(t, walkHaste)
			_, again := w.run(ops)
			_ = w.over()
			return again != nil && kindOf(again) == kindOf(err)
		}
		short := walk.Shrink(walk.UpTo(ops, step), walkShrink,
			func(ops []walk.Op) bool {
				first := fails(ops)
				return first && fails(ops) // once may be chance
			})
		w := newWalker(t, walkPatience)
		_, again := w.run(short)
		t.Fatalf("seed %#x: %v\nthese %d of %d operations do it (again: %v); %s=FILE does them again:\n%s",
			seed+uint64(lists), err, len(short), len(ops), errors.Join(again, w.over()), walkEnv, walk.Text(short))
	}
	if err := w.over(); err != nil {
		t.Fatalf("seeds %#x to %#x: %v", seed, seed+uint64(lists)-1, err)
	}
	t.Logf("seeds %#x to %#x: %d operations", seed, seed+uint64(lists)-1, operations)
}

// kindOf is an error without its numbers.
func kindOf(err error) string {
	return regexp.MustCompile(`[0-9.]+([KMGT]i)?B?`).ReplaceAllString(err.Error(), "")
}

// replayWalk carries out the list of a file.
func replayWalk(t *testing.T, path string) {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ops, err := walk.Parse(f)
	if err != nil {
		t.Fatal(err)
	}
	w := newWalker(t, walkPatience)
	if step, err := w.run(ops); err != nil {
		t.Fatalf("step %d: %v", step, err)
	}
}
