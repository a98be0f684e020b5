// SPDX-License-Identifier: Apache-2.0

// Package nvmlclient asks NVML through cgpu-refresh, which alone is linked with it.
package nvmlclient

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Client asks NVML through cgpu-refresh, which alone is built with cgo, and which stays: to load NVML takes up to 140 ms, or
// seconds for a GPU that nobody uses. It is started when it is needed. If it does not answer, nobody waits for it any more, and
// its answer is taken later; after a minute it is killed. Another one is started when it has ended, and not too soon after it
// was: one that NVML holds fast in the kernel does not end. One goroutine uses it.
type Client struct {
	start func(heard func(map[string]device.Hardware)) (*child, error)
	now   func() time.Time

	line  string        // what is asked: device.HardwareLine, HealthLine, MemoryLine or LimitsLine
	rest  time.Duration // from a child's start to the next one's
	child *child
	next  time.Time // when another one may be started

	mu    sync.Mutex
	xids  map[string][]uint64 // that were not taken, by UUID
	count map[string]uint64   // of all that came, of whichever child, by UUID; of a GPU of which none tells there is none
}

// child is a cgpu-refresh that answers.
type child struct {
	in      io.WriteCloser
	answers chan map[string]device.Hardware // closed when it ends
	end     func()
	asked   time.Time // when it was asked for an answer that has not come; zero: none is missing
}

const (
	patience   = 2 * time.Second // NVML may hang where a GPU has fallen off the bus
	moment     = 10 * time.Millisecond
	Rest       = time.Minute
	HealthRest = 5 * time.Second // while nobody counts, Xids are lost
	maxAnswer  = 1 << 20
	maxXids    = 64 // of a GPU, that wait to be taken
)

func New(line string, rest time.Duration) *Client {
	return &Client{start: startChild, now: time.Now, line: line, rest: rest, xids: map[string][]uint64{}, count: map[string]uint64{}}
}

// Ask is what NVML says of each GPU, by UUID. With an error it is what NVML has told by itself, Xids.
func (h *Client) Ask() (map[string]device.Hardware, error) {
	answer, err := h.answer()
	h.mu.Lock()
	defer h.mu.Unlock()
	all := map[string]device.Hardware{}
	for uuid, g := range answer {
		if g.Xids != nil {
			h.count[uuid] += 0 // of which is told from now on
		}
		all[uuid] = g
	}
	for uuid, n := range h.count {
		g, known := all[uuid]
		g.Xids, g.NewXids, g.Lost = new(n), h.xids[uuid], g.Lost || !known
		all[uuid] = g
	}
	h.xids = map[string][]uint64{}
	return all, err
}

// hear keeps the Xids of a line.
func (h *Client) hear(all map[string]device.Hardware) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for uuid, g := range all {
		h.count[uuid] += uint64(len(g.NewXids))
		for _, xid := range g.NewXids {
			if list := h.xids[uuid]; len(list) < maxXids && !slices.Contains(list, xid) {
				h.xids[uuid] = append(list, xid)
			}
		}
	}
}

// Used is what the driver has given out of the memory of GPUs with these indices, by UUID.
func (h *Client) Used(gpus []int) (map[string]quota.Bytes, error) {
	line := device.MemoryLine
	for _, i := range gpus {
		line += " " + strconv.Itoa(i)
	}
	return h.used(line)
}

// Limited is what the driver counts as used of the memory limits of cgroups, asked for and told by UUID=CGROUP.
func (h *Client) Limited(asked []string) (map[string]quota.Bytes, error) {
	list, err := json.Marshal(asked)
	if err != nil {
		return nil, err
	}
	return h.used(device.LimitsLine + " " + string(list))
}

// used asks for nothing but what is used.
func (h *Client) used(line string) (map[string]quota.Bytes, error) {
	h.line = line
	answer, err := h.answer()
	used := map[string]quota.Bytes{}
	for name, g := range answer {
		if g.Used != nil {
			used[name] = *g.Used
		}
	}
	return used, err
}

func (h *Client) answer() (map[string]device.Hardware, error) {
	if h.child == nil {
		if h.now().Before(h.next) {
			return nil, errors.New("NVML did not answer a moment ago")
		}
		h.next = h.now().Add(h.rest)
		c, err := h.start(h.hear)
		if err != nil {
			return nil, err
		}
		h.child = c
	}
	all, err := h.child.ask(h.line, h.now())
	if errors.Is(err, errEnded) {
		h.Close()
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

func (c *child) ask(line string, now time.Time) (map[string]device.Hardware, error) {
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
	case all, ok := <-c.answers:
		if !ok {
			return nil, errEnded
		}
		c.asked = time.Time{}
		return all, nil
	case <-time.After(patience):
		return nil, errors.New("NVML: no answer")
	}
}

func startChild(heard func(map[string]device.Hardware)) (*child, error) {
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
	c := &child{in: in, answers: make(chan map[string]device.Hardware, 1), end: func() { _ = cmd.Process.Kill() }}
	go func() {
		defer close(c.answers)
		readHardware(out, heard, c.answers)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	return c, nil
}

// readHardware hands over what comes by itself and what is an answer, until the lines end or are none of ours.
func readHardware(out io.Reader, heard func(map[string]device.Hardware), answers chan<- map[string]device.Hardware) {
	s := bufio.NewScanner(out)
	s.Buffer(nil, maxAnswer)
	for s.Scan() {
		var all map[string]device.Hardware
		if json.Unmarshal(s.Bytes(), &all) != nil {
			return
		}
		byItself := func(g device.Hardware) bool { return len(g.NewXids) > 0 }
		if slices.ContainsFunc(slices.Collect(maps.Values(all)), byItself) {
			heard(all)
		} else {
			answers <- all
		}
	}
}
