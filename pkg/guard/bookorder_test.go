// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// What is tried here are changes between whose parts a commit may fall.

// whileCommitted calls change again and again, while another thread commits what is noted and checks the books that it leaves.
func whileCommitted(t *testing.T, g *Guard, change func(), check func(entries map[journal.Key][]byte) error) {
	t.Helper()
	var wrong atomic.Bool
	stop := g.books.watchCommits(func() error {
		entries, err := g.keep.entries()
		if err == nil {
			err = check(entries)
		}
		wrong.Store(err != nil)
		return err
	})
	for until := time.Now().Add(time.Second); time.Now().Before(until) && !wrong.Load(); change() {
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

// entries are those of the journal as it is now.
func (k *keep) entries() (map[journal.Key][]byte, error) {
	text, err := readDescriptor(k.memory.Files()[k.memory.Active().Load()&1])
	if err != nil {
		return nil, err
	}
	entries, _, _, err := journal.Parse(text)
	return entries, err
}

// eachEntry calls f with the entries of a kind.
func eachEntry[T any](entries map[journal.Key][]byte, kind uint8, f func(id uint64, v T) error) error {
	for key, text := range entries {
		if key.Kind != kind {
			continue
		}
		var v T
		if err := json.Unmarshal(text, &v); err != nil {
			return err
		}
		if err := f(key.ID, v); err != nil {
			return err
		}
	}
	return nil
}

// TestWindowsNameOpenFiles: the file of a window is followed by a descriptor that is open for as long as the books name it.
func TestWindowsNameOpenFiles(t *testing.T) {
	g := newKept(t, &inProcess{})
	a := g.account
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(event)
	whileCommitted(t, g, func() {
		file, err := newWeakRef(event)
		if err != nil {
			t.Error(err)
			return
		}
		w := &window{file: file, gone: true}
		a.mu.Lock()
		a.loosenLocked(w)
		a.mu.Unlock()
		g.books.commit(nil)
		a.removeGoneWindows()
	}, func(entries map[journal.Key][]byte) error {
		return eachEntry(entries, bookWindow, func(id uint64, v handover.Window) error {
			if _, err := unix.FcntlInt(uintptr(v.File.Epoll), unix.F_GETFD, 0); err != nil {
				return fmt.Errorf("window %d: descriptor %d: %w", id, v.File.Epoll, err)
			}
			return nil
		})
	})
}

// TestMappingsDoNotOverlap: what is left of a mapping is in the books when that is no more in them, and not before.
func TestMappingsDoNotOverlap(t *testing.T) {
	g := newKept(t, &inProcess{})
	f := &file{kind: nodeUVM, weakRef: weakRef{epfd: -1}, maps: map[gpuUUID][]*uvmMap{}}
	ch := &charge{size: 1, references: 1}
	whileCommitted(t, g, func() {
		g.recordMapping(f, uvmMap{addresses: addresses{0, 12}, charge: g.account.addReference(ch)})
		g.recordUnmapping(f, addresses{4, 8}, gpuUUID{})
		g.recordMapping(f, uvmMap{addresses: addresses{2, 6}, charge: g.account.addReference(ch)})
	}, func(entries map[journal.Key][]byte) error {
		var covered [12]bool
		return eachEntry(entries, bookMap, func(id uint64, v bookedMap) error {
			for at := v.Base; at < v.End; at++ {
				if covered[at] {
					return fmt.Errorf("what is mapped at %d is in the books twice", at)
				}
				covered[at] = true
			}
			return nil
		})
	})
}

// TestFilesInOrder: files are in the books in the order in which they are searched, also when all of them have new numbers.
func TestFilesInOrder(t *testing.T) {
	g := newKept(t, &inProcess{})
	var list []*file
	for i := range 64 {
		f := &file{minor: i + 1, weakRef: weakRef{epfd: -1}}
		f.order.Store(uint64(i))
		list = append(list, f)
		g.books.note(f)
	}
	g.files.list = list
	g.books.commit(nil)
	few := false
	whileCommitted(t, g, func() {
		g.files.mu.Lock()
		defer g.files.mu.Unlock()
		g.books.commit(nil)
		if g.files.list = list; few {
			g.files.list = list[:len(list)/2]
		}
		for i, f := range g.files.list { // as many files that were opened and closed leave it: there is no number between 9 and 11
			f.order.Store(uint64(min(i, 9)) + uint64(i)/11)
		}
		few = !few
		g.files.setOrder(10)
	}, func(entries map[journal.Key][]byte) error {
		var orders [64]uint64
		err := eachEntry(entries, bookFile, func(_ uint64, v bookedFile) error {
			orders[v.Minor-1] = v.Order
			return nil
		})
		for i := range len(orders) / 2 {
			if i > 0 && err == nil && orders[i] <= orders[i-1] {
				err = fmt.Errorf("file %d of the list has the number %#x, the one before %#x", i, orders[i], orders[i-1])
			}
		}
		return err
	})
}

// booked are the entries after a commit.
func booked(t *testing.T, g *Guard) map[journal.Key][]byte {
	t.Helper()
	g.books.commit(nil)
	entries, err := g.keep.entries()
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// TestAstrayIsBooked: that a root alloc went elsewhere the next guard knows, too: one in an hour is forgiven.
func TestAstrayIsBooked(t *testing.T) {
	_, g := newFakeRM(t)
	g.filters = map[*listener]bool{}
	if err := g.newKeep(nil); err != nil {
		t.Fatal(err)
	}
	_, p := ask(t, g)
	for i := range 2 {
		booked(t, g)
		g.rootWentAstray(p)
		if err := eachEntry(booked(t, g), bookProcess, func(_ uint64, v handover.Process) error {
			if v.AstrayAt != g.astrayAt.Load() || v.AllEndedAt != g.allEndedAt.Load() || (v.AllEndedAt != 0) != (i > 0) {
				return fmt.Errorf("%+v", v)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}

// channelInSpace makes a context in an address space that UVM has, too. register has UVM keep its channel.
func (c *child) channelInSpace() (register func()) {
	c.t.Helper()
	open := c.do("open")
	a, handle := open[0], open[1]
	space := c.do("space", a)[0]
	made := c.do("contextin", a, space, engineGR)
	uvm := c.do("uvm")[0]
	c.do("addspace", uvm, a, handle, space)
	return func() {
		c.t.Helper()
		c.do("addchannel", uvm, a, handle, made[1])
	}
}

// TestEndOfSpaceIsBooked: as long as an address space is being ended, the books say what it has, by which the next guard ends it.
func TestEndOfSpaceIsBooked(t *testing.T) {
	r := newRig(t)
	b := r.keepBooks(1)
	c := r.start()
	register := c.channelInSpace()
	register()
	var said atomic.Pointer[error]
	look := func(call *rm.Call) {
		if call.Cmd != rm.UVMUnregisterVASpace || !rm.UVMShaped(call.Cmd) {
			return
		}
		r.guard.books.commit(nil)
		entries, err := b.entries(true)
		if err == nil {
			err = eachEntry(entries, bookFile, func(_ uint64, v bookedFile) error {
				if len(v.Channels) > 0 && len(v.Spaces) == 0 {
					return errors.New("a file with channels, and no address space")
				}
				return nil
			})
		}
		said.Store(&err)
	}
	r.seen.Store(&look)
	c.kill()
	r.empty()
	if err := said.Load(); err == nil {
		t.Error("the address space is not ended by itself")
	} else if *err != nil {
		t.Error(*err)
	}
}

// TestChannelThatIsNotKept: the next guard takes no channel for registered of which only this was asked.
func TestChannelThatIsNotKept(t *testing.T) {
	r := newRig(t)
	b := r.keepBooks(1)
	c := r.start()
	register := c.channelInSpace()
	kept := -1
	look := func(call *rm.Call) {
		if call.Cmd != rm.UVMRegisterChannel || !rm.UVMShaped(call.Cmd) {
			return
		}
		r.guard.books.commit(nil)
		next, err := b.revive(true)
		if err != nil {
			t.Error(err)
			return
		}
		defer letGo(next)
		kept = 0
		for _, of := range next.account.clients {
			for _, o := range of.channels {
				if o.retained != nil {
					kept++
				}
			}
		}
	}
	r.seen.Store(&look)
	register()
	if kept != 0 {
		t.Errorf("%d channels are kept", kept)
	}
	c.kill()
	r.empty()
}

// TestFileOfNoClient: a file of which the books say that it has a client has one there.
func TestFileOfNoClient(t *testing.T) {
	g := newKept(t, &inProcess{})
	g.cfg.Settings.Managed = device.ManagedAllow // else it begins to look at maps, and does so longer than the test
	f := &file{weakRef: weakRef{epfd: -1}}
	whileCommitted(t, g, func() {
		f.mu.Lock()
		made := g.clientFound(f, 1, os.Getpid(), 0)
		f.mu.Unlock()
		g.clientGone(made)
	}, func(entries map[journal.Key][]byte) error {
		clients := 0
		_ = eachEntry(entries, bookClient, func(uint64, handover.Client) error { clients++; return nil })
		return eachEntry(entries, bookFile, func(_ uint64, v bookedFile) error {
			if v.Rooted != (clients > 0) {
				return fmt.Errorf("it has a client: %v, and %d clients", v.Rooted, clients)
			}
			return nil
		})
	})
}

// TestManagedIsBooked: what is managed memory of one process or of another one is in the books all the while, and what of it was agreed to.
func TestManagedIsBooked(t *testing.T) {
	g := newKept(t, &inProcess{})
	spans := func(entries map[journal.Key][]byte) (list []handover.Span, err error) {
		err = eachEntry(entries, bookSpans, func(_ uint64, v []handover.Span) error {
			list = append(list, v...)
			return nil
		})
		return list, err
	}
	g.managed.setSpans(1, []span{{base: 1, end: 2}})
	if list, err := spans(booked(t, g)); err != nil || len(list) != 1 || list[0].Agreed {
		t.Fatal(list, err)
	}
	g.enforceManaged()
	if list, err := spans(booked(t, g)); err != nil || len(list) != 1 || !list[0].Agreed {
		t.Error(list, err)
	}
	from, to := 1, 2
	whileCommitted(t, g, func() {
		g.moveSpans(from, to)
		from, to = to, from
	}, func(entries map[journal.Key][]byte) error {
		list, err := spans(entries)
		if err == nil && len(list) == 0 {
			err = errors.New("it is nobody's")
		}
		return err
	})
}
