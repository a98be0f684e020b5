// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/testenv"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// fakeGPU is a fake driver that knows which channels are off and what timeslices were set. Like RM it refuses a whole list in
// which a channel is gone.
type fakeGPU struct {
	fakeDriver
	file string // of the container's clients; calls in their name must be made on it

	mu        sync.Mutex
	lists     []fakeList
	off       map[fakeName]bool
	gone      map[fakeName]bool
	refuse    func(l fakeList) uint32 // a status; nil: never
	slices    map[fakeName]time.Duration
	sets      []fakeName // in order
	asked     int        // timeslices read back
	elsewhere int        // timeslice calls on a wrong file
	scheduled []fakeSchedule
	handles   uint32
	at        func(cmd uint32) // told of every control before it is carried out
}

// The controls that it knows (pkg/gpusched).
const (
	controlSetTimeslice    = 0xa06c0103
	controlGetTimeslice    = 0xa06c0104
	controlDisableChannels = 0x2080110b
	disableSize            = 536
	disableFlag            = 0
	disableCount           = 4
	disableRewind          = 9
	disableClients         = 24
	disableChannels        = 280
	disableMax             = 64
)

type fakeName struct{ client, handle uint32 }

type fakeList struct {
	sub      uint32
	off      bool
	rewind   bool
	channels []fakeName
}

type fakeSchedule struct {
	name   fakeName
	enable bool
}

func newFakeGPU() *fakeGPU {
	d := &fakeGPU{off: map[fakeName]bool{}, gone: map[fakeName]bool{}, slices: map[fakeName]time.Duration{}}
	d.answer = d.call
	return d
}

func (d *fakeGPU) call(t Target, call *rm.Call) syscall.Errno {
	switch call.NR() {
	case rm.EscAlloc:
		if rm.U32(call.Outer, rm.AllocObject) == 0 {
			rm.PutU32(call.Outer, rm.AllocObject, 0xc1e00000+atomic.AddUint32(&d.handles, 1))
		}
	case rm.EscControl:
		cmd := rm.U32(call.Outer, rm.ControlCmd)
		if d.at != nil {
			d.at(cmd)
		}
		rm.PutU32(call.Outer, rm.ControlStatus, d.control(t, cmd,
			fakeName{rm.U32(call.Outer, rm.ControlClient), rm.U32(call.Outer, rm.ControlObject)}, call.Blocks[0].Data))
	}
	return 0
}

func (d *fakeGPU) control(t Target, cmd uint32, on fakeName, p []byte) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch cmd {
	case controlDisableChannels:
		l := fakeList{sub: on.handle, off: p[disableFlag] == 1, rewind: p[disableRewind] == 1}
		n := int(rm.U32(p, disableCount))
		if len(p) != disableSize || n > disableMax {
			return rm.StatusInvalidParamStruct
		}
		for i := range n {
			l.channels = append(l.channels, fakeName{rm.U32(p, disableClients+4*i), rm.U32(p, disableChannels+4*i)})
		}
		d.lists = append(d.lists, l)
		if d.refuse != nil {
			if s := d.refuse(l); s != rm.StatusOK {
				return s
			}
		}
		for _, ch := range l.channels {
			if d.gone[ch] {
				return rm.StatusInvalidObjectHandle
			}
		}
		for _, ch := range l.channels {
			if l.off {
				d.off[ch] = true
			} else {
				delete(d.off, ch)
			}
		}
	case controlSetTimeslice, controlGetTimeslice:
		if name, _ := os.Readlink("/proc/self/fd/" + strconv.Itoa(t.FD)); name != d.file {
			d.elsewhere++
		}
		if cmd == controlGetTimeslice {
			d.asked++
			rm.PutU64(p, 0, uint64(d.slices[on].Microseconds()))
			break
		}
		d.sets = append(d.sets, on)
		d.slices[on] = time.Duration(rm.U64(p, 0)) * time.Microsecond
	case 0xa06c0101, 0xa06f0103:
		d.scheduled = append(d.scheduled, fakeSchedule{on, p[0] != 0})
	}
	return rm.StatusOK
}

// offNow counts the channels that are off.
func (d *fakeGPU) offNow() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.off)
}

// take returns the lists since the last call.
func (d *fakeGPU) take() []fakeList {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.lists
	d.lists = nil
	return l
}

func (d *fakeGPU) took() []fakeName {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sets
	d.sets = nil
	return s
}

// fakeContainer is a guard with a fake driver, some GPUs and a client whose file it can find.
type fakeContainer struct {
	*testing.T
	*Guard
	d        *fakeGPU
	rescuers atomic.Int32
	none     atomic.Bool // no rescuer can be started
}

const (
	copyGroup = 0x5c0000c0 // the last byte is the GPU's number
	workGroup = 0x5c0000f0
)

