// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// pageOfAll is the handle.
const pageOfAll = 0x5c0000aa

// behindRecord answers as a driver in which the page that all users of a GPU share is under a handle that the account has for host memory,
// and counts the second handles and the debugger's calls that it is asked for.
type behindRecord struct {
	unseenObjects
	dups, debugged atomic.Int32
}

func newBehindRecord() *behindRecord {
	return &behindRecord{unseenObjects: unseenObjects{classes: map[uint32]uint32{pageOfAll: classUserShared},
		parents: map[uint32]uint32{pageOfAll: fakeDevice}}}
}

func (b *behindRecord) answer(t Target, call *rm.Call) syscall.Errno {
	switch {
	case call.NR() == rm.EscDupObject:
		b.dups.Add(1)
	case call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == 0x83de0315:
		b.debugged.Add(1)
	}
	return b.unseenObjects.answer(t, call)
}

// madeInTask is host memory that a task was let make.
func madeInTask(handle uint32) object {
	return object{handle: handle, parent: fakeDevice, class: classSystem, kind: rm.ClassSysmem, gpu: noGPU, host: true, madeInTask: true}
}

// TestDebugBehindRecord: a debugger reads no such page: the driver would have a second handle on it meanwhile.
func TestDebugBehindRecord(t *testing.T) {
	b := newBehindRecord()
	f := newFakeCall(t, withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: b.answer})), fakeControl)
	f.guard.account.addObject(fakeClient, madeInTask(pageOfAll), 0, 0, 4096)
	for class, want := range map[uint32]uint32{classUserShared: rm.StatusNotSupported, classSystem: rm.StatusOK} {
		b.classes[pageOfAll] = class
		b.debugged.Store(0)
		status := debugCall(f, 0x83de0315, pageOfAll, make([]byte, 16))
		if asked := b.debugged.Load() > 0; status != want || asked != (want == rm.StatusOK) {
			t.Errorf("class %#x: %s, the driver was asked: %v", class, rm.StatusName(status), asked)
		}
	}
}

// TestNotifierBehindRecord: no handle is kept on such a page for a channel that would write to it: it is not freed.
func TestNotifierBehindRecord(t *testing.T) {
	const group, channel = 0x101, 0x102
	for class, want := range map[uint32]struct {
		status uint32
		dups   int32
	}{classUserShared: {rm.StatusInUse, 0}, classSystem: {rm.StatusOK, 1}} {
		b := newBehindRecord()
		g := withClient(newFakeGuard(t, &fakeDriver{unseen: true, answer: b.answer}))
		f := newFakeCall(t, g, fakeControl)
		g.account.addObject(fakeClient, madeInTask(pageOfAll), 0, 0, 4096)
		g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
		p := make([]byte, 368)
		rm.PutU32(p, rm.ChannelNotifiers[0], pageOfAll)
		b.classes[pageOfAll], b.classes[group] = classSystem, 0xa06c // or the channel were refused
		o := fakeAlloc(group, channel, 0xc86f, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
			t.Fatal(rm.StatusName(rm.U32(o, 40)))
		}
		b.classes[pageOfAll] = class
		b.dups.Store(0)
		free := fakeFree(pageOfAll)
		f.escape(rm.EscFree, free)
		if s, n := rm.U32(free, rm.FreeStatus), b.dups.Load(); s != want.status || n != want.dups {
			t.Errorf("class %#x: %s, %d handles made", class, rm.StatusName(s), n)
		}
	}
}

// TestUserdBehindRecord: the guard looks at no channel's page there.
func TestUserdBehindRecord(t *testing.T) {
	for class, want := range map[uint32]int32{classUserShared: 0, classSystem: 1} {
		f, p, _ := userdRig(t)
		b := newBehindRecord()
		b.classes[pageOfAll] = classSystem
		f.d.unseen = true
		answer := f.d.answer
		f.d.answer = func(target Target, call *rm.Call) syscall.Errno {
			e := b.answer(target, call)
			if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlHandleInfo {
				return e
			}
			return answer(target, call)
		}
		f.account.addObject(fakeClient, madeInTask(pageOfAll), 0, 0, 4096)
		f.userdChannel(pageOfAll)
		b.classes[pageOfAll] = class
		b.dups.Store(0) // the one of a look at the new channel
		p.Sync()
		if n := b.dups.Load(); n != want {
			t.Errorf("class %#x: %d handles made, want %d", class, n, want)
		}
		p.Release()
	}
}
