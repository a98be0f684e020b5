// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// Attacks on the sharing of the GPU's time. Others are in hostileTimeslice, hostilePause and hostilePreempt.

// nvidiaMajor is the device number of NVIDIA's nodes.
const nvidiaMajor = 195

// realDriver reports that NVIDIA's kernel modules are behind the nodes.
func realDriver() bool {
	var st syscall.Stat_t
	return syscall.Stat("/dev/nvidiactl", &st) == nil && st.Rdev>>8 == nvidiaMajor
}

// channel makes a channel below a device or a group.
func (c *client) channel(parent, engine uint32) (uint32, error) {
	p := make([]byte, channelSize)
	rm.PutU32(p, rm.ChannelEngineType, engine)
	return c.alloc(parent, c.newHandle(), classChannel, p)
}

// schedule is GPFIFO_SCHEDULE, with enable, of a group or a channel.
func (c *client) schedule(object uint32, channel bool) error {
	cmd := uint32(0xa06c0101)
	if channel {
		cmd = 0xa06f0103
	}
	var err error
	for _, size := range []int{3, 2} { // since 575, before
		p := make([]byte, size)
		p[0] = 1
		if err = c.control(object, cmd, p); statusOf(err) != rm.StatusInvalidParamStruct {
			return err
		}
	}
	return err
}

// disable is FIFO_DISABLE_CHANNELS of one channel, or its opposite.
func (c *client) disable(client, channel uint32, off bool) error {
	p := make([]byte, 536)
	if off {
		p[0] = 1
	}
	rm.PutU32(p, 4, 1)
	rm.PutU32(p, 24, client)
	rm.PutU32(p, 280, channel)
	return c.control(c.subdevice, 0x2080110b, p)
}

// hostileLone makes what would compute outside of every channel group whose timeslice could be set.
func hostileLone(c *client, _ hostileOptions) error {
	for engine := range uint32(9) { // none, and the graphics engines
		_, err := c.channel(c.device, engine)
		if err := mustRefuse(fmt.Sprint("lone_channel_", engine), err); err != nil {
			return err
		}
	}
	lone, err := c.channel(c.device, rm.ChannelEngineTypeCopy0)
	print("lone_copy_channel=%s", describe(err))
	if err != nil {
		return nil // a real driver wants more in its parameters
	}
	for _, class := range []uint32{0xc5c0, 0xc6c0, 0xc9c0, 0xcbc0, 0xcdc0, 0xcb97, 0x902d, 0xa140} {
		_, err := c.alloc(lone, c.newHandle(), class, make([]byte, 16))
		if err := mustRefuse(fmt.Sprintf("lone_%#x", class), err); err != nil {
			return err
		}
	}
	return nil
}

// hostileGraphics makes contexts that draw, of each GPU's 2D and 3D classes.
func hostileGraphics(c *client, _ hostileOptions) error {
	group, err := c.group(rm.ChannelEngineTypeGR)
	if err != nil {
		return err
	}
	channel, err := c.alloc(group, c.newHandle(), classChannel, make([]byte, channelSize))
	print("channel=%s", describe(err))
	if err != nil {
		return nil // a real driver wants more in its parameters
	}
	for _, class := range []uint32{0x902d, 0xc397, 0xc597, 0xc697, 0xc797, 0xc997, 0xcb97, 0xcd97, 0xce97} {
		_, err := c.alloc(channel, c.newHandle(), class, make([]byte, 16))
		if err := mustRefuse(fmt.Sprintf("object_%#x", class), err); err != nil {
			return err
		}
	}
	return nil
}

