// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const testVersion = "580.159.04"

// fakeGPU is a fake driver that knows which channels are off and what timeslices were set. Like RM it refuses a whole list in
// which a channel is gone.
type fakeGPU struct {
	rmclient.Kernel
	mu      sync.Mutex
	lists   []fakeList
	off     map[fakeName]bool
	gone    map[fakeName]bool
	refuse  func(l fakeList) uint32 // a status; nil: never
	slices  map[fakeName]time.Duration
	sets    []fakeName // in order
	asked   int        // timeslices read back
	handles uint32
	at      func(cmd uint32)                                              // told of every control before it is carried out
	fault   func(call *rm.Call) (status uint32, e syscall.Errno, ok bool) // what a call comes to instead
}

type fakeName struct{ client, handle uint32 }

type fakeList struct {
	sub      uint32
	off      bool
	rewind   bool
	channels []fakeName
}

func newFakeGPU() *fakeGPU {
	return &fakeGPU{off: map[fakeName]bool{}, gone: map[fakeName]bool{}, slices: map[fakeName]time.Duration{}}
}

func (d *fakeGPU) open(guardcfg.Config) (rmclient.Driver, error) { return d, nil }

func (d *fakeGPU) Exec(_ rmclient.Target, call *rm.Call) syscall.Errno {
	switch call.NR() {
	case rm.EscAlloc:
		if rm.U32(call.Outer, rm.AllocObject) == 0 {
			rm.PutU32(call.Outer, rm.AllocObject, 0xc1e00000+atomic.AddUint32(&d.handles, 1))
		}
	case rm.EscControl:
		on := fakeName{rm.U32(call.Outer, rm.ControlClient), rm.U32(call.Outer, rm.ControlObject)}
		rm.PutU32(call.Outer, rm.ControlStatus, d.control(on, rm.U32(call.Outer, rm.ControlCmd), call.Blocks[0].Data))
	}
	if d.fault != nil {
		if s, e, ok := d.fault(call); ok {
			rm.PutU32(call.Outer, rm.ControlStatus, s)
			return e
		}
	}
	return 0
}

func (d *fakeGPU) control(on fakeName, cmd uint32, p []byte) uint32 {
	if d.at != nil {
		d.at(cmd)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch cmd {
	case controlDisableChannels:
		return d.disable(on.handle, p)
	case controlGetTimeslice:
		d.asked++
		rm.PutU64(p, 0, uint64(d.slices[on].Microseconds()))
	case controlSetTimeslice:
		d.sets = append(d.sets, on)
		d.slices[on] = time.Duration(rm.U64(p, 0)) * time.Microsecond
	}
	return rm.StatusOK
}

func (d *fakeGPU) disable(sub uint32, p []byte) uint32 {
	l := fakeList{sub: sub, off: p[disableFlag] == 1, rewind: p[disableRewind] == 1}
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
	if slices.ContainsFunc(l.channels, func(ch fakeName) bool { return d.gone[ch] }) {
		return rm.StatusInvalidObjectHandle
	}
	for _, ch := range l.channels {
		if l.off {
			d.off[ch] = true
		} else {
			delete(d.off, ch)
		}
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

// fakeContainer is a scheduler with a fake driver, and the container that it knows.
type fakeContainer struct {
	*testing.T
	*Scheduler
	d        *fakeGPU
	own      *rmclient.Client
	rescuers atomic.Int32
	none     atomic.Bool // no rescuer can be started

	mu     sync.Mutex
	groups map[Group]int // on which GPU
	list   []fakeChannel
	hidden map[Client]bool // its file is not found
	over   map[fakeName]bool
	freed  []fakeName // of whom Gone was told
	pages  func(ch Channel) (*UserPage, error)
}

type fakeChannel struct {
	Channel
	group uint32
}

type fakeRMClient struct {
	handle uint32
	pid    int
}

func (c *fakeRMClient) Handle() uint32 { return c.handle }
func (c *fakeRMClient) PID() int       { return c.pid }

const (
	fakeControl = "/dev/random"
	fakeClient  = 0xc1d00005
	copyGroup   = 0x5c0000c0 // the last byte is the GPU's number
	workGroup   = 0x5c0000f0
)

func newFakeContainer(t *testing.T, gpus int) *fakeContainer {
	t.Helper()
	cfg := fakeConfig(t.TempDir(), gpus)
	abi, err := rm.ForDriver(cfg.DriverVersion, false)
	if err != nil {
		t.Fatal(err)
	}
	c := &fakeContainer{T: t, d: newFakeGPU(), groups: map[Group]int{}, hidden: map[Client]bool{}, over: map[fakeName]bool{}}
	var ids []uint32
	for i := range gpus {
		ids = append(ids, uint32(i+1)<<8)
	}
	if c.own, err = rmclient.New(c.d, abi, fakeControl, ids); err != nil {
		t.Fatal(err)
	}
	c.Scheduler = New(Options{Config: cfg, Container: c, Driver: c.d, ABI: abi, Log: slog.New(slog.DiscardHandler),
		LogOnce: func(string, string, ...any) {}, Warn: func(string) {},
		StartRescuer: func(string, *atomic.Bool) (*os.Process, *os.File, error) {
			if c.none.Load() {
				return nil, nil, errors.New("none to be had")
			}
			c.rescuers.Add(1)
			return nil, nil, nil
		}})
	c.client(fakeClient)
	t.Cleanup(func() {
		c.End()
		c.own.Close()
	})
	return c
}

// fakeConfig is of a container with GPUs that share out their time as by default.
func fakeConfig(dir string, gpus int) guardcfg.Config {
	timing := sched.DefaultTiming()
	cfg := guardcfg.Config{ID: "c0ffee", Nonce: "n", RunDir: dir, Socket: filepath.Join(dir, "n.sock"), Control: filepath.Join(dir, "n.ctl"),
		Driver: device.DriverSim /* whose nodes are not opened */, DriverVersion: testVersion, ControlNode: device.Node{HostPath: fakeControl},
		Settings: device.Config{MaxChannels: 512, MaxInst: 20, Policy: sched.PolicyPreempt, PrioRatio: sched.DefaultPrioRatio,
			BaseTimeslice: timing.Base, MinTimeslice: timing.Min, MaxRound: timing.MaxRound, HighPrioTimeslice: timing.HighPrio,
			CapCycle: timing.Cycle}}
	for i := range gpus {
		cfg.GPUs = append(cfg.GPUs, guardcfg.GPU{GPU: device.GPU{Index: i, Minor: i, UUID: "GPU-" + strconv.Itoa(i),
			BusID: "0000:0" + strconv.Itoa(i+1) + ":00.0",
			Node:  device.Node{HostPath: "/dev/zero"}}})
	}
	return cfg
}

// client makes a client with a channel group for work on each GPU.
func (c *fakeContainer) client(handle uint32) *fakeRMClient {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := &fakeRMClient{handle, os.Getpid()}
	for i := range c.Config.GPUs {
		c.groups[fakeGroup(x, workGroup+uint32(i))] = i
	}
	return x
}

// ofClient finds a client.
func (c *fakeContainer) ofClient(handle uint32) Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r := range c.groups {
		if r.Client.Handle() == handle {
			return r.Client
		}
	}
	return nil
}

// free frees a group of a client.
func (c *fakeContainer) free(client, group uint32) {
	of := c.ofClient(client)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.groups, fakeGroup(of, group))
}

func fakeGroup(of Client, handle uint32) Group {
	return Group{of, handle, [2]uint32{of.Handle(), handle}}
}

// channels makes channels in a group.
func (c *fakeContainer) channels(client, group, first uint32, n int) (names []fakeName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range n {
		name := fakeName{client, first + uint32(i)}
		c.list = append(c.list, fakeChannel{Channel{Client: client, Handle: name.handle, PID: os.Getpid(), Object: name}, group})
		names = append(names, name)
	}
	return names
}

func (c *fakeContainer) freeChannel(name fakeName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = slices.DeleteFunc(c.list, func(ch fakeChannel) bool { return ch.Object == name })
}

func (c *fakeContainer) Groups(gpu int) (list []Group) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r, on := range c.groups {
		if on == gpu {
			list = append(list, r)
		}
	}
	return list
}

