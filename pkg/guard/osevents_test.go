// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// osEvent is the structure of ALLOC_OS_EVENT and FREE_OS_EVENT.
func osEvent(client, number uint32) []byte {
	o := make([]byte, rm.OSEventSize)
	rm.PutU32(o, rm.OSEventClient, client)
	rm.PutU32(o, rm.OSEventFD, number)
	return o
}

func TestOSEvents(t *testing.T) {
	d := &fakeDriver{}
	g := withTwoGPUs(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	ask := func(f *fakeCall, nr, client, number uint32) uint32 {
		d.calls = nil
		o := osEvent(client, number)
		f.escape(nr, o)
		return rm.U32(o, rm.OSEventStatus)
	}
	if s := ask(f, rm.EscAllocOSEvent, 0xc1d00000, 3); s != rm.StatusInvalidClient || len(d.calls) != 0 {
		t.Errorf("another container's client: %s, %d driver calls", rm.StatusName(s), len(d.calls))
	}
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 3); s != rm.StatusOK || len(d.calls) != 1 {
		t.Errorf("the first: %s", rm.StatusName(s))
	}
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 3); s != rm.StatusInsufficientResources || len(d.calls) != 0 {
		t.Errorf("a duplicate: %s, %d driver calls; the driver would write a line to the kernel log", rm.StatusName(s), len(d.calls))
	}
	ask(f, rm.EscFreeOSEvent, fakeClient, 3)
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 3); s != rm.StatusOK || g.account.osEvents != 1 {
		t.Errorf("after FREE_OS_EVENT: %s, %d events", rm.StatusName(s), g.account.osEvents)
	}
	f.undo()
	if g.account.osEvents != 0 {
		t.Error("one that nobody was told of stays")
	}
	// An event ends with its file, and the number can be used again.
	other := newFakeCall(t, g, fakeControl)
	ask(other, rm.EscAllocOSEvent, fakeClient, 7)
	unix.Close(other.fd)
	if s := ask(f, rm.EscAllocOSEvent, fakeClient, 7); s != rm.StatusOK || g.account.osEvents != 1 {
		t.Errorf("the number of a closed file: %s, %d events", rm.StatusName(s), g.account.osEvents)
	}
	before, most := len(openFDs(t)), uint32(maxEvents*len(g.cfg.GPUs))
	for i := range most + 10 {
		s, want := ask(f, rm.EscAllocOSEvent, fakeClient, 100+i), uint32(rm.StatusOK)
		if i >= most-1 {
			want = rm.StatusInsufficientResources
		}
		if s != want {
			t.Fatalf("event %d: %s", i, rm.StatusName(s))
		}
	}
	f.escape(rm.EscFree, fakeFree(fakeClient))
	if g.account.osEvents != 0 || len(openFDs(t)) > before {
		t.Errorf("after the client's end: %d events, %d descriptors, before %d", g.account.osEvents, len(openFDs(t)), before)
	}
}

func openFDs(t *testing.T) []os.DirEntry {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return list
}