func newFakeContainer(t *testing.T, gpus int) *fakeContainer {
	t.Helper()
	d := newFakeGPU()
	c := &fakeContainer{T: t, Guard: newFakeGuard(t, d), d: d}
	c.cfg = fakeConfig(t.TempDir(), gpus)
	for i := 1; i < gpus; i++ {
		c.gpus = append(c.gpus, gpuIdentity{rmclient.Address{Bus: uint32(i + 1)}, i})
	}
	c.account = newAccount(c.cfg.GPUs)
	c.gpuTime = newScheduler(c.Guard)
	c.gpuTime.StartRescuer = func(string, *atomic.Bool) (*os.Process, *os.File, error) {
		if c.none.Load() {
			return nil, nil, errors.New("none to be had")
		}
		c.rescuers.Add(1)
		return nil, nil, nil
	}
	c.client(fakeClient)
	t.Cleanup(func() {
		c.gpuTime.End()
		if c.rmClient != nil {
			c.rmClient.Close()
		}
	})
	return c
}

// fakeConfig is of a container with GPUs of which the test machine has files, such as they are.
func fakeConfig(dir string, gpus int) Config {
	cfg := testConfig("/dev")
	cfg.ControlNode.HostPath, cfg.UVMNode.HostPath = fakeControl, ""
	cfg.RunDir, cfg.Socket, cfg.Control = dir, filepath.Join(dir, "n.sock"), filepath.Join(dir, "n.ctl")
	one := cfg.GPUs[0]
	one.Node.HostPath = "/dev/zero"
	cfg.GPUs = nil
	for i := range gpus {
		one.Index, one.Minor, one.UUID, one.BusID = i, i, "GPU-"+strconv.Itoa(i), "0000:0"+strconv.Itoa(i+1)+":00.0"
		cfg.GPUs = append(cfg.GPUs, one)
	}
	cfg.Driver = device.DriverSim // whose nodes are not opened
	return cfg
}

// client makes a client with a device and two channel groups, for work and for copies, on each GPU.
func (c *fakeContainer) client(handle uint32) (file *os.File) {
	c.Helper()
	// A file of its own: only so can calls on it be told from others.
	name := filepath.Join(c.cfg.RunDir, "nvidiactl")
	if err := unix.Mknod(name, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 8))); err != nil && !errors.Is(err, unix.EEXIST) {
		testenv.Lacks(c, "mknod: %v", err)
	}
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		testenv.Lacks(c, "device nodes do not work here: %v", err)
	}
	c.Cleanup(func() { file.Close() })
	f, err := c.followFile(int(file.Fd()), node{nodeControl, 0})
	if err != nil {
		c.Fatal(err)
	}
	c.d.file = name
	c.account.addClient(handle, os.Getpid(), f)
	for i := range c.cfg.GPUs {
		add := func(o object) { c.account.addObject(handle, o, noGPU, 0, 0) }
		add(object{handle: fakeDevice + uint32(i)<<8, parent: handle, kind: rm.ClassDevice, gpu: i})
		add(object{handle: workGroup + uint32(i), parent: fakeDevice + uint32(i)<<8, kind: rm.ClassTSG, gpu: noGPU,
			group: &channelGroup{graphics: true}})
		add(object{handle: copyGroup + uint32(i), parent: fakeDevice + uint32(i)<<8, kind: rm.ClassTSG, gpu: noGPU})
	}
	return file
}

// channels makes channels in a group.
func (c *fakeContainer) channels(client, group, first uint32, n int) (names []fakeName) {
	for i := range n {
		h := first + uint32(i)
		c.account.addObject(client, object{handle: h, parent: group, kind: rm.ClassChannel, gpu: noGPU}, noGPU, 0, 0)
		names = append(names, fakeName{client, h})
	}
	return names
}

// set changes what the ledger says of the first GPU.
func (c *fakeContainer) set(f func(p *sched.Plan)) {
	p := c.gpuTime.Plan(0)
	f(&p)
	c.gpuTime.Adopt(0, p)
}

// pause stops the container's channels on the first GPU as a hard cap does, or lets them run.
func (c *fakeContainer) pause(off bool) bool { return c.gpuTime.Turn(0, off) }

// off reports that channels on the graphics engine of the first GPU are off.
func (c *fakeContainer) off() bool {
	c.gpuTime.Lock()
	defer c.gpuTime.Unlock()
	return c.gpuTime.IsOff(0, true)
}

// noted reads what the container's file says is off, as a rescuer would.
func (c *fakeContainer) noted() (list [][]fakeName) {
	c.Helper()
	d := newFakeGPU()
	copied := filepath.Join(c.TempDir(), "copy")
	b, err := os.ReadFile(gpusched.LeftoversFile(c.cfg.Socket))
	if err == nil {
		err = os.WriteFile(copied, b, 0o600)
	}
	if err != nil {
		c.Fatal(err)
	}
	if _, err := gpusched.ResumeLeftovers(copied, func(Config) (Driver, error) { return d, nil }, testLog(c)); err != nil {
		c.Fatal(err)
	}
	for _, l := range d.take() {
		if l.off {
			c.Errorf("channels are turned off: %#x", l.channels)
		}
		list = append(list, l.channels)
	}
	return list
}

// isOff checks which channels are off.
func (c *fakeContainer) isOff(want ...[]fakeName) {
	c.Helper()
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	all := slices.Concat(want...)
	for _, ch := range all {
		if !c.d.off[ch] {
			c.Errorf("%#x is not off", ch)
		}
	}
	if len(c.d.off) != len(all) {
		c.Errorf("%d channels are off, want %d", len(c.d.off), len(all))
	}
}

// patience is for what always comes, however busy the machine is.
const patience = time.Minute

// eventually waits for what other goroutines or processes do.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
