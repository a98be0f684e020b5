package guard

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestHiddenFile: a client whose file is only in a socket is off until it is taken out, also over a pause of the container.
func TestHiddenFile(t *testing.T) {
	const other = fakeClient + 1
	c := newFakeContainer(t, 1)
	file := c.client(other)
	seen, hidden := c.channels(fakeClient, workGroup, 0x5c000200, 2), c.channels(other, workGroup, 0x5c000300, 3)
	x := c.card()
	look := func() { x.apply(c.account.groupsOn(0), true) }
	look()
	c.isOff()

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
	look()
	c.isOff() // its process may just be ending
	time.Sleep(absentAfter)
	look()
	c.isOff(hidden)
	if n := c.compute.rescue.count(0).Load(); n != 3 {
		t.Errorf("the rescuer knows of %d channels", n)
	}
	c.compute.turn(x, true)
	c.isOff(seen, hidden)
	c.compute.turn(x, false)
	c.isOff(hidden)

	oob := make([]byte, unix.CmsgSpace(4))
	if _, _, _, _, err := unix.Recvmsg(pair[1], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is found", func() bool {
		look()
		return c.d.offNow() == 0
	})
	if n := c.compute.rescue.count(0).Load(); n != 0 {
		t.Errorf("the rescuer thinks that %d channels are off", n)
	}
}
