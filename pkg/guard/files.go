// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// file is an open file of the container that the guard has to recognise again: one that RM clients were made on, that
// lent its identity, that holds exported memory, or that is a UVM address space.
//
// RM binds a client to its open file (rmclientValidate_IMPL), so the guard follows files, not descriptor numbers. For
// nvidiactl it holds no descriptor, because that would keep the file and with it the container's memory alive: the file
// sits in an epoll instance of its own, which compares with kcmp(KCMP_EPOLL_TFD) and forgets it when the last descriptor
// anywhere is closed. nvidia-uvm cannot be polled; those files are held and torn down explicitly, see uvm.go.
type file struct {
	entry
	order atomic.Uint64 // among those that are followed
	kind  nodeKind
	minor int

	weakRef     // epfd is -1 if there is none
	strong  int // descriptor held by the guard, -1 if none

	mu         sync.Mutex
	pending    *pendingRoot               // a root alloc that runs in the task
	registered bool                       // has issued REGISTER_FD: must not do a root alloc
	rooted     bool                       // has, or may have, a live client
	clients    int                        // verified live clients
	exports    []export                   // what is exported into this file
	maps       map[gpuUUID][]*uvmMap      // external mappings of this UVM address space, in the order of their addresses
	spaces     map[gpuUUID]bool           // GPUs for which an RM address space is registered in this one
	channels   map[channelName]uvmChannel // that are registered in it
	ranges     map[uint64]*uvmRange       // of addresses, that calls have made, by their beginning
	groups     map[uint64]bool            // range groups
	zombies    atomic.Bool                // it may have managed memory of processes that are over
	cleaning   atomic.Bool                // UVM is asked to free that
	uvm        sync.Mutex                 // held over a call that changes them, so that they are recorded in UVM's order
	ended      bool                       // with uvm held: it was torn down
	tornDown   chan struct{}              // with Guard.sweepMu held: closed when that is done; nil: it is not under way
	exporter   bool                       // objects were exported into it here
	owners     map[int]bool               // processes that used this UVM address space
	sim        simFile                    // with the simulated driver
}

// weakRef is a reference to an open file that does not keep it open: an epoll instance forgets a file when its last descriptor and its last
// mapping, in whatever process, are gone. By then the mapping's pages are, too (the kernel drops the file after them).
type weakRef struct{ epfd, tfd int }

func newWeakRef(fd int) (weakRef, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return weakRef{}, fmt.Errorf("follow a file: %w", err)
	}
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{}); err != nil {
		_ = unix.Close(ep)
		return weakRef{}, fmt.Errorf("follow a file: %w", err)
	}
	return weakRef{ep, fd}, nil
}

// compare compares a file of the guard with it, see kcmpWeak.
func (w weakRef) compare(self, fd int) (order int, e unix.Errno) {
	return kcmpWeak(self, fd, w.epfd, w.tfd)
}

// alive reports that the file is still open, or mapped, somewhere.
func (w weakRef) alive(self int) bool {
	_, e := w.compare(self, w.epfd)
	return e != unix.ENOENT
}

func (w weakRef) close(b *books) { b.close(w.epfd) }

// fileTable is the set of files that the guard follows.
type fileTable struct {
	books *books
	self  int // pid of the guard
	mu    sync.Mutex
	list  []*file // in the kernel's order of open files (kcmp), in which a search needs few comparisons
	last  int     // where the last search ended, and the next one begins: mostly it is for the same file
	// closed are those that were seen to be closed for good, and wait for reap: they have no place in that order any more.
	closed   []*file
	closings uint64 // how many of these there were
}

// maxFiles bounds the files of each kind that are followed for one container: every one costs a descriptor.
const maxFiles = 1024

var errTooManyFiles = errors.New("the container has too many NVIDIA files open")

// find recognises an open file by a descriptor of the guard. Nil: it is not followed.
func (t *fileTable) find(fd int, kind nodeKind) *file {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, f := t.search(fd); f != nil && f.kind == kind {
		return f
	}
	return nil
}

