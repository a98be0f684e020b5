package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// serveHardware writes, for each line that comes in, a line of JSON: what the driver says of each GPU, by UUID. It is for `cgpu exporter` and
// `cgpu health watch`, which are static, and ends with in.
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

// answerLines answers each line.
func answerLines(in io.Reader, out io.Writer, answer func(line string) (map[string]device.Hardware, error)) error {
	lines, encoder := bufio.NewScanner(in), json.NewEncoder(out)
	for lines.Scan() {
		all, err := answer(lines.Text())
		if err == nil {
			err = encoder.Encode(all)
		}
		if err != nil {
			return err
		}
	}
	return lines.Err()
}

// simHardware answers from the simulated driver, whose GPUs have no more than their Xids.
func simHardware(socket string, in io.Reader, out io.Writer) error {
	told := map[string]int{}
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
			all[g.UUID] = device.Hardware{Xids: new(uint64(len(g.Xids))), NewXids: g.Xids[n:], Lost: g.Lost}
			told[g.UUID] = len(g.Xids)
		}
		return all, nil
	})
}
