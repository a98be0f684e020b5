// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func newKept(t *testing.T, d Driver) *Guard {
	t.Helper()
	g := newFakeGuard(t, d)
	g.filters = map[*listener]bool{}
	if err := g.newKeep(nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.keep.memory.Close)
	return g
}

// TestUselessBooks: a guard whose books do not say what is so has no keeper any more, whatever comes: one that went on by them would not
// know of what has happened since.
func TestUselessBooks(t *testing.T) {
	g := newKept(t, &inProcess{})
	g.keep.lost(errors.New("no room"))
	g.keep.resume(g.keep.stop()) // a hand-over that fails
	if g.keep.memory.Ended().Load() == 0 || g.keep.process != nil {
		t.Errorf("ended %d, keeper %v", g.keep.memory.Ended().Load(), g.keep.process)
	}
}

// TestRefusedRights: an object that the driver does not open is none that the next guard has to close; there is room for so many only.
func TestRefusedRights(t *testing.T) {
	g := withClient(newKept(t, &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		rm.PutU32(call.Outer, rm.ShareStatus, rm.StatusInvalidObjectHandle)
		return 0
	}}))
	for range keeper.MaxRights + 1 {
		rights := []openRight{{fakeMemory, accessDup}}
		if s, _ := g.whileShared(Target{}, fakeClient, rights, func() {}); s != rm.StatusInvalidObjectHandle {
			t.Fatal(rm.StatusName(s))
		}
	}
	if list := g.keep.memory.Rights(); len(list) > 0 || g.keep.useless.Load() {
		t.Errorf("%d are noted, the keeper is useless: %v", len(list), g.keep.useless.Load())
	}
}

// TestFlightsGiveBack: what calls under way have needed of memory is given back after them, however many there were.
func TestFlightsGiveBack(t *testing.T) {
	g := newKept(t, &inProcess{})
	var list []*arena
	for range 64 {
		mem, f, err := g.newScratch()
		if err != nil || f == nil {
			t.Fatal(f, err)
		}
		for i := range mem.mem {
			mem.mem[i] = 1
		}
		list = append(list, mem)
	}
	before := held(t, g)
	for _, mem := range list {
		mem.unmap()
	}
	if after := held(t, g); before < 64*arenaSize || after > before/64 {
		t.Errorf("%d bytes, and afterwards %d", before, after)
	}
}

// held is how much memory a guard and its keeper have in common.
func held(t *testing.T, g *Guard) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(g.keep.memory.FD(), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// TestManyFilters: a filter that comes when the workers of others have all flights has a worker all the same: it takes what those have that
// are at rest, and where there are more filters than flights, nobody goes on should the guard be killed.
func TestManyFilters(t *testing.T) {
	for name, x := range map[string]struct {
		filters int
		useless bool
	}{"spares": {keeper.MaxFlights / 4, false}, "filters": {keeper.MaxFlights + 1, true}} {
		t.Run(name, func(t *testing.T) {
			g := newKept(t, &inProcess{})
			var list []*listener
			for range x.filters {
				l := &listener{guard: g, spare: make(chan *worker, 4)}
				g.filters[l] = true
				list = append(list, l)
			}
			for i := range keeper.MaxFlights {
				mem, f, err := g.newScratch()
				if err != nil {
					t.Fatal(err)
				}
				if !x.useless {
					list[i%len(list)].parkWorker(&worker{mem: mem, flight: f})
				}
			}
			mem, _, err := g.newScratch()
			if err != nil {
				t.Fatal(err)
			}
			mem.unmap()
			if got := g.keep.memory.Ended().Load() != 0; got != x.useless {
				t.Errorf("nobody is to go on: %v, want %v", got, x.useless)
			}
		})
	}
}

// told is closed with the first line of a log.
type told chan struct{}

func (c told) Write(p []byte) (int, error) {
	select {
	case <-c:
	default:
		close(c)
	}
	return len(p), nil
}

// TestWorkerWaitsForMemory: a filter for which there is no worker has one when there is room again.
func TestWorkerWaitsForMemory(t *testing.T) {
	g := newKept(t, &inProcess{})
	g.monitor = newMonitor()
	said := make(told)
	g.log = slog.New(slog.NewTextHandler(said, nil))
	free := g.keep.free
	g.keep.free = nil
	null, err := os.Open(os.DevNull) // a filter that is gone
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	l := &listener{guard: g, fd: int(null.Fd()), spare: make(chan *worker, 4)}
	l.spawn()
	<-said
	g.keep.mu.Lock()
	g.keep.free = free
	g.keep.mu.Unlock()
	for l.total.Load() > 0 {
		time.Sleep(time.Millisecond)
	}
	if len(l.spare) != 1 {
		t.Error("nobody has tried to take up a call")
	}
}

// says answers each UVM call with a status.
type says struct {
	*inProcess
	off    int
	status uint32
	errno  syscall.Errno
}

func (d *says) Exec(_ Target, call *rm.Call) syscall.Errno {
	rm.PutU32(call.Outer, d.off, d.status)
	return d.errno
}

// TestUndoRange: that a range is away again nobody believes but of UVM.
func TestUndoRange(t *testing.T) {
	for _, x := range []struct {
		status uint32
		errno  syscall.Errno
		want   outcome
	}{{rm.StatusOK, 0, undone}, {rm.StatusInvalidAddress, 0, undone}, {rm.StatusInvalidArgument, 0, unknown},
		{rm.StatusOK, unix.EINTR, unknown}} {
		d := &says{inProcess: &inProcess{}, status: x.status, errno: x.errno}
		g := newFakeGuard(t, d)
		form, _ := g.abi.UVM(rm.UVMFree)
		d.off = form.Status
		if got := g.undoRange(Target{}, &file{}, addresses{1 << 20, 2 << 20}); got != x.want {
			t.Errorf("%#x, %v: %d, want %d", x.status, x.errno, got, x.want)
		}
	}
}

// TestContradictoryBooks: of books that contradict themselves it is known whose they are, so that somebody is told.
func TestContradictoryBooks(t *testing.T) {
	v, err := ReadBooks(map[journal.Key][]byte{
		{Kind: bookConfig}:        []byte(`{"log":"/run/cgpu/log/a.log"}`),
		{Kind: bookObject, ID: 1}: []byte(`{"charge":7}`),
	})
	if !errors.Is(err, errBooks) || v == nil || !strings.HasSuffix(v.Config.Log, "a.log") {
		t.Errorf("%+v, %v", v, err)
	}
}

// TestUndoneRanges: of each call by which UVM makes a range the next guard frees it, since others may have the address space.
func TestUndoneRanges(t *testing.T) {
	for _, cmd := range []uint32{rm.UVMCreateExternal, rm.UVMMapDynamicRegion, rm.UVMAllocSemaphorePool} {
		d := &fakeDriver{}
		g := newFakeGuard(t, d)
		c, _ := newFakeUVMCall(t, g)
		c.file.strong = c.fd
		g.files.list = []*file{c.file}
		o, _ := uvmCall(g, cmd, 4<<20, 2<<20, 0)
		got := g.settleUVM(Target{FD: c.fd}, &flight{}, &rm.Call{Cmd: cmd, Outer: o})
		if got != undone || !slices.Equal(d.calls, []uint32{rm.UVMFree}) {
			t.Errorf("%#x: %d, calls %#x", cmd, got, d.calls)
		}
	}
}
