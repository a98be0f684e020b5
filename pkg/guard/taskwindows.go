// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Host memory of RM_ALLOC_MEMORY comes with a mapping, unless the call says no: the driver prepares the mmap of a file that the call names
// (RmIoctl in escape.c). What was mapped then keeps the pages past RM_FREE (nv_free_pages), until the file is closed (nv_alloc_release,
// nvidia_ctl_close), and no cgroup counts them. The call runs in the task, so the guard has no handle for it as for other windows: it
// follows the file, and until that is gone the charge stays (docs/adr/0010-windows.md).

var errTooManyWindows = errors.New("the container, or the memory, has as many mappings as it may: pin fewer, larger pieces")

// windowOfTask is the window of a call of RM_ALLOC_MEMORY for an object; nil: nothing is mapped, or what is has a window. as is what the
// driver knows the file by.
func (g *Guard) windowOfTask(c *trappedCall, class, client, handle uint32) (w *window, as uint32, err error) {
	const none = ^uint32(0)
	o := c.call.Outer
	if class != classSystem || !rm.AllocMemoryMaps(rm.U32(o, rm.AllocMemoryFlags)) {
		return nil, none, nil
	}
	fd, as, err := c.fileNamed(rm.U32(o, rm.AllocMemoryFD), nodeControl)
	if errors.Is(err, unix.EBADF) || errors.Is(err, unix.EINVAL) { // the driver finds none there either
		return nil, none, nil
	}
	if err != nil {
		return nil, none, err
	}
	defer unix.Close(fd)
	if g.account.hasWindowOn(client, handle, g.files.self, fd) { // a call that was interrupted comes again
		return nil, as, nil
	}
	w = &window{}
	if old, _ := g.account.lookup(client, handle); !g.account.roomForReferences(old.charge, 0) || !g.reserveWindow(w, ^quota.Bytes(0)) {
		return nil, none, errTooManyWindows
	}
	if w.file, err = newWeakRef(fd); err != nil {
		g.account.unreserveWindow(w)
		return nil, none, err
	}
	return w, as, nil
}

// dropTaskWindow forgets a window that came to nothing, if there is one.
func (g *Guard) dropTaskWindow(w *window) {
	if w != nil {
		w.file.close(nil) // the books have not named it
		g.account.unreserveWindow(w)
	}
}

// addTaskWindow records a window of windowOfTask. False: there is none, or its memory is gone meanwhile, and so is its RM client.
func (a *account) addTaskWindow(client, memory uint32, w *window) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if w == nil || c == nil || c.objects[memory] == nil {
		return false
	}
	o := c.objects[memory]
	a.chargeWindow(w, o.charge)
	o.windows = append(o.windows, w)
	a.books.note(w)
	a.books.note(o)
	return true
}

// hasWindowOn reports that memory has a window on a file of the guard.
func (a *account) hasWindowOn(client, memory uint32, self, fd int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	return c != nil && c.objects[memory] != nil && hasWindowOn(c.objects[memory].windows, self, fd)
}
