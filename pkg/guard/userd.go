// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// userd is where a channel's user-driver page is: a memory object of its client, and an offset in it.
type userd struct {
	memory uint32
	offset uint64
}

const userdPage = 4096

var errNoUserd = errors.New("the channel has no page of its own that could be read")

func pageError(what string, status uint32, errno unix.Errno) error {
	return fmt.Errorf("%s: %s, errno %d", what, rm.StatusName(status), errno)
}

// openUserPage gets a handle of the guard's own on the memory, as for a UVM mapping (uvm.go), and maps the page. The channel named the
// memory when it was made. If its handle is another object's by now, the guard must not keep that: it is not what the channel is charged
// for.
func (g *Guard) openUserPage(gpu int, ch gpusched.Channel) (*gpusched.UserPage, error) {
	at := objectOf(ch).userd
	if at.memory == 0 {
		return nil, nil
	}
	start := at.offset &^ (userdPage - 1)
	off := int(at.offset - start)
	if off%4 != 0 { // the driver does not look; a word that is not aligned is a fault on some processors
		return nil, errNoUserd
	}
	own, err := g.guardClient()
	if err != nil {
		return nil, err
	}
	c := g.account.client(ch.Client)
	if c == nil {
		return nil, errNoUserd
	}
	t, ok := g.fileOf(c)
	if !ok {
		return nil, errNoUserd
	}
	defer t.Done()
	// Or the handle is another object's by the time of the dup. A call that takes long is not waited for: other channels are to be seen.
	if !c.tryLockCalls() {
		return nil, errNoUserd
	}
	defer c.calls.Unlock()
	obj, ok := g.account.acquireObject(c, at.memory)
	defer g.account.releaseObject(obj)
	if !ok || !obj.isMemory() || !g.account.roomForReferences(obj.charge, 0) || obj.charge != objectOf(ch).charge ||
		off > userdPage-gpusched.UserWords {
		return nil, errNoUserd
	}
	if g.isSecretlyUserShared(t, ch.Client, obj) {
		return nil, errNoUserd
	}
	handle, s, e := own.NewHandle(), uint32(0), unix.Errno(0)
	if status, errno := g.whileShared(t, ch.Client, []openRight{{at.memory, accessDup}}, func() {
		s, e = g.dupToMap(own, handle, own.Device(gpu), ch.Client, at.memory)
	}); errno != 0 || status != rm.StatusOK {
		return nil, pageError("open a channel's page", status, errno)
	}
	if e != 0 || s != rm.StatusOK {
		return nil, pageError("refer to a channel's page", s, e)
	}
	held := g.account.addReference(obj.charge)
	g.books.put(bookHeld, uint64(handle), true)
	node := ""
	if obj.class == classVidmem {
		node = g.cfg.GPUs[gpu].Node.HostPath
	}
	mem, err := own.Map(own.Device(gpu), handle, start, userdPage, node)
	if err != nil {
		g.closeUserPage(own, nil, handle, held)
		return nil, err
	}
	return &gpusched.UserPage{Words: mem[off:], Close: func() { g.closeUserPage(own, mem, handle, held) }}, nil
}

// closeUserPage lets go of a page. What cannot be freed stays charged.
func (g *Guard) closeUserPage(own *rmclient.Client, mem []byte, handle uint32, held *charge) {
	_ = unix.Munmap(mem)
	if s, e := own.Free(handle); e != 0 || s != rm.StatusOK {
		g.logOnce("userdend", "cannot let go of a channel's page", "status", rm.StatusName(s), "errno", e)
		return
	}
	g.books.put(bookHeld, uint64(handle), nil)
	g.account.dropReference(held)
}
