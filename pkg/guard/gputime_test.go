// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestGoneHandle: a channel that the driver says is gone is gone in the account, and its objects. What has its handle by now is not.
func TestGoneHandle(t *testing.T) {
	const below = 0x200
	for _, again := range []bool{false, true} {
		c := newFakeContainer(t, 1)
		name := c.channels(fakeClient, workGroup, 0x100, 1)[0]
		c.account.addObject(fakeClient, object{handle: below, parent: name.handle, gpu: noGPU}, noGPU, 0, 0)
		c.d.at = func(cmd uint32) {
			if cmd != controlDisableChannels || c.d.gone[name] {
				return
			}
			c.d.gone[name] = true
			if again {
				c.account.freeObject(fakeClient, name.handle)
				c.account.addObject(fakeClient, memoryObject(name.handle, fakeDevice), 0, 0, 8*quota.MiB)
			}
		}
		c.pause(true)
		if !c.d.gone[name] {
			t.Fatal("the driver was not asked")
		}
		if again {
			wantUsage(t, c.account, 0, 8*quota.MiB)
		}
		if _, ok := c.account.lookup(fakeClient, below); ok || c.account.gpus[0].channels != 0 {
			t.Errorf("the channel is still there: %d channels", c.account.gpus[0].channels)
		}
	}
}

// TestClientFile: a call in a client's name is made on its file, and of nothing that the program frees meanwhile.
func TestClientFile(t *testing.T) {
	c := newFakeContainer(t, 1)
	of := c.account.clients[fakeClient]
	f, ok := tenant{c.Guard}.File(of)
	if !ok {
		t.Fatal("the file is not found")
	}
	defer f.Close()
	if _, e := f.Control(workGroup, controlGetTimeslice, make([]byte, 8)); e != 0 || c.d.asked != 1 || c.d.elsewhere > 0 {
		t.Errorf("%v, %d asked, %d on another file", e, c.d.asked, c.d.elsewhere)
	}
	groups := c.account.groupsOn(0)
	living, release := f.Hold(slices.Clone(groups))
	if len(living) != 1 || of.calls.TryLock() {
		t.Errorf("%+v live, and the program may free them", living)
	}
	release()
	of.calls.Lock() // a free is under way
	go func() {
		defer of.calls.Unlock()
		c.account.freeObject(fakeClient, workGroup)
	}()
	living, release = f.Hold(groups)
	defer release()
	if len(living) > 0 {
		t.Errorf("%+v live", living)
	}
}

// TestHiddenFile: a client whose file is only in a socket is off until it is taken out.
func TestHiddenFile(t *testing.T) {
	const other = fakeClient + 1
	c := newFakeContainer(t, 1)
	file := c.client(other)
	c.channels(fakeClient, workGroup, 0x5c000200, 2)
	hidden := c.channels(other, workGroup, 0x5c000300, 3)
	c.gpuTime.Begin()
	looked := func() bool {
		c.gpuTime.Made(0)
		time.Sleep(10 * time.Millisecond)
		return true
	}
	eventually(t, "timeslices", func() bool { looked(); return len(c.d.took()) > 0 })
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(int(file.Fd())), nil, 0); err != nil {
		t.Fatal(err)
	}
	file.Close()
	eventually(t, "it is off", func() bool { return looked() && c.d.offNow() == len(hidden) })
	c.isOff(hidden)
	oob := make([]byte, unix.CmsgSpace(4))
	if _, _, _, _, err := unix.Recvmsg(pair[1], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is found", func() bool { return looked() && c.d.offNow() == 0 })
}
