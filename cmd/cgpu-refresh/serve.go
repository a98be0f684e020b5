// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// serveHardware writes, for each line that comes in, a line of JSON: what the driver says of each GPU, by UUID, and each Xid in a
// line of its own. It is for `cgpu exporter`, `cgpu health watch` and `cgpu smi`, which are static, and ends with in.
func serveHardware(in io.Reader, out io.Writer) error {
	t, err := device.Load(device.RunDir())
	if t == nil || err != nil && !errors.Is(err, device.ErrStale) {
		return err
	}
	if t.Driver == device.DriverSim {
		return simHardware(device.SimSocket(device.RunDir()), in, out)
	}
	c, err := config.Load(device.ConfigFile())
	if err != nil {
		return err
	}
	return nvmlHardware(c.DriverRoot, in, out)
}

// lines are lines of JSON that several goroutines write.
type lines struct {
	mu sync.Mutex
	to io.Writer
}

func (l *lines) write(all map[string]device.Hardware) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return json.NewEncoder(l.to).Encode(all)
}

// answerLines answers each line.
func answerLines(in io.Reader, out *lines, answer func(line string) (map[string]device.Hardware, error)) error {
	asked := bufio.NewScanner(in)
	for asked.Scan() {
		all, err := answer(asked.Text())
		if err == nil {
			err = out.write(all)
		}
		if err != nil {
			return err
		}
	}
	return asked.Err()
}

// memoryOf is whether a line asks for the memory of a GPU.
func memoryOf(line string, index int) bool {
	words := strings.Fields(line)
	return len(words) > 0 && words[0] == device.MemoryLine && slices.Contains(words[1:], strconv.Itoa(index))
}

// simHardware answers from the simulated driver, whose GPUs have no more than their Xids and what is used of them.
func simHardware(socket string, in io.Reader, to io.Writer) error {
	out, told := &lines{to: to}, map[string]int{}
	return answerLines(in, out, func(line string) (map[string]device.Hardware, error) {
		c, err := sim.Dial(socket, nil)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		s, err := c.Snapshot()
		if err != nil {
			return nil, err
		}
		all := map[string]device.Hardware{}
		for _, g := range s.GPUs {
			n := min(told[g.UUID], len(g.Xids)) // a server that was started anew has none
			h := device.Hardware{Xids: new(uint64(len(g.Xids))), Lost: g.Lost}
			if memoryOf(line, g.Index) {
				h.Used = new(g.Used)
			}
			all[g.UUID] = h
			told[g.UUID] = len(g.Xids)
			if n < len(g.Xids) {
				if err := out.write(map[string]device.Hardware{g.UUID: {NewXids: g.Xids[n:]}}); err != nil {
					return nil, err
				}
			}
		}
		return all, nil
	})
}
