// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// testAccount has a sliced GPU with the given limit and a native one.
func testAccount(limit quota.Bytes) *account {
	return newAccount([]GPU{{GPU: device.GPU{Index: 0}, Limit: limit}, {GPU: device.GPU{Index: 1}, Native: true}})
}

const testClient = 0xc1d00001

func memoryObject(handle, parent uint32) object {
	return object{handle: handle, parent: parent, class: classVidmem, kind: rm.ClassVidmem, gpu: noGPU}
}

// holdOf is what a call that maps or exports an object does, and dupOf what one does that makes a second handle on it.
func (a *account) holdOf(client, handle uint32) *charge {
	c := a.client(client)
	if c == nil {
		return nil
	}
	o, _ := a.acquireObject(c, handle)
	defer a.releaseObject(o)
	return a.addReference(o.charge)
}

func (a *account) dupOf(client, parent, handle, srcClient, src uint32) {
	if c := a.client(srcClient); c != nil {
		o, _ := a.acquireObject(c, src)
		defer a.releaseObject(o)
		a.dupObject(client, parent, handle, o)
	}
}

func wantUsage(t *testing.T, a *account, gpu int, used quota.Bytes) {
	t.Helper()
	if u := a.usage(gpu).used; u != used {
		t.Errorf("GPU %d: used %v, want %v", gpu, u, used)
	}
}

func TestReserve(t *testing.T) {
	const max = ^quota.Bytes(0)
	for _, c := range []struct {
		name  string
		limit quota.Bytes
		have  quota.Bytes
		gpu   int
		size  quota.Bytes
		want  bool
	}{
		{"to the byte", 10 * quota.MiB, 4 * quota.MiB, 0, 6 * quota.MiB, true},
		{"one too many", 10 * quota.MiB, 4 * quota.MiB, 0, 6*quota.MiB + 1, false},
		{"wraps around", 10 * quota.MiB, 4 * quota.MiB, 0, max - 3*quota.MiB, false},
		{"everything", 10 * quota.MiB, 0, 0, max, false},
		{"nothing of a full card", quota.MiB, quota.MiB, 0, 0, true},
		{"a native card has no limit", 0, quota.GiB, 1, 1000 * quota.GiB, true},
		{"not even a native card wraps", 0, quota.GiB, 1, max, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := testAccount(c.limit)
			if !a.reserve(cost{gpu: c.gpu, size: c.have}, false) {
				t.Fatal("the start does not fit")
			}
			if got := a.reserve(cost{gpu: c.gpu, size: c.size}, true); got != c.want {
				t.Errorf("reserve: %v", got)
			}
			want := c.have
			if c.want {
				want += c.size
			}
			wantUsage(t, a, c.gpu, want)
			u := a.usage(c.gpu)
			if u.peak != want {
				t.Errorf("peak %v, want %v", u.peak, want)
			}
			if denied := u.denied == 1; c.gpu == 0 && denied == c.want {
				t.Errorf("denied %d", u.denied)
			}
		})
	}
}

// TestFreeOfAnAncestor frees what hangs below, however deep, and nothing beside it.
func TestFreeOfAnAncestor(t *testing.T) {
	a := testAccount(quota.GiB)
	a.addClient(testClient, 1, nil)
	add := func(h, parent uint32, gpu int, kind rm.ClassKind, size quota.Bytes) {
		o := object{handle: h, parent: parent, kind: kind, gpu: gpu}
		charge := noGPU
		if size > 0 {
			charge = 0
		}
		a.addObject(testClient, o, charge, 0, size)
	}
	add(1, testClient, 0, rm.ClassDevice, 0)
	add(2, 1, noGPU, rm.ClassSubdevice, 0)
	add(3, 2, noGPU, rm.ClassVidmem, 4*quota.MiB)
	add(4, 1, noGPU, rm.ClassTSG, quota.MiB)
	add(5, 4, noGPU, rm.ClassChannel, 0)
	add(6, testClient, 1, rm.ClassDevice, 0)
	add(7, 6, noGPU, rm.ClassVidmem, 2*quota.MiB)
	if got := a.gpuOf(testClient, 3); got != 0 {
		t.Errorf("memory below a subdevice is on GPU %d", got)
	}
	wantUsage(t, a, 0, 7*quota.MiB)
	a.freeObject(testClient, 1)
	wantUsage(t, a, 0, 2*quota.MiB)
	if a.objects != 2 || a.gpus[0].tsgs != 0 || a.gpus[0].channels != 0 {
		t.Errorf("%d objects, %d groups, %d channels left", a.objects, a.gpus[0].tsgs, a.gpus[0].channels)
	}
	a.freeObject(testClient, testClient)
	wantUsage(t, a, 0, 0)
	if a.objects != 0 || a.ownsClient(testClient) {
		t.Error("the client is still there")
	}
}

