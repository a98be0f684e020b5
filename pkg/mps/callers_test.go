// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"net"
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

// TestBan: who has kept the others waiting does not do so again at once, and neither do others of its container; those of another do not
// care.
func TestBan(t *testing.T) {
	var x callers
	if x.isBanned("a") {
		t.Fatal("it is banned at first")
	}
	x.ban("a")
	if !x.isBanned("a") || x.isBanned("b") {
		t.Error("the wrong one is banned")
	}
	x.banned["a"] = time.Now().Add(-time.Second)
	if x.isBanned("a") || len(x.banned) != 0 {
		t.Error("it is banned for ever")
	}
}

// TestMostOfOne: a container has a bounded part of the connections.
func TestMostOfOne(t *testing.T) {
	var x callers
	var all []*caller
	for range mostOfOne {
		c, err := x.enter("a", conn(t))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if _, err := x.enter("a", conn(t)); err == nil {
		t.Error("one too many")
	}
	if c, err := x.enter("b", conn(t)); err != nil {
		t.Error(err)
	} else {
		c.leave()
	}
	for _, c := range all {
		c.leave()
	}
	if len(x.sources) != 0 || len(x.all) != 0 {
		t.Errorf("left: %v, %v", x.sources, x.all)
	}
}

// TestMost: the silent give way, the oldest first, and who has spoken does not.
func TestMost(t *testing.T) {
	var x callers
	var all []*caller
	for i := range most {
		c, err := x.enter(strings.Repeat("x", i%7), conn(t))
		if err != nil {
			t.Fatal(err)
		}
		if all = append(all, c); i%2 == 0 {
			c.hasSpoken()
		}
	}
	for range most / 2 {
		c, err := x.enter("b"+strings.Repeat("x", len(x.sources)), conn(t))
		if err != nil {
			t.Fatal(err)
		}
		c.hasSpoken()
	}
	if _, err := x.enter("c", conn(t)); err == nil || len(x.all) != most {
		t.Errorf("one too many, or %d connections", len(x.all))
	}
	for i, c := range all {
		if open := c.SetDeadline(time.Time{}) == nil; open != (i%2 == 0) {
			t.Fatalf("connection %d: the wrong ones are closed", i)
		}
		c.leave()
	}
}

// TestTurns: of one container one waits for its turn, beside those of others, however many it has.
func TestTurns(t *testing.T) {
	var x callers
	var turn, order sync.Mutex
	var came []string
	take := func(c *caller) {
		c.of.turn.Lock()
		defer c.of.turn.Unlock()
		turn.Lock()
		defer turn.Unlock()
		time.Sleep(5 * time.Millisecond)
		order.Lock()
		came = append(came, c.source)
		order.Unlock()
	}
	turn.Lock()
	var all sync.WaitGroup
	for i := range 21 {
		name := "a"
		if i == 20 {
			name = "b"
		}
		c, err := x.enter(name, conn(t))
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() { take(c) })
		time.Sleep(time.Millisecond)
	}
	turn.Unlock()
	all.Wait()
	if text := strings.Join(came, ""); strings.Index(text, "b") > 4 {
		t.Errorf("in the order %s", text)
	}
}

// TestSource: a container and a run are known by their own cgroups, whatever they make below.
func TestSource(t *testing.T) {
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
		if got := sourceIn(cgroups); got != want {
			t.Errorf("%q: %q, want %q", cgroups, got, want)
		}
	}
	c := caller{source: "/docker/" + id, peer: &unix.Ucred{Pid: 7}}
	if got := c.String(); got != `process 7 (cgroup "`+id+`")` {
		t.Error(got)
	}
}