// search finds an open file, or where it would stand.
func (t *fileTable) search(fd int) (at int, f *file) {
	from, to := 0, len(t.list)
	for i := min(t.last, to-1); from < to; i = (from + to) / 2 {
		switch order, e := t.order(fd, t.list[i]); {
		case e == unix.ENOENT: // closed for good: another file may be in its place in memory, so it would lead astray
			t.closed = append(t.closed, t.list[i])
			t.closings++
			t.list[i].order.Store(lastOrder + t.closings)
			t.books.note(t.list[i])
			t.list = slices.Delete(t.list, i, i+1)
			from, to = 0, len(t.list)
		case e != 0:
			return from, nil
		case order == kcmpEqual:
			t.last = i
			return i, t.list[i]
		case order == kcmpLess:
			to = i
		default:
			from = i + 1
		}
	}
	return from, nil
}

// order compares an open file with a followed one.
func (t *fileTable) order(fd int, f *file) (int, unix.Errno) {
	if f.strong >= 0 {
		return kcmpStrong(t.self, fd, f.strong)
	}
	return f.compare(t.self, fd)
}

// follow returns the record of an open file, made if there is none. Of nvidia-uvm it keeps a descriptor. name tells the driver of a file
// that is new.
func (t *fileTable) follow(fd int, n node, name func(nodeKind, int) (uint32, error)) (*file, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at, f := t.search(fd)
	if f != nil {
		return f, nil
	}
	if t.countLocked(n.kind) >= maxFiles {
		return nil, errTooManyFiles
	}
	f = &file{kind: n.kind, minor: n.minor, weakRef: weakRef{epfd: -1}, strong: -1}
	if n.kind == nodeUVM {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, fmt.Errorf("keep a file: %w", err)
		}
		f.strong, f.owners, f.maps = d, map[int]bool{}, map[gpuUUID][]*uvmMap{}
		f.spaces, f.channels = map[gpuUUID]bool{}, map[channelName]uvmChannel{}
	} else {
		var err error
		if f.weakRef, err = newWeakRef(fd); err != nil {
			return nil, err
		}
	}
	id, err := name(n.kind, n.minor)
	if err != nil {
		f.letGo(nil)
		return nil, err
	}
	f.sim = simFile(id)
	t.list = slices.Insert(t.list, at, f)
	t.setOrder(at)
	return f, nil
}

// lastOrder is beyond the order of files that are not closed for good.
const lastOrder = 1 << 62

// setOrder gives a file that is new in the list a number between its neighbours', by which the next guard finds its place: weak references
// cannot be compared with each other. Where there is none left all get new ones.
func (t *fileTable) setOrder(at int) {
	low, high := uint64(0), uint64(lastOrder)
	if at > 0 {
		low = t.list[at-1].order.Load()
	}
	if at+1 < len(t.list) {
		high = t.list[at+1].order.Load()
	}
	if high-low > 1 {
		t.list[at].order.Store(low + (high-low)/2)
		t.books.note(t.list[at])
		return
	}
	t.books.noteOrder(t.list)
}

func (t *fileTable) countLocked(kind nodeKind) (n int) {
	for _, list := range [][]*file{t.list, t.closed} {
		for _, f := range list {
			if f.kind == kind {
				n++
			}
		}
	}
	return n
}

// reap removes and returns the files that are closed for good. Who has them closes them (fileClosed).
func (t *fileTable) reap() []*file {
	t.mu.Lock()
	defer t.mu.Unlock()
	dead := t.closed
	t.closed = nil
	t.list = slices.DeleteFunc(t.list, func(f *file) bool {
		if f.epfd < 0 {
			return false
		}
		gone := !f.alive(t.self)
		if gone {
			dead = append(dead, f)
		}
		return gone
	})
	return dead
}

// remove forgets a file and lets go of it, once: the number of its descriptor may be another's by the second time.
func (t *fileTable) remove(f *file) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.list, f)
	if i < 0 {
		return
	}
	t.list = slices.Delete(t.list, i, i+1)
	t.books.end(f)
	f.letGo(t.books)
}

// letGo closes what the guard has of a file.
func (f *file) letGo(b *books) {
	if f.epfd >= 0 {
		f.close(b)
	}
	if f.strong >= 0 {
		b.close(f.strong)
	}
}

// snapshot copies the list.
func (t *fileTable) snapshot() []*file {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Concat(t.list, t.closed)
}

// count is the number of followed files.
func (t *fileTable) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.list) + len(t.closed)
}
