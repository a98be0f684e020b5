// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestLostAnswers: signals take the answer to a call away in every order there is, and the call is made once all the same.
// "answered" is an answer that was sent and got lost, "away" a caller who was gone before it could be sent, and whom the next
// notification finds the saved result for; "stale" is a notification whose caller is gone before anything is done.
func TestLostAnswers(t *testing.T) {
	for _, x := range []struct {
		name  string
		steps []string
	}{
		{"answered", []string{"answered"}},
		{"answered twice", []string{"answered", "answered"}},
		{"away", []string{"away"}},
		{"away, answered", []string{"away", "answered"}},
		{"answered, away", []string{"answered", "away"}},
		{"answered, away, answered, away", []string{"answered", "away", "answered", "away"}},
		{"answered, stale", []string{"answered", "stale"}},
		{"stale, answered, stale, away, stale", []string{"stale", "answered", "stale", "away", "stale"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			const ok, duplicate = 0, 0x19
			var last lastAnswer
			memory := []byte{1, 0, 0, 0} // the structure in the caller's memory: here a status word only
			made := 0
			call := func(stale bool) *trappedCall {
				outer := append([]byte(nil), memory...)
				c := &trappedCall{notif: &seccompNotif{}, call: rm.Call{Outer: outer}, before: [][]byte{append([]byte(nil), memory...)},
					fd: -1, executed: !stale}
				failed := false
				if !stale {
					made++
				}
				switch {
				case stale:
				case made == 1:
					c.undo = func() {}
					rm.PutU32(outer, 0, ok)
				default:
					rm.PutU32(outer, 0, duplicate)
					failed = true
				}
				last.replayOrForget(c, func() bool { return failed }, func() bool { return !stale })
				return c
			}
			for i, step := range append(x.steps, "answered") {
				c := call(step == "stale")
				if step == "stale" {
					continue
				}
				if got := rm.U32(c.call.Outer, 0); got != ok {
					t.Fatalf("step %d: the driver's answer to a second call, %#x, reaches the caller", i, got)
				}
				switch step {
				case "answered":
					memory = append(memory[:0], c.call.Outer...)
					last.record(c)
				case "away":
					s := c.save(replyDone)
					memory = append(memory[:0], s.out[0].data...)
					last.recordSaved(s)
				}
			}
		})
	}
}

// TestLostFrees: a free whose answer got lost comes again, and finds nothing any more. Its caller is told that it was freed.
func TestLostFrees(t *testing.T) {
	heapFree := make([]byte, rm.HeapSize)
	rm.PutU32(heapFree, rm.HeapRoot, fakeClient)
	rm.PutU32(heapFree, rm.HeapFunction, rm.HeapFnFree)
	rm.PutU32(heapFree, rm.HeapFreeMemory, fakeMemory)
	for _, x := range []struct {
		name   string
		nr     uint32
		o      []byte
		status int
	}{
		{"an object", rm.EscFree, fakeFree(fakeMemory), rm.FreeStatus},
		{"a client", rm.EscFree, fakeFree(fakeClient), rm.FreeStatus},
		{"memory, the old way", rm.EscVidHeapControl, heapFree, rm.HeapStatus},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := &fakeDriver{}
			g := withClient(newFakeGuard(t, d))
			c := newFakeCall(t, g, fakeControl)
			if rep := c.escape(x.nr, x.o); c.failed(rep) {
				t.Fatalf("%+v", rep)
			}
			c.task.lastAnswer.record(&c.trappedCall)
			d.answer = func(_ Target, call *rm.Call) syscall.Errno {
				rm.PutU32(call.Outer, x.status, rm.StatusObjectNotFound)
				return 0
			}
			rep := c.escape(x.nr, slices.Clone(x.o))
			c.notif.Args[2] = c.task.lastAnswer.args[2] // the same memory
			if !c.task.lastAnswer.replayOrForget(&c.trappedCall, func() bool { return c.failed(rep) }, func() bool { return true }) ||
				c.statusWord() != rm.StatusOK {
				t.Error("the caller hears that there was nothing to free")
			}
		})
	}
}