// hostileLongKernel has kernels of half a second in a context that never asks for compute preemption, and short ones in another.
func hostileLongKernel(hostileOptions) error {
	for _, order := range []string{"object first", "scheduled first"} {
		if err := withGPU(func(c *client) error {
			hog, err := newUnscheduled(c, 1, 500*time.Millisecond, 0)
			if errors.Is(err, errNoSim) {
				return skip("test/gpu/run.sh faults has this for a real driver")
			} else if err != nil {
				return err
			}
			makeObject := func() error {
				_, err := c.alloc(hog.channels[0], c.newHandle(), 0xcbc0, make([]byte, 16))
				return err
			}
			steps := []func() error{makeObject, func() error { return c.schedule(hog.groups[0], false) }}
			if order == "scheduled first" {
				slices.Reverse(steps)
			}
			if err := errors.Join(steps[0](), steps[1]()); err != nil {
				return fmt.Errorf("%s: %w", order, err)
			}
			victim, err := newContexts(c, 1, time.Millisecond, 0)
			if err != nil {
				return err
			}
			if err := errors.Join(hog.start(), victim.start()); err != nil {
				return err
			}
			time.Sleep(1500 * time.Millisecond)
			h, herr := hog.progress()
			v, verr := victim.progress()
			print("%s: long_kernels_ms=%d short_kernels_ms=%d", order, h.GPUTime.Milliseconds(), v.GPUTime.Milliseconds())
			if v.GPUTime < h.GPUTime/2 {
				return fmt.Errorf("%s: long kernels had %v of the GPU and short ones beside them %v", order, h.GPUTime, v.GPUTime)
			}
			return errors.Join(herr, verr)
		}); err != nil {
			return err
		}
	}
	return nil
}

// hostileSharedState makes calls that change, for all, what they share on the GPU: clocks, the compute mode, the watchdog, MMU debug mode,
// clear colours. They are made on the client itself, which has none of these controls: an answer other than the driver's says that it
// was not asked, and nothing is changed where it is.
func hostileSharedState(c *client, _ hostileOptions) error {
	for _, call := range []struct {
		cmd    uint32
		size   int
		status uint32
	}{
		{0x801909, 1, rm.StatusOK},
		{0x20800407, 1, rm.StatusOK},
		{0x20801702, 4, rm.StatusOK},
		{0x2080200a, 8, rm.StatusInvalidArgument},
		{0x2080220c, 0, rm.StatusOK},
		{0x20802210, 0, rm.StatusOK},
		{0x2080a06f, 12, rm.StatusOK},
		{0x83de0307, 4, rm.StatusOK},
		{0x90960101, 40, rm.StatusInsufficientResources},
		{0x90960107, 56, rm.StatusNotSupported},
		{0x208f1105, 8, rm.StatusNotSupported},
	} {
		params := make([]byte, call.size)
		if call.cmd == 0x2080200a { // a boost that the header has is the caller's own, and executed
			params[0] = rm.BoostCommand
		}
		err := c.control(c.handle, call.cmd, params)
		print("%#x=%s", call.cmd, describe(err))
		switch got := statusOf(err); {
		case call.cmd == 0x801909 && got == rm.StatusNotSupported: // before 550
		case got != call.status:
			return fmt.Errorf("%#x: %s, want %s: the driver was asked", call.cmd, describe(err), rm.StatusName(call.status))
		}
	}
	return nil
}

// hostileSimControls uses the simulated driver's own controls where there is none, and beyond what they are for.
func hostileSimControls(c *client, _ hostileOptions) error {
	tsg, err := c.group(rm.ChannelEngineTypeGR)
	if err != nil {
		return skip("no channel group: " + err.Error())
	}
	for cmd := uint32(0xa06c01e0); cmd < 0xa06c0200; cmd++ {
		for _, size := range []int{sim.SubmitSize, sim.WorkSize} {
			err := c.control(tsg, cmd, make([]byte, size))
			if cmd == sim.CtrlSubmit || cmd == sim.CtrlWork {
				if !realDriver() {
					continue
				}
			}
			if err := mustRefuse(fmt.Sprintf("%#x_%d", cmd, size), err); err != nil {
				return err
			}
		}
	}
	for _, object := range []uint32{c.handle, c.device, c.subdevice} {
		for _, cmd := range []uint32{sim.CtrlSubmit, sim.CtrlWork} {
			if err := mustRefuse(fmt.Sprintf("%#x_of_%#x", cmd, object), c.control(object, cmd, make([]byte, sim.WorkSize))); err != nil {
				return err
			}
		}
	}
	return nil
}

