// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"fmt"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// Trial is what came of one thing that a guard will want of the driver, for cgpu doctor.
type Trial struct {
	GPU  int    `json:"gpu"`  // its index
	What string `json:"what"` // one of the names below
	// Refused says why not; empty: the driver did it.
	Refused string `json:"refused,omitempty"`
}

// What is tried.
const (
	TryClient    = "client"    // an RM client with a device and a subdevice
	TryGroup     = "group"     // a channel group
	TryTimeslice = "timeslice" // its timeslice, set and read back
	TryPause     = "pause"     // the control that pauses channels
	TrySwitches  = "switches"  // records of context switches
)

// tryTimeslice is none that a driver sets by itself.
const tryTimeslice = 7 * time.Millisecond

// TryDriver asks the driver for all that a guard needs to schedule, on a client and channel groups of its own that have no
// work; nobody else's are touched. What needs root's powers comes first, then drop is called, as cgpu-guard does.
func TryDriver(cfg guardcfg.Config, driver rmclient.Driver, drop func() error) ([]Trial, error) {
	g, err := openGPUs(cfg, driver)
	if err != nil {
		return nil, err
	}
	defer g.close()
	var trials []Trial
	say := func(gpu int, what string, err error) bool {
		t := Trial{GPU: cfg.GPUs[gpu].Index, What: what}
		if err != nil {
			t.Refused = err.Error()
		}
		trials = append(trials, t)
		return err == nil
	}
	own, err := g.client()
	for i := range cfg.GPUs {
		say(i, TryClient, err)
	}
	if err != nil {
		return trials, nil
	}
	for i := range cfg.GPUs {
		if !cfg.Settings.NoSwitchRecords {
			say(i, TrySwitches, trySwitches(own, driver, i, cfg.GPUs[i].Minor))
		}
	}
	if err := drop(); err != nil {
		return trials, err
	}
	for i := range cfg.GPUs {
		group, err := tryGroup(own, i)
		if say(i, TryGroup, err) {
			say(i, TryTimeslice, trySlice(own, group))
		}
		say(i, TryPause, tryPause(own, i))
	}
	return trials, nil
}

// trySwitches binds the records; they go with the client.
func trySwitches(own *rmclient.Client, driver rmclient.Driver, gpu, minor int) error {
	_, err := arbiter.Bind(own, driver, gpu, minor)
	return err
}

// classGroup is KEPLER_CHANNEL_GROUP_A.
const classGroup = 0xa06c

func tryGroup(own *rmclient.Client, gpu int) (uint32, error) {
	p := make([]byte, 20) // NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS
	rm.PutU32(p, rm.TSGEngineType, rm.ChannelEngineTypeGR)
	return own.Alloc(own.Device(gpu), classGroup, p)
}

func trySlice(own *rmclient.Client, group uint32) error {
	var p [8]byte
	rm.PutU64(p[:], 0, uint64(tryTimeslice.Microseconds()))
	if s, e := own.Control(group, controlSetTimeslice, p[:]); e != 0 || s != rm.StatusOK {
		return fmt.Errorf("set a timeslice: %s, errno %d", rm.StatusName(s), e)
	}
	p = [8]byte{}
	if s, e := own.Control(group, controlGetTimeslice, p[:]); e != 0 || s != rm.StatusOK {
		return fmt.Errorf("read a timeslice: %s, errno %d", rm.StatusName(s), e)
	}
	if got := time.Duration(rm.U64(p[:], 0)) * time.Microsecond; got != tryTimeslice {
		return fmt.Errorf("timeslice of %v was set, %v is read back", tryTimeslice, got)
	}
	return nil
}

// tryPause asks to stop a channel that is none. A driver that offers the control to us says that it does not know that
// channel; one that does not says so before it looks.
func tryPause(own *rmclient.Client, gpu int) error {
	s, e := disable(own, gpu, []Channel{{Client: own.Handle(), Handle: own.NewHandle()}}, chanPaused)
	if e == 0 && (s == rm.StatusOK || gone(s)) {
		return nil
	}
	return fmt.Errorf("pause a channel: %s, errno %d", rm.StatusName(s), e)
}
