package guard

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// ownClient is an RM client of the guard's own, with a device and a subdevice of each GPU of the container. Through it the
// guard asks the driver what processes hold (audit.go), pauses and resumes channels (duty.go) and hears of context switches
// (fecs.go).
type ownClient struct {
	g       *Guard
	target  Target
	client  uint32
	devices []uint32      // in the order of g.gpus
	subs    []uint32      // subdevices
	bar1    []quota.Bytes // how large it is; 0: not known
	next    uint32        // handle
}

const (
	classRootClient = 0x41
	classDevice     = 0x80
	classSubdevice  = 0x2080

	controlAttachIDs = 0x215 // NV0000_CTRL_CMD_GPU_ATTACH_IDS
	attachIDsSize    = 132
	firstOwnHandle   = 0xcaf10000
)

// ownClient returns the guard's client, made when it is first asked for. It costs 0.7 ms for each GPU (H200).
func (g *Guard) ownClient() (*ownClient, error) {
	g.ownMu.Lock()
	defer g.ownMu.Unlock()
	if g.own != nil {
		return g.own, nil
	}
	a, err := g.newOwnClient()
	if err != nil {
		return nil, fmt.Errorf("make an RM client: %w", err)
	}
	g.own = a
	return a, nil
}

func (g *Guard) newOwnClient() (_ *ownClient, err error) {
	a := &ownClient{g: g, target: Target{FD: -1}, next: firstOwnHandle}
	if g.driver.Native() {
		if a.target.FD, err = unix.Open(g.cfg.ControlNode.HostPath, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return nil, fmt.Errorf("open %s: %w", g.cfg.ControlNode.HostPath, err)
		}
	} else if a.target.File, err = g.driver.OpenFile(NodeControl, 0); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil { // the client goes with its file
			a.target.done()
			if a.target.File != 0 {
				g.driver.CloseFile(a.target.File)
			}
		}
	}()
	if a.client, err = a.alloc(0, 0, classRootClient, make([]byte, 4)); err != nil {
		return nil, err
	}
	ids := make([]byte, attachIDsSize)
	for i := range rm.GPUIDListLen {
		id := uint32(rm.GPUIDUnused)
		if i < len(g.gpus) {
			id = g.gpus[i].id
		}
		rm.PutU32(ids, 4*i, id)
	}
	_, _ = g.control(a.target, a.client, a.client, controlAttachIDs, ids) // fails when they are attached already
	for _, x := range g.gpus {
		info := make([]byte, idInfoSize)
		rm.PutU32(info, 0, x.id)
		if s, e := g.control(a.target, a.client, a.client, controlGetIDInfoV2, info); e != 0 || s != rm.StatusOK {
			return nil, fmt.Errorf("identify GPU %#x: %s", x.id, rm.StatusName(s))
		}
		params := make([]byte, 56) // NV0080_ALLOC_PARAMETERS
		rm.PutU32(params, rm.DeviceID, rm.U32(info, idInfoInstance))
		dev, err := a.alloc(a.client, a.handle(), classDevice, params)
		if err != nil {
			return nil, err
		}
		sub, err := a.alloc(dev, a.handle(), classSubdevice, make([]byte, 4))
		if err != nil {
			return nil, err
		}
		a.devices, a.subs = append(a.devices, dev), append(a.subs, sub)
		a.bar1 = append(a.bar1, a.bar1Size(sub))
	}
	return a, nil
}

// handle makes up a name for a new object.
func (a *ownClient) handle() uint32 {
	a.next++
	return a.next
}

// alloc makes an object of the guard's own.
func (a *ownClient) alloc(parent, handle, class uint32, params []byte) (uint32, error) {
	form, ok := a.g.abi.AllocForm(48)
	if !ok {
		form, _ = a.g.abi.AllocForm(32)
	}
	outer := make([]byte, form.Size)
	rm.PutU32(outer, rm.AllocRoot, a.client)
	rm.PutU32(outer, rm.AllocParent, parent)
	rm.PutU32(outer, rm.AllocObject, handle)
	rm.PutU32(outer, rm.AllocClass, class)
	call := rm.Call{Cmd: 3<<30 | uint32(form.Size)<<16 | 'F'<<8 | rm.EscAlloc, Outer: outer}
	if len(params) > 0 {
		call.Blocks = []rm.Block{{In: -1, Off: rm.AllocParams, Data: params}}
	}
	e := a.g.driver.Exec(a.target, &call)
	if s := rm.U32(outer, form.StatusOff); e != 0 || s != rm.StatusOK {
		return 0, fmt.Errorf("allocate %s: %s, errno %d", rm.ClassName(class), rm.StatusName(s), e)
	}
	return rm.U32(outer, rm.AllocObject), nil
}