func (c *fakeContainer) Channels(gpu int, all bool) (list []Channel) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range c.list {
		if int(ch.group&0xf) == gpu && (all || ch.group&^0xf == workGroup) {
			list = append(list, ch.Channel)
		}
	}
	return list
}

func (c *fakeContainer) GoOn(channels []Channel) (list []Channel) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range channels {
		if !c.over[ch.Object.(fakeName)] {
			list = append(list, ch)
		}
	}
	return list
}

func (c *fakeContainer) Gone(ch Channel) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freed = append(c.freed, ch.Object.(fakeName))
}

func (c *fakeContainer) Guests() []int                 { return nil }
func (c *fakeContainer) Owners() map[int]bool          { return map[int]bool{os.Getpid(): true} }
func (c *fakeContainer) RM() (*rmclient.Client, error) { return c.own, nil }

func (c *fakeContainer) UserPage(_ int, ch Channel) (*UserPage, error) {
	if c.pages == nil {
		return nil, nil
	}
	return c.pages(ch)
}

func (c *fakeContainer) File(x Client) (File, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return fakeFile{c, x}, !c.hidden[x]
}

type fakeFile struct {
	c  *fakeContainer
	of Client
}

func (f fakeFile) Hold(groups []Group) ([]Group, func()) {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return slices.DeleteFunc(groups, func(r Group) bool { _, ok := f.c.groups[r]; return !ok }), func() {}
}

func (f fakeFile) Control(object, cmd uint32, params []byte) (uint32, syscall.Errno) {
	return f.c.d.control(fakeName{f.of.Handle(), object}, cmd, params), 0
}

func (fakeFile) Close() {}

func (c *fakeContainer) gpu() *gpuScheduler { return c.gpus[0] }

// set changes what the ledger says of the first GPU.
func (c *fakeContainer) set(f func(p *sched.Plan)) {
	p := c.Plan(0)
	f(&p)
	c.Adopt(0, p)
}

// notes reads how many channels of a GPU are noted as off.
func (c *fakeContainer) noted(gpu int) uint32 { return c.rescue.count(gpu).Load() }

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

// eventually waits for what other goroutines or processes do.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within a minute: ", what)
		}
	}
}