// TestEndlessChain stops at handles that are their own ancestors.
func TestEndlessChain(t *testing.T) {
	a := testAccount(quota.GiB)
	a.addClient(testClient, 1, nil)
	a.addObject(testClient, object{handle: 1, parent: 2, gpu: noGPU}, noGPU, 0, 0)
	a.addObject(testClient, object{handle: 2, parent: 1, gpu: noGPU}, noGPU, 0, 0)
	a.addObject(testClient, object{handle: 3, parent: 3, gpu: noGPU}, noGPU, 0, 0)
	for _, h := range []uint32{1, 2, 3} {
		if got := a.gpuOf(testClient, h); got != noGPU {
			t.Errorf("%d: GPU %d", h, got)
		}
		a.freeObject(testClient, h)
	}
	if a.objects != 0 {
		t.Errorf("%d objects left", a.objects)
	}
}

// TestMemoryOutlivesItsHandle: an exported file or a UVM mapping keeps the charge after RM_FREE (rm-abi 1.6).
func TestMemoryOutlivesItsHandle(t *testing.T) {
	a := testAccount(quota.GiB)
	f := &file{}
	a.addClient(testClient, 1, f)
	a.addClient(testClient+1, 2, nil)
	a.reserve(cost{gpu: 0, size: 4 * quota.MiB}, true)
	a.addObject(testClient, memoryObject(5, 1), 0, 4*quota.MiB, 2*quota.MiB)
	wantUsage(t, a, 0, 2*quota.MiB)
	ch := a.holdOf(testClient, 5)
	if ch == nil || a.holdOf(testClient, 6) != nil || a.holdOf(testClient+9, 5) != nil {
		t.Fatal("hold")
	}
	a.dupOf(testClient+1, 1, 9, testClient, 5)
	a.dropFile(f) // the process that made it is gone
	wantUsage(t, a, 0, 2*quota.MiB)
	if a.hasZombies() {
		t.Error("a dup is no zombie")
	}
	a.freeObject(testClient+1, 9)
	wantUsage(t, a, 0, 2*quota.MiB)
	if !a.hasZombies() {
		t.Error("memory without a handle is not seen")
	}
	a.importObject(testClient+1, 1, 10, export{charge: ch})
	if a.hasZombies() {
		t.Error("an imported handle did not end it")
	}
	a.freeObject(testClient+1, 10)
	a.dropReference(ch)
	wantUsage(t, a, 0, 0)
	if a.hasZombies() {
		t.Error("a zombie is left")
	}
}

