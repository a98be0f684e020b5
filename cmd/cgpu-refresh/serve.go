// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"sync"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// serveHardware writes, for each line that comes in, a line of JSON: what the driver says of each GPU, by UUID, and each Xid in a
// line of its own. It is for `cgpu exporter` and `cgpu health watch`, which are static, and ends with in.
func serveHardware(in io.Reader, out io.Writer) error {
	t, err := device.Load(device.RunDir())
	if t == nil || err != nil && !errors.Is(err, device.ErrStale) {
		return err
	}
	if t.Driver == device.DriverSim {
		return simHardware(device.SimSocket(device.RunDir()), in, out)
	}
	return nvmlHardware(in, out)
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

// simHardware answers from the simulated driver, whose GPUs have no more than their Xids.
func simHardware(socket string, in io.Reader, to io.Writer) error {
	out, told := &lines{to: to}, map[string]int{}
	return answerLines(in, out, func(string) (map[string]device.Hardware, error) {
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
			all[g.UUID] = device.Hardware{Xids: new(uint64(len(g.Xids))), Lost: g.Lost}
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
