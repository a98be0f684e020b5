// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/mps/mpstest"
)

// conn is a connection of which nobody has the other end.
func conn(t *testing.T) *net.UnixConn {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fds[1]) })
	c, err := mpstest.Conn(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// seated is who has a seat.
func seated(x *callers, seat int) *source {
	if x.sources[seat] == nil {
		return x.renew(seat, nil)
	}
	return x.sources[seat]
}

// TestBan: who has kept the others waiting does not do so again at once, and neither do others of its container; those of another do not
// care.
func TestBan(t *testing.T) {
	var x callers
	var by [3]*caller // of seats 1, 1 and 2
	for i, seat := range []int{1, 1, 2} {
		var err error
		if by[i], err = x.enter(seated(&x, seat), conn(t)); err != nil {
			t.Fatal(err)
		}
	}
	if by[0].refusal() != nil {
		t.Fatal("it is banned at first")
	}
	by[0].ban()
	if by[0].refusal() == nil || by[1].refusal() == nil || by[2].refusal() != nil {
		t.Error("the wrong one is banned")
	}
	by[1].of.banned = time.Now().Add(-time.Second)
	if by[0].refusal() != nil {
		t.Error("it is banned for ever")
	}
}

// TestMostOfOne: a container has a bounded part of the connections.
func TestMostOfOne(t *testing.T) {
	var x callers
	var all []*caller
	for range mostOfOne {
		c, err := x.enter(seated(&x, 1), conn(t))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if _, err := x.enter(seated(&x, 1), conn(t)); err == nil {
		t.Error("one too many")
	}
	if c, err := x.enter(seated(&x, 2), conn(t)); err != nil {
		t.Error(err)
	} else {
		c.leave()
	}
	for _, c := range all {
		c.leave()
	}
	if x.sources[1].connections != 0 || len(x.all) != 0 {
		t.Errorf("left: %d connections, %v", x.sources[1].connections, x.all)
	}
}

// TestMost: the silent give way, the oldest first, and who has spoken does not. Who only looks whether there is a gate is beside them.
func TestMost(t *testing.T) {
	var x callers
	var all []*caller
	for i := range most {
		c, err := x.enter(seated(&x, 1+i%7), conn(t))
		if err != nil {
			t.Fatal(err)
		}
		if all = append(all, c); i%2 == 0 {
			c.hasSpoken()
		}
	}
	for i := range most / 2 {
		c, err := x.enter(seated(&x, 8+i%8), conn(t))
		if err != nil {
			t.Fatal(err)
		}
		c.hasSpoken()
	}
	if _, err := x.enter(seated(&x, 64), conn(t)); err == nil || len(x.all) != most {
		t.Errorf("one too many, or %d connections", len(x.all))
	}
	if c, err := x.enter(seated(&x, 0), conn(t)); err != nil {
		t.Errorf("who looks whether there is a gate: %v", err)
	} else {
		c.leave()
	}
	for i, c := range all {
		if open := c.SetDeadline(time.Time{}) == nil; open != (i%2 == 0) {
			t.Fatalf("connection %d: the wrong ones are closed", i)
		}
		c.leave()
	}
}

// TestFormer: a seat's next container has nothing of the one before: that is hung up on, does not get on, and does not come again.
func TestFormer(t *testing.T) {
	var x callers
	former := seated(&x, 1)
	c, err := x.enter(former, conn(t))
	other, otherErr := x.enter(seated(&x, 2), conn(t))
	if err != nil || otherErr != nil {
		t.Fatal(err, otherErr)
	}
	c.ban()
	next, err := x.enter(x.renew(1, nil), conn(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := next.refusal(); err != nil || next.of.connections != 1 {
		t.Errorf("the next: %v, %d connections", err, next.of.connections)
	}
	if c.SetDeadline(time.Time{}) == nil || !errors.Is(c.refusal(), errFormer) {
		t.Errorf("who has come before: %v", c.refusal())
	}
	if _, err := x.enter(former, conn(t)); !errors.Is(err, errFormer) {
		t.Errorf("who comes by the former socket: %v", err)
	}
	if other.SetDeadline(time.Time{}) != nil || other.refusal() != nil {
		t.Errorf("another seat's: %v", other.refusal())
	}
}

// TestTurns: of one container one waits for its turn, beside those of others, however many it has.
func TestTurns(t *testing.T) {
	var x callers
	var turn, order sync.Mutex
	var came []int
	take := func(c *caller) {
		c.of.turn.Lock()
		defer c.of.turn.Unlock()
		turn.Lock()
		defer turn.Unlock()
		time.Sleep(5 * time.Millisecond)
		order.Lock()
		came = append(came, c.of.seat)
		order.Unlock()
	}
	turn.Lock()
	var all sync.WaitGroup
	for i := range 21 {
		seat := 1
		if i == 20 {
			seat = 2
		}
		c, err := x.enter(seated(&x, seat), conn(t))
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() { take(c) })
		time.Sleep(time.Millisecond)
	}
	turn.Unlock()
	all.Wait()
	if slices.Index(came, 2) > 4 {
		t.Errorf("in the order %v", came)
	}
}

// TestCgroup: a container and a run are known by their own cgroups, whatever they make below.
func TestCgroup(t *testing.T) {
	const id, run = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", "cgpu-run-0123456789abcdef"
	other := strings.Repeat("f", 64)
	for cgroups, want := range map[string]string{
		"0::/docker/" + id + "\n":                                                "/docker/" + id,
		"0::/docker/" + id + "/a/b\n":                                            "/docker/" + id,
		"0::/docker/" + id + "/" + other + "\n":                                  "/docker/" + id,
		"0::/docker/" + id + "/" + run + "\n":                                    "/docker/" + id,
		"0::/system.slice/docker-" + id + ".scope/x\n":                           "/system.slice/docker-" + id + ".scope",
		"0::/kubepods.slice/pod1.slice/cri-containerd-" + id + ".scope\n":        "/kubepods.slice/pod1.slice/cri-containerd-" + id + ".scope",
		"12:pids:/user.slice\n5:devices:/cgpu/" + run + "/x\n1:name=systemd:/\n": "/cgpu/" + run,
		"0::/user.slice/" + other + "/" + run + "/x\n":                           "/user.slice/" + other,
		"0::/user.slice/a/" + run + "/cgpu-run-ffffffffffffffff/" + id + "\n":    "/user.slice/a/" + run,
		"0::/system.slice/ssh.service\n":                                         "0::/system.slice/ssh.service",
		"":                                                                       "",
	} {
		if got := containerIn(cgroups); got != want {
			t.Errorf("%q: %q, want %q", cgroups, got, want)
		}
	}
	c := caller{cgroup: "/docker/" + id, peer: &unix.Ucred{Pid: 7}}
	if got := c.String(); got != `process 7 (cgroup "`+id+`")` {
		t.Error(got)
	}
}

// TestIntroduced: a process is of the container that has introduced it last, and of none when the seat is another container's. However many
// processes a container has, few are remembered, and those that have ended make room.
func TestIntroduced(t *testing.T) {
	var x callers
	of := func(seat int, want ...int) {
		t.Helper()
		got := x.clientsOf(seat)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("seat %d has %v, want %v", seat, got, want)
		}
	}
	introduced := func(seat, pid int) {
		(&caller{in: &x, of: seated(&x, seat), peer: &unix.Ucred{Pid: int32(pid)}}).introduced()
	}
	introduced(1, 11)
	introduced(1, 12)
	introduced(2, 12)
	of(1, 11)
	of(2, 12)
	of(3)
	x.renew(1, nil)
	of(1)
	const ended = 1 << 23 // no process has such a number
	for i := range 2 * mostClients {
		introduced(3, ended+i)
	}
	introduced(1, os.Getpid())
	of(1, os.Getpid())
	if len(x.clients) > mostClients {
		t.Errorf("%d are remembered", len(x.clients))
	}
}