// pausedSlack is what a paused container may compute all the same.
const pausedSlack = 10 * time.Millisecond

// hostilePaused tries to compute while somebody outside has paused the container, which must happen once this says that it
// is ready.
func hostilePaused(o hostileOptions) error {
	if !o.paused {
		return skip("nobody pauses this container: --paused says that somebody will")
	}
	return withGPU(func(c *client) error {
		w, err := newContexts(c, 2, time.Millisecond, 0)
		if err != nil {
			return err
		}
		if err := w.start(); err != nil {
			return err
		}
		print("ready=1")
		if err := awaitPause(w); err != nil {
			return err
		}
		for _, try := range []struct {
			name string
			run  func(*contexts) error
		}{
			{"nothing", func(*contexts) error { return nil }},
			{"timeslice", trySlices},
			{"enable", tryEnable},
			{"schedule", trySchedule},
			{"schedule-dup", tryScheduleDup},
			{"new-channels", tryNewChannels},
			{"free-channel", tryFreeChannel},
			{"new-groups", tryNewGroups},
			{"new-groups-loop", tryNewGroupsLoop},
			{"new-client", tryNewClient},
			{"schedule-new", tryScheduleNew},
		} {
			if err := computesNothing(w, try.name, try.run); err != nil {
				return err
			}
		}
		return nil
	})
}

// awaitPause waits until the contexts compute nothing any more.
func awaitPause(w *contexts) error {
	last, since := time.Duration(-1), time.Now()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); sleep10ms() {
		now, err := w.progress()
		if err != nil {
			return err
		}
		if now.GPUTime != last {
			last, since = now.GPUTime, time.Now()
		} else if time.Since(since) > 700*time.Millisecond { // longer than any off phase of a hard cap
			return nil
		}
	}
	return fmt.Errorf("nobody paused the container within 30 s")
}

// computesNothing checks that an attempt brings no GPU time. What it makes it puts into w.
func computesNothing(w *contexts, name string, try func(*contexts) error) error {
	before, err := w.progress()
	if err != nil {
		return err
	}
	if err := try(w); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	time.Sleep(150 * time.Millisecond)
	after, err := w.progress()
	if err != nil {
		return err
	}
	print("%s_us=%d", name, (after.GPUTime - before.GPUTime).Microseconds())
	if got := after.GPUTime - before.GPUTime; got > pausedSlack {
		return fmt.Errorf("%s: %v of GPU time in a paused container", name, got)
	}
	return nil
}

func trySlices(w *contexts) error {
	for _, g := range w.groups {
		p := make([]byte, 8)
		rm.PutU64(p, 0, stolenUs)
		if err := w.c.control(g, ctrlSetTimeslice, p); err != nil {
			return err
		}
		_ = w.c.control(g, ctrlPreempt, make([]byte, 8)) // which takes its turn from it, if it has one
	}
	return nil
}

func tryEnable(w *contexts) error {
	for _, ch := range w.channels {
		if err := mustRefuse("enable", w.c.disable(w.c.handle, ch, false)); err != nil {
			return err
		}
	}
	return nil
}

// trySchedule is what every program does with a new context, and what lets disabled channels run.
func trySchedule(w *contexts) error {
	for range 100 {
		for i, g := range w.groups {
			if err := w.c.schedule(g, false); err != nil {
				return err
			}
			if err := w.c.schedule(w.channels[i], true); err != nil {
				return err
			}
		}
	}
	return nil
}

