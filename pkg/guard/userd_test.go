// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestUserdOffset: a channel whose words are not within one page is not read.
func TestUserdOffset(t *testing.T) {
	f := newFakeContainer(t, 1)
	f.channels(fakeClient, workGroup, 0x100, 2)
	for h, o := range map[uint32]uint64{0x100: 0, 0x101: userdPage - 0x80} {
		f.account.clients[fakeClient].channels[h].userd = userd{fakeMemory, o}
	}
	p := f.userPages()
	if seen := p.Sync(); seen > 0 {
		t.Errorf("%d pages of unknown memory", seen)
	}
	f.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), noGPU, 0, 0)
	if seen := p.Sync(); seen != 1 { // /dev/zero stands for the GPU
		t.Errorf("%d pages", seen)
	}
	f.account.freeObject(fakeClient, 0x100)
	if seen := p.Sync(); seen > 0 {
		t.Error("the page of a channel that is gone is still mapped")
	}
	p.Release()
}

// userPages are those of the first GPU.
func (c *fakeContainer) userPages() *gpusched.UserPages {
	c.gpuTime.Config.Settings.NoSwitchRecords = true
	c.gpuTime.Arm()
	return c.gpuTime.UserPages(0)
}

// userdRig is a container with a channel that has its page in memory of 8 MiB, of which it has another name, and a fake driver that
// counts the guard's handles.
func userdRig(t *testing.T) (f *fakeContainer, p *gpusched.UserPages, handles func() int) {
	f = newFakeContainer(t, 1)
	var dups, frees atomic.Int32
	own := func(call *rm.Call, off int) bool {
		return f.rmClient != nil && rm.U32(call.Outer, off) == f.rmClient.Handle()
	}
	f.d.answer = func(target Target, call *rm.Call) syscall.Errno {
		switch {
		case call.NR() == rm.EscDupObject && own(call, rm.DupClient):
			dups.Add(1)
		case call.NR() == rm.EscFree && own(call, rm.FreeRoot):
			frees.Add(1)
		}
		return f.d.call(target, call)
	}
	f.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), 0, 0, 8*quota.MiB)
	return f, f.userPages(), func() int { return int(dups.Load() - frees.Load()) }
}

const userdChannel = 0x100

// userdChannel makes a channel as RM_ALLOC does.
func (c *fakeContainer) userdChannel(memory uint32) {
	c.Helper()
	p := make([]byte, 368)
	rm.PutU32(p, rm.ChannelEngineType, engineGR)
	rm.PutU32(p, rm.ChannelUserdMemory, memory)
	o := fakeAlloc(workGroup, userdChannel, 0xc36f, p)
	if newFakeCall(c, c.Guard, fakeControl).escape(rm.EscAlloc, o, p); !c.account.isChannel(fakeClient, userdChannel) {
		c.Fatalf("no channel: %s", rm.StatusName(rm.U32(o, 40)))
	}
}

// TestUserdKeepsCharge: what the guard's handle keeps is charged, whatever becomes of the channel and the memory, and no longer.
func TestUserdKeepsCharge(t *testing.T) {
	for name, test := range map[string]struct {
		end     func(f *fakeContainer, p *gpusched.UserPages)
		handles int
		used    quota.Bytes
	}{
		"nothing ends": {func(*fakeContainer, *gpusched.UserPages) {}, 1, 8 * quota.MiB},
		"all is freed": {func(f *fakeContainer, _ *gpusched.UserPages) {
			f.account.freeObject(fakeClient, fakeDevice)
		}, 1, 8 * quota.MiB},
		"all is freed, and looked at again": {func(f *fakeContainer, p *gpusched.UserPages) {
			f.account.freeObject(fakeClient, fakeDevice)
			p.Sync()
		}, 0, 0},
		"all is freed, and somebody needs memory": {func(f *fakeContainer, _ *gpusched.UserPages) {
			f.account.freeObject(fakeClient, fakeDevice)
			f.sweep()
		}, 0, 0},
		"all is freed, and nobody looks any more": {func(f *fakeContainer, p *gpusched.UserPages) {
			f.account.freeObject(fakeClient, fakeDevice)
			p.Release()
		}, 0, 0},
		"another channel has its handle": {func(f *fakeContainer, p *gpusched.UserPages) {
			f.account.addObject(fakeClient, memoryObject(fakeMemory+1, fakeDevice), 0, 0, quota.MiB)
			f.account.freeObject(fakeClient, userdChannel)
			f.account.freeObject(fakeClient, fakeMemory)
			f.userdChannel(fakeMemory + 1)
			p.Sync()
		}, 1, quota.MiB},
	} {
		t.Run(name, func(t *testing.T) {
			f, p, handles := userdRig(t)
			f.userdChannel(fakeMemory)
			p.Sync()
			test.end(f, p)
			wantUsage(t, f.account, 0, test.used)
			if n := handles(); n != test.handles {
				t.Errorf("the guard has %d handles, want %d", n, test.handles)
			}
		})
	}
}

// TestUserdOfAnotherObject: the channel keeps the memory that it was made with. Its handle may be another's by the time that the guard
// looks, or while it does.
func TestUserdOfAnotherObject(t *testing.T) {
	f, p, handles := userdRig(t)
	f.userdChannel(fakeMemory)
	f.account.freeObject(fakeClient, fakeMemory)
	f.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), 0, 0, 512*quota.MiB)
	seen := p.Sync()
	f.account.freeObject(fakeClient, fakeMemory)
	wantUsage(t, f.account, 0, 8*quota.MiB)
	if n := handles(); n != 0 || seen != 0 {
		t.Errorf("the guard has %d handles on other memory; it sees %d channels", n, seen)
	}

	f, p, _ = userdRig(t)
	f.userdChannel(fakeMemory)
	answer, c := f.d.answer, f.account.client(fakeClient)
	f.d.answer = func(target Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscDupObject {
			if c.calls.TryLock() {
				t.Error("the container's calls do not wait while the guard opens a handle of theirs")
				c.calls.Unlock()
			}
			f.clientGone(c) // which waits for nobody
		}
		return answer(target, call)
	}
	p.Sync()
	wantUsage(t, f.account, 0, 8*quota.MiB)
	p.Sync()
	wantUsage(t, f.account, 0, 0)
}

// TestUserdBesideSweeps: who holds a client's calls and needs memory does not wait for who opens a page of that client, and the other
// way round.
func TestUserdBesideSweeps(t *testing.T) {
	f, p, _ := userdRig(t)
	f.userdChannel(fakeMemory)
	lock, _ := f.account.lockCalls(fakeClient, fakeClient)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 10 {
			p.Sync()
			p.Release()
		}
	})
	for range 20 {
		time.Sleep(100 * time.Microsecond)
		f.sweep()
	}
	lock.unlock()
	for range 20 {
		f.sweep()
	}
	wg.Wait()
	wantUsage(t, f.account, 0, 8*quota.MiB)
}

// TestUserdBehindALongCall: a call that takes long does not keep the guard from looking at other channels; its own is seen afterwards.
func TestUserdBehindALongCall(t *testing.T) {
	f, p, handles := userdRig(t)
	f.userdChannel(fakeMemory)
	c := f.account.client(fakeClient)
	c.calls.Lock()
	seen := p.Sync() // it would not come back
	c.calls.Unlock()
	if n := handles(); n != 0 || seen != 0 {
		t.Errorf("%d handles during the call, %d seen", n, seen)
	}
	if seen := p.Sync(); handles() != 1 || seen != 1 {
		t.Errorf("%d handles after the call, %d seen", handles(), seen)
	}
}