// TestRoom: bounds are of one GPU. What is on a GPU that is not known counts on each.
func TestRoom(t *testing.T) {
	a := testAccount(0)
	c := a.addClient(testClient, 1, nil)
	a.insertObject(c, &object{handle: 1, parent: testClient, kind: rm.ClassDevice, gpu: 0})
	a.insertObject(c, &object{handle: 2, parent: testClient, kind: rm.ClassDevice, gpu: 1})
	for h := uint32(100); h < 164; h++ {
		a.insertObject(c, &object{handle: h, parent: 1, kind: rm.ClassTSG, gpu: noGPU})
		for i := uint32(0); i < vaSpacesPerTSG; i++ {
			a.insertObject(c, &object{handle: 1000*h + i, parent: 1, kind: rm.ClassVASpace, gpu: noGPU})
		}
	}
	for h := uint32(200); h < 711; h++ {
		a.insertObject(c, &object{handle: h, parent: 100, kind: rm.ClassChannel, gpu: noGPU, runlist: runlist{gpu: noGPU}})
	}
	check := func(when string, gpu int, want map[rm.ClassKind]bool) {
		t.Helper()
		for kind, room := range want {
			if got := a.roomForObject(kind, gpu, 64, 512); got != room {
				t.Errorf("%s, GPU %d, kind %d: %v", when, gpu, kind, got)
			}
		}
	}
	full := map[rm.ClassKind]bool{rm.ClassTSG: false, rm.ClassVASpace: false, rm.ClassChannel: true, rm.ClassPlain: true}
	empty := map[rm.ClassKind]bool{rm.ClassTSG: true, rm.ClassVASpace: true, rm.ClassChannel: true, rm.ClassPlain: true}
	check("one GPU is full", 0, full)
	check("one GPU is full", 1, empty)
	check("one GPU is full", noGPU, full)
	a.insertObject(c, &object{handle: 711, parent: 0xdead, kind: rm.ClassChannel, gpu: noGPU, runlist: runlist{gpu: noGPU}})
	check("and channels", 0, map[rm.ClassKind]bool{rm.ClassChannel: false})
	if n := a.usage(1).channels; n != 1 {
		t.Errorf("%d channels on the other GPU; want the one whose GPU is not known", n)
	}
	a.freeObject(testClient, 1)
	a.freeObject(testClient, 711)
	check("after its end", 0, empty)
	if a.usage(0).counts != (counts{}) || a.usage(1).counts != (counts{firmware: 1}) {
		t.Errorf("%+v and %+v are left", a.usage(0).counts, a.usage(1).counts)
	}
	a.objects = maxObjects
	if a.roomForObject(rm.ClassPlain, 0, 64, 512) {
		t.Error("room beyond the bound on objects")
	}
}

// TestChargedTo counts shared memory once per process.
func TestChargedTo(t *testing.T) {
	a := testAccount(quota.GiB)
	a.addClient(testClient, 7, nil)
	a.addClient(testClient+1, 7, nil)
	a.addClient(testClient+2, 8, nil)
	a.addObject(testClient, memoryObject(1, testClient), 0, 0, 3*quota.MiB)
	a.dupOf(testClient+1, 1, 2, testClient, 1)
	a.dupOf(testClient+2, 1, 2, testClient, 1)
	a.addObject(testClient+1, memoryObject(3, 1), 1, 0, quota.MiB)
	for _, c := range []struct {
		tgid int
		want []quota.Bytes
	}{{7, []quota.Bytes{3 * quota.MiB, quota.MiB}}, {8, []quota.Bytes{3 * quota.MiB, 0}}} {
		if got := a.byProcess()[c.tgid].used; !slices.Equal(got, c.want) {
			t.Errorf("process %d: %v, want %v", c.tgid, got, c.want)
		}
	}
}

// TestAnotherName: an NVLink address of memory keeps the memory charged, once.
func TestAnotherName(t *testing.T) {
	a := newAccount([]GPU{{Limit: 64 * quota.MiB}})
	a.addClient(testClient, 1, nil)
	a.addObject(testClient, memoryObject(5, testClient), 0, 0, 8*quota.MiB)
	a.addObject(testClient, object{handle: 6, parent: testClient, gpu: noGPU, charge: a.clients[testClient].objects[5].charge}, noGPU, 0, 0)
	if u := a.usage(0).used; u != 8*quota.MiB {
		t.Fatalf("with two names: %v", u)
	}
	a.freeObject(testClient, 5)
	if u := a.usage(0).used; u != 8*quota.MiB {
		t.Errorf("with the address left: %v", u)
	}
	a.freeObject(testClient, 6)
	if u := a.usage(0).used; u != 0 {
		t.Errorf("after both: %v", u)
	}
}
