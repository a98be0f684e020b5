package main

import (
	"fmt"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

const ctrlGroupInfo = 0xa06c0106 // NVA06C_CTRL_CMD_GET_INFO

// lostGroups is how many channel groups that the guard has not seen made a process may keep, if none of them runs.
const lostGroups = 2

// hostileTOCTOUGroup is hostileTOCTOURoot for channel groups, which no account of memory shows: nobody sets the timeslice of one that the
// guard does not know, pauses it or counts it.
func hostileTOCTOUGroup(o hostileOptions) error {
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:allocSize], mem[4096:4096+20]
	tries, most, lost := 0, min(o.tries, 20000), 0
	deadline := time.Now().Add(raceTime)
	for tries < most && lost < 5 && time.Now().Before(deadline) {
		n, got, err := stealGroups(out, params, most-tries, deadline)
		if err != nil {
			return err
		}
		tries += n
		if got {
			lost++
		}
	}
	print("tries=%d\nclients_lost=%d", tries, lost)
	return nil
}

// stealGroups tries with one client until the guard ends that.
func stealGroups(out, params []byte, tries int, deadline time.Time) (n int, lost bool, err error) {
	c, err := openGPU(patient)
	if err != nil {
		return 0, false, err
	}
	defer c.close()
	race := c.newRootRace(out, classGroup)
	defer race.stop()
	kept := 0
	for ; n < tries && time.Now().Before(deadline); n++ {
		f, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			return n, false, err
		}
		h := c.newHandle()
		rm.PutU32(params, rm.TSGEngineType, rm.ChannelEngineTypeGR)
		rm.PutU32(out, rm.AllocRoot, c.handle)
		rm.PutU32(out, rm.AllocParent, c.device)
		rm.PutU32(out, rm.AllocObject, h)
		putPtr(out, rm.AllocParams, params)
		race.try(f)
		syscall.Close(f)
		switch known, err := c.knownGroup(h); {
		case statusOf(err) == rm.StatusInvalidClient:
			return n + 1, true, nil
		case err != nil: // no group came of it
			continue
		case known:
			if err := c.free(h); err != nil {
				return n, false, err
			}
			continue
		}
		// It is there and nobody counts it: the guard has two seconds to find out.
		for until := time.Now().Add(2 * time.Second); time.Now().Before(until); sleep10ms() {
			if statusOf(c.control(h, ctrlGroupInfo, make([]byte, 4))) == rm.StatusInvalidClient {
				return n + 1, true, nil
			}
		}
		if err := mustRefuse("schedule_lost_group", c.schedule(h, false)); err != nil {
			return n, false, err
		}
		if kept++; kept > lostGroups {
			return n, false, fmt.Errorf("%d channel groups that the guard has not seen made", kept)
		}
	}
	return n, false, nil
}

// knownGroup tells whether the guard knows a channel group: its answer to a dup of one is its own. An error: there is no such group.
func (c *client) knownGroup(h uint32) (bool, error) {
	if err := c.control(h, ctrlGroupInfo, make([]byte, 4)); err != nil {
		return false, err
	}
	d, err := c.dup(c.handle, h)
	if err == nil {
		_ = c.free(d)
	}
	return statusOf(err) == rm.StatusNotSupported, nil
}