// tryScheduleDup does it through a second handle of the channel, in another client.
func tryScheduleDup(w *contexts) error {
	o, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer o.close()
	for _, ch := range w.channels {
		d, err := o.dup(w.c.handle, ch)
		print("dup_channel=%s", describe(err))
		if err != nil {
			continue
		}
		for range 100 {
			if err := o.schedule(d, true); err != nil {
				print("schedule_dup=%s", describe(err))
				break
			}
		}
	}
	return nil
}

// tryNewChannels adds channels, which nobody disabled, to groups that have work.
func tryNewChannels(w *contexts) error {
	for range 20 {
		for _, g := range w.groups {
			ch, err := w.c.channel(g, rm.ChannelEngineTypeGR)
			if err != nil {
				return err
			}
			w.channels = append(w.channels, ch)
		}
	}
	return nil
}

// tryFreeChannel frees the channels of a group that were there at the pause, and leaves one that came later.
func tryFreeChannel(w *contexts) error {
	old := w.channels[0]
	w.channels = w.channels[1:]
	return w.c.free(old)
}

func tryNewGroups(w *contexts) error {
	for range 4 {
		more, err := newUnscheduled(w.c, 1, time.Millisecond, 0)
		if err != nil {
			return err
		}
		if err := more.start(); err != nil {
			return err
		}
		w.groups, w.channels = append(w.groups, more.groups...), append(w.channels, more.channels...)
	}
	return nil
}

// tryNewGroupsLoop makes a context, gives it work, and frees it again. What each has got is added up.
func tryNewGroupsLoop(w *contexts) error {
	var sum time.Duration
	for range 50 {
		more, err := newUnscheduled(w.c, 1, time.Millisecond, 0)
		if err != nil {
			return err
		}
		if err := more.start(); err != nil {
			return err
		}
		time.Sleep(2 * time.Millisecond)
		got, err := more.progress()
		if err != nil {
			return err
		}
		sum += got.GPUTime
		if err := w.c.free(more.groups[0]); err != nil {
			return err
		}
	}
	print("loop_us=%d", sum.Microseconds())
	if sum > pausedSlack {
		return fmt.Errorf("%v of GPU time by 50 new contexts in a paused container", sum)
	}
	return nil
}

func tryNewClient(*contexts) error {
	o, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer o.close()
	w, err := newUnscheduled(o, 2, time.Millisecond, 0)
	if err != nil {
		return err
	}
	if err := w.start(); err != nil {
		return err
	}
	return computesNothing(w, "of-new-client", func(*contexts) error { return nil })
}

// tryScheduleNew lets channels run for the first time: the calls must not return before the container is resumed. They are left
// waiting, until this process ends.
func tryScheduleNew(w *contexts) error {
	more, err := newUnscheduled(w.c, 2, time.Millisecond, 0)
	if err != nil {
		return err
	}
	if err := more.start(); err != nil {
		return err
	}
	added, err := w.c.channel(w.groups[0], rm.ChannelEngineTypeGR)
	if err != nil {
		return err
	}
	old := w.groups[1]
	if _, err := w.c.channel(old, rm.ChannelEngineTypeGR); err != nil {
		return err
	}
	w.groups, w.channels = append(w.groups, more.groups...), append(w.channels, more.channels...)
	returned := make(chan error, 4)
	for _, s := range []struct {
		what    string
		object  uint32
		channel bool
	}{
		{"a new group", more.groups[0], false},
		{"a new group's channel", more.channels[1], true},
		{"a new channel of an old group", added, true},
		{"an old group with a new channel", old, false},
	} {
		go func() {
			returned <- fmt.Errorf("%s: GPFIFO_SCHEDULE returned: %s", s.what, describe(w.c.schedule(s.object, s.channel)))
		}()
	}
	select {
	case err := <-returned:
		return err
	case <-time.After(time.Second): // ten times as long as the guard waits before it looks again
		print("schedule_new=waits")
		return nil
	}
}
