// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The kubelet's probes have a way of their own, `cgpu-agent healthy`, which asks over an abstract unix socket: that is in the
// network namespace of the agent's pod, where only the pod is, and needs no folder to write to. The port of /healthz can be
// reached, and filled, by others, and an agent that is restarted for it is what they would want.

// ProbeSocket names the socket of one agent. It has the node and the pod in it, for agents that share a network namespace.
func ProbeSocket(node, podUID string) string {
	return fmt.Sprintf("@cgpu-agent-%x", sha256.Sum256([]byte(node+"\x00"+podUID)))
}

// verdicts are what the socket answers; an empty one is good.
type verdicts struct {
	Alive string `json:"alive"`
	Ready string `json:"ready"`
}

// probeWait bounds what an answer may take.
const probeWait = 3 * time.Second

// serveProbe answers at the socket until ctx ends. Whoever connects is told at once, and nothing is read of him, so there is
// nobody to wait for. A name that another has is tried again: it is no reason for pods to be without an agent.
func serveProbe(ctx context.Context, name string, a *agent) {
	for told := false; ctx.Err() == nil; {
		l, err := net.Listen("unix", name)
		if err == nil {
			told = false
			stop := context.AfterFunc(ctx, func() { l.Close() })
			err = answerProbes(l, a)
			stop()
			l.Close()
		}
		if ctx.Err() != nil {
			return
		}
		if !told {
			a.Log.Warn("cgpu-agent healthy cannot be answered", "err", err)
			told = true
		}
		select {
		case <-ctx.Done():
		case <-time.After(lookEvery):
		}
	}
}

func answerProbes(l net.Listener, a *agent) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		if sameUser(c) == nil {
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			_ = json.NewEncoder(c).Encode(verdicts{Alive: verdict(a.alive()), Ready: verdict(a.ready())})
		}
		c.Close()
	}
}

func verdict(err error) string {
	if err == nil {
		return ""
	}
	return tidy(err.Error(), 1024)
}

// AskProbe asks the agent at the socket whether it is alive, and whether it is ready.
func AskProbe(name string) (alive, ready error) {
	c, err := net.DialTimeout("unix", name, probeWait)
	if err != nil {
		err = fmt.Errorf("agent: none of this node and pod answers (%w): does it run, with the same --node-name and --pod-uid?", err)
		return err, err
	}
	defer c.Close()
	if err := sameUser(c); err != nil {
		return err, err
	}
	_ = c.SetDeadline(time.Now().Add(probeWait))
	var v verdicts
	text, err := io.ReadAll(io.LimitReader(c, 16<<10))
	if err == nil {
		err = json.Unmarshal(text, &v)
	}
	if err != nil {
		err = fmt.Errorf("agent: %s: no answer that can be read: %w", name, err)
		return err, err
	}
	of := func(text string) error {
		if text == "" {
			return nil
		}
		return errors.New("agent: " + strings.TrimPrefix(text, "agent: "))
	}
	return of(v.Alive), of(v.Ready)
}

// sameUser refuses whoever is not the user of this process. An abstract name has no owner: where the network namespace is the
// host's, anybody may connect to it, or have taken it.
func sameUser(c net.Conn) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("agent: no unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	var who *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { who, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	switch {
	case failed != nil:
		return fmt.Errorf("agent: %w", failed)
	case int(who.Uid) != os.Geteuid():
		return fmt.Errorf("agent: the other end of %s is user %d's: want user %d's", u.RemoteAddr(), who.Uid, os.Geteuid())
	}
	return nil
}
