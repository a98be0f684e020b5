// SPDX-License-Identifier: Apache-2.0

// Package nvmlclient asks NVML through cgpu-refresh, which alone is linked with it.
package nvmlclient

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
)

// Client asks NVML through cgpu-refresh, which alone is built with cgo, and which stays: to load NVML takes up to 140 ms, or
// seconds for a GPU that nobody uses. It is started when it is needed. If it does not answer, nobody waits for it any more, and
// its answer is taken later; after a minute it is killed. Another one is started when it has ended, after a rest: one that NVML
// holds fast in the kernel does not end. One goroutine uses it.
type Client struct {
	start func() (*child, error)
	now   func() time.Time

	line  string        // what is asked: device.HardwareLine or HealthLine
	rest  time.Duration // from a child's end to the next one's start
	child *child
	next  time.Time // when another one may be started
}

// child is a cgpu-refresh that answers.
type child struct {
	in      io.WriteCloser
	answers chan []byte // closed when it ends
	end     func()
	asked   time.Time // when it was asked for an answer that has not come; zero: none is missing
}

const (
	patience   = 2 * time.Second // NVML may hang where a GPU has fallen off the bus
	moment     = 10 * time.Millisecond
	Rest       = time.Minute
	HealthRest = 5 * time.Second // while nobody counts, Xids are lost
	maxAnswer  = 1 << 20
)

func New(line string, rest time.Duration) *Client {
	return &Client{start: startChild, now: time.Now, line: line, rest: rest}
}

// Ask is what NVML says of each GPU, by UUID.
func (h *Client) Ask() (map[string]device.Hardware, error) {
	if h.child == nil {
		if h.now().Before(h.next) {
			return nil, errors.New("NVML did not answer a moment ago")
		}
		h.next = h.now().Add(h.rest)
		c, err := h.start()
		if err != nil {
			return nil, err
		}
		h.child = c
	}
	all, err := h.child.ask(h.line, h.now())
	if errors.Is(err, errEnded) {
		h.Close()
		h.next = h.now().Add(h.rest)
	}
	return all, err
}

var errEnded = errors.New("NVML: cgpu-refresh has ended")

func (h *Client) Close() {
	if h.child != nil {
		h.child.end()
		h.child = nil
	}
}

func (c *child) ask(line string, now time.Time) (all map[string]device.Hardware, err error) {
	patience := patience
	switch {
	case c.asked.IsZero():
		c.asked = now
		_, _ = c.in.Write([]byte(line + "\n")) // what does not read has ended, or is about to
	case now.Sub(c.asked) >= Rest:
		c.end()
		patience = moment
	default:
		patience = moment
	}
	select {
	case line, ok := <-c.answers:
		if !ok {
			return nil, errEnded
		}
		c.asked = time.Time{}
		return all, json.Unmarshal(line, &all)
	case <-time.After(patience):
		return nil, errors.New("NVML: no answer")
	}
}

func startChild() (*child, error) {
	helper, err := device.Program("cgpu-refresh")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(helper, "-hardware")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{in: in, answers: make(chan []byte, 1), end: func() { _ = cmd.Process.Kill() }}
	go func() {
		defer close(c.answers)
		s := bufio.NewScanner(out)
		s.Buffer(nil, maxAnswer)
		for s.Scan() {
			c.answers <- append([]byte(nil), s.Bytes()...)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	return c, nil
}
