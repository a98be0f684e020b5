// SPDX-License-Identifier: Apache-2.0

//go:build integration

// Records prints what the driver tells of a GPU's time, as it comes, until it is ended: context switches of all processes, and samples of
// the load. It asks as cgpu-arbiter does, as root, and holds nobody up.
//
//	records VERSION BUS_ID NODE    the driver's version and the GPU's PCI address, as nvidia-smi prints them, and its /dev/nvidiaN
//
// A line for each: `in AT PID CONTEXT`, `out AT PID CONTEXT`, `load AT PERCENT`, and `lost` where records are missing. AT is the GPU's
// clock, in ns.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: records VERSION BUS_ID NODE")
		os.Exit(2)
	}
	if err := run(os.Args[1], strings.ToLower(os.Args[2]), os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "records:", err)
		os.Exit(1)
	}
}

func run(version, bus, node string) error {
	abi, err := rm.ForDriver(version, true)
	if err != nil {
		return err
	}
	address, err := rmclient.ParseAddress(bus)
	if err != nil {
		return err
	}
	held, err := os.OpenFile(node, os.O_RDWR, 0) // RM makes a device only for who has the GPU's node open
	if err != nil {
		return err
	}
	defer held.Close()
	own, err := rmclient.New(rmclient.Kernel{}, abi, "/dev/nvidiactl", []uint32{address.ID()})
	if err != nil {
		return err
	}
	source, err := arbiter.Bind(own, rmclient.Kernel{}, 0, 0)
	if err != nil {
		return err
	}
	if err := source.Enable(); err != nil {
		return err
	}
	var newest time.Duration
	for asked := time.Now(); source.Await(); time.Sleep(sched.Tick / 2) {
		records, lost := source.Read(nil)
		if lost {
			fmt.Println("lost")
		}
		for _, r := range records {
			fmt.Println(map[bool]string{true: "in", false: "out"}[r.On], int64(r.At), r.PID, r.Context)
		}
		if time.Since(asked) < time.Second {
			continue
		}
		samples, err := arbiter.Samples(own, abi, 0)
		if err != nil {
			return err
		}
		asked = time.Now()
		for _, s := range samples {
			if s.At > newest {
				fmt.Println("load", int64(s.At), 100*s.Load)
				newest = s.At
			}
		}
	}
	return nil
}
