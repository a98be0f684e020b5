// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

const (
	newDevice   = 0x5d000001
	belowAbsent = 0x5d0000e0
	belowNew    = 0x5d0000e1
)

func deviceObject(handle uint32) object {
	return object{handle: handle, parent: fakeClient, class: rmclient.ClassDevice, kind: rm.ClassDevice, gpu: 0}
}

// TestChildrenAnyOrder: what is below an object ends with it, in whatever order records of both came, and went. What is left of one would
// vouch for what is made under its handle later (isThere).
func TestChildrenAnyOrder(t *testing.T) {
	for name, before := range map[string]func(a *account){
		"nothing":                     func(*account) {},
		"a record that came before":   func(a *account) { a.addObject(fakeClient, madeBelow(belowAbsent, newDevice), 0, 0, 4096) },
		"another under the same name": func(a *account) { a.addObject(fakeClient, madeBelow(newDevice, fakeDevice), 0, 0, 4096) },
		"both": func(a *account) {
			a.addObject(fakeClient, madeBelow(newDevice, fakeDevice), 0, 0, 4096)
			a.addObject(fakeClient, madeBelow(belowAbsent, newDevice), 0, 0, 4096)
		},
	} {
		g := withClient(newFakeGuard(t, &fakeDriver{}))
		a := g.account
		before(a)
		a.addObject(fakeClient, deviceObject(newDevice), noGPU, 0, 0)
		a.freeObject(fakeClient, belowAbsent)
		if n := a.clients[fakeClient].children[newDevice]; n != 0 {
			t.Errorf("%s: a new device has %d children", name, n)
		}
		a.addObject(fakeClient, memoryObject(belowNew, newDevice), 0, 0, 4096)
		if !a.mayHoldNotifier(fakeClient, newDevice) {
			t.Errorf("%s: a device with memory below it may hold no notifier", name)
		}
		a.freeObject(fakeClient, newDevice)
		if _, known := a.lookup(fakeClient, belowNew); known {
			t.Errorf("%s: what was below a device is still there", name)
		}
		a.freeObject(fakeClient, fakeDevice)
		if c := a.clients[fakeClient]; len(c.objects) != 0 || len(c.children) != 0 || a.objects != 0 || a.hostUsed != 0 {
			t.Errorf("%s: %d objects, children %v, %v are left", name, a.objects, c.children, a.hostUsed)
		}
	}
}

// madeBelow is host memory that a task was let make.
func madeBelow(handle, parent uint32) object {
	o := madeInTask(handle)
	o.parent = parent
	return o
}

// TestReplacedWithAllBelow: where the driver grants a name, what the account has under it has ended, and all below.
func TestReplacedWithAllBelow(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	a := g.account
	a.addObject(fakeClient, deviceObject(newDevice), noGPU, 0, 0)
	a.addObject(fakeClient, memoryObject(belowNew, newDevice), 0, 0, 4096)
	a.addObject(fakeClient, deviceObject(newDevice), noGPU, 0, 0)
	if _, known := a.lookup(fakeClient, belowNew); known {
		t.Error("what was below it is still there")
	}
	wantUsage(t, a, 0, 8*quota.MiB)
}

// TestNoMemoryBelowNothing: a call for host memory that the driver refuses because of its parent leaves no record, of which that would seem
// to have it below.
func TestNoMemoryBelowNothing(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	g.account.addObject(fakeClient, object{handle: belowAbsent, parent: fakeDevice, class: rmclient.ClassSubdevice, kind: rm.ClassSubdevice,
		gpu: noGPU}, noGPU, 0, 0)
	f := newFakeCall(t, g, fakeControl)
	for parent, want := range map[uint32]uint32{newDevice: rm.StatusObjectNotFound, fakeClient: rm.StatusObjectNotFound,
		0: rm.StatusObjectNotFound, belowAbsent: rm.StatusInvalidObjectParent, fakeMemory: rm.StatusInvalidObjectParent} {
		for _, class := range []uint32{classSystem, classOSDescriptor} {
			rep := noteMemory(f, class, parent, belowNew)
			if _, known := g.account.lookup(fakeClient, belowNew); rep.resume || known || f.statusWord() != want {
				t.Errorf("below %#x: %s", parent, rm.StatusName(f.statusWord()))
			}
		}
	}
	if rep := noteMemory(f, classSystem, fakeDevice, belowNew); !rep.resume {
		t.Errorf("below a device: %s", rm.StatusName(f.statusWord()))
	}
}
