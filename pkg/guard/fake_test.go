// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/tally"
)

// fakeDriver answers calls by a function and never looks behind a pointer.
type fakeDriver struct {
	unseen bool   // fakeClient can have objects that its guard has not seen made: answer tells of their classes
	guard  *Guard // its own, by whose account it tells of others
	rmclient.Kernel
	answer func(t Target, call *rm.Call) syscall.Errno
	mu     sync.Mutex // audits run beside the test
	calls  []uint32   // the escapes that reached it, in order
}

func (d *fakeDriver) Exec(t Target, call *rm.Call) syscall.Errno {
	if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlHandleInfo {
		if rm.U32(call.Outer, rm.ControlClient) == fakeClient && !d.unseen {
			return d.tellOf(call)
		}
		rm.PutU32(call.Blocks[0].Data, handleInfoResult, classVidmem) // all is memory, but for an answer that says otherwise
	}
	d.mu.Lock()
	d.calls = append(d.calls, call.Cmd)
	d.mu.Unlock()
	if d.answer == nil {
		return 0
	}
	return d.answer(t, call)
}

func (d *fakeDriver) serves(g *Guard) { d.guard = g }

// tellOf has the driver say what the guard's account has.
func (d *fakeDriver) tellOf(call *rm.Call) syscall.Errno {
	p := call.Blocks[0].Data
	o, ok := d.guard.account.lookup(fakeClient, rm.U32(p, 0))
	switch {
	case !ok:
		rm.PutU32(call.Outer, rm.ControlStatus, rm.StatusObjectNotFound)
	case rm.U32(p, handleInfoIndex) == handleInfoParent:
		rm.PutU32(p, handleInfoResult, o.parent)
	default:
		rm.PutU32(p, handleInfoResult, o.class)
	}
	return 0
}

// reset lets the driver answer by f from now on, and forgets the calls so far.
func (d *fakeDriver) reset(f func(call *rm.Call)) {
	d.answer, d.calls = answering(0, f).answer, nil
}

// Nodes of a guard over a fake driver: files that every machine has.
const (
	fakeControl = "/dev/random"
	fakeUVM     = "/dev/urandom"
)

// newFakeGuard makes a guard over a fake native driver, without its own files and without workers.
func newFakeGuard(t testing.TB, d Driver) *Guard {
	t.Helper()
	abi, err := rm.ForDriver(testVersion, false)
	if err != nil {
		t.Fatal(err)
	}
	cfg := testConfig("/dev")
	cfg.ControlNode.HostPath = fakeControl
	g := &Guard{cfg: cfg, log: testLog(t), driver: d, abi: abi, account: newAccount(cfg.GPUs), instances: map[uint32]int{},
		contextBuffers: map[contextBuffer]uint64{},
		logged:         map[string]map[string]bool{}, done: make(chan struct{}), bill: newBill(0, 0), files: &fileTable{self: os.Getpid()},
		gpus: []gpuIdentity{{rmclient.Address{Bus: 1}, 0}},
		nodes: nodeTable{byRdev: map[uint64]node{
			unix.Mkdev(1, 8): {nodeControl, 0}, unix.Mkdev(1, 9): {nodeUVM, 0}, unix.Mkdev(1, 5): {nodeGPU, 0}}},
	}
	if fake, ok := d.(interface{ serves(g *Guard) }); ok {
		fake.serves(g)
	}
	g.countIn(new(tally.Page))
	g.rootPatience = time.Hour                   // the test says when the guard looks
	g.managed.pids = func() []int { return nil } // the test is no process of the container that may be killed
	g.gpuTime = newScheduler(g)
	if g.watch, err = newWatcher(func(f func()) { f() }); err != nil {
		t.Fatal(err)
	}
	g.tasks = newTaskTable(func(*process) {})
	var st unix.Stat_t
	if err := unix.Stat(fakeControl, &st); err != nil {
		t.Fatal(err)
	}
	g.devDevice = st.Dev
	return g
}

// fakeCall is a call of this very process on a guard without a listener.
type fakeCall struct {
	trappedCall
	fuzzed bool // the pointers are made up: results go into the given buffers only
}

func newFakeCall(t testing.TB, g *Guard, path string) *fakeCall {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	task, err := g.tasks.acquire(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	mem, err := newArena()
	if err != nil {
		t.Fatal(err)
	}
	c := &fakeCall{trappedCall: trappedCall{guard: g, notif: &seccompNotif{Arch: nativeArch}, task: task, mem: mem, fd: fd}}
	if c.node, _, err = g.nodes.classify(fd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if c.fd != -1 { // else the guard closes it, when the test may be over: by then the number is another file's
			unix.Close(fd)
		}
		mem.unmap()
	})
	return c
}

// newFakeUVMCall is one on a followed UVM file; ctl is a descriptor of nvidiactl, as calls that map memory name.
func newFakeUVMCall(t testing.TB, g *Guard) (c *fakeCall, ctl int) {
	t.Helper()
	ctl, err := unix.Open(fakeControl, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(ctl) })
	c = newFakeCall(t, g, fakeUVM)
	c.file = &file{kind: nodeUVM, weakRef: weakRef{epfd: -1}, strong: -1, owners: map[int]bool{}, maps: map[gpuUUID][]*uvmMap{},
		spaces: map[gpuUUID]bool{}, channels: map[channelName]uvmChannel{}}
	return c, ctl
}

// escape handles an escape whose outer structure is o, and writes the results back into it and its blocks.
func (c *fakeCall) escape(nr uint32, o []byte, keep ...[]byte) reply {
	return c.do(uint32(testCmd(nr, len(o))), o, keep...)
}

func (c *fakeCall) do(cmd uint32, o []byte, keep ...[]byte) reply {
	c.mem.reset()
	c.trappedCall = trappedCall{guard: c.guard, notif: c.notif, task: c.task, mem: c.mem, fd: c.fd, node: c.node, file: c.file,
		flight: c.flight, call: rm.Call{Blocks: c.call.Blocks[:0]}, before: c.before[:0]}
	escaped.Store(unsafe.SliceData(o))
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(o))))
	c.notif.Args = [6]uint64{uint64(c.fd), uint64(cmd), addr}
	var rep reply
	switch {
	case fromLimiter(cmd):
		rep = c.guard.onManaged(&c.trappedCall, cmd)
	case rm.UVMShaped(cmd):
		rep = c.guard.onUVM(&c.trappedCall, cmd)
	default:
		if !c.loadOuter(cmd, addr, len(o)) {
			return fail(unix.EFAULT)
		}
		rep = c.guard.onEscape(&c.trappedCall)
	}
	if !rep.resume && rep.errno == 0 {
		for _, part := range c.changedParts(nil) {
			// The container is this very process: a pointer that a fuzzer made up may hit anything in it.
			if !c.fuzzed || slices.ContainsFunc(append(keep, o), func(b []byte) bool {
				start := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
				return part.addr >= start && part.addr+uint64(len(part.data)) <= start+uint64(len(b))
			}) {
				writeMemory(os.Getpid(), []memoryPart{part})
			}
		}
	}
	runtime.KeepAlive(o)
	runtime.KeepAlive(keep)
	return rep
}

const (
	fakeClient = 0xc1d00005
	fakeDevice = 0x5c000001
	fakeMemory = 0x5c000002
)

// withClient gives a guard a client with a device and 8 MiB.
func withClient(g *Guard) *Guard {
	g.account.addClient(fakeClient, os.Getpid(), nil)
	g.account.addObject(fakeClient, object{handle: fakeDevice, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
	g.account.addObject(fakeClient, memoryObject(fakeMemory, fakeDevice), 0, 0, 8*quota.MiB)
	return g
}

func fakeAlloc(parent, handle, class uint32, params []byte) []byte {
	o := make([]byte, 48)
	rm.PutU32(o, rm.AllocRoot, fakeClient)
	rm.PutU32(o, rm.AllocParent, parent)
	rm.PutU32(o, rm.AllocObject, handle)
	rm.PutU32(o, rm.AllocClass, class)
	putPointer(o, rm.AllocParams, params)
	return o
}

func fakeControlCall(object, cmd uint32, params []byte) []byte {
	o := make([]byte, rm.ControlSize)
	rm.PutU32(o, rm.ControlClient, fakeClient)
	rm.PutU32(o, rm.ControlObject, object)
	rm.PutU32(o, rm.ControlCmd, cmd)
	rm.PutU32(o, rm.ControlParamsSize, uint32(len(params)))
	putPointer(o, rm.ControlParams, params)
	return o
}

// pointersCovered checks that every pointer that the driver would follow has a private copy behind it: otherwise it would
// read or write the guard's own memory at an address that the container chose.
func pointersCovered(abi *rm.ABI, call *rm.Call) error {
	covered := func(in, off int) bool {
		for _, b := range call.Blocks {
			if b.In == in && b.Off == off {
				return true
			}
		}
		parent := call.Outer
		if in >= 0 {
			parent = call.Blocks[in].Data
		}
		return rm.U64(parent, off) == 0
	}
	for i, b := range call.Blocks {
		if b.In >= i || b.Off < 0 || b.Off > len(call.Parent(b))-8 {
			return fmt.Errorf("block %d is nowhere: in %d at %d", i, b.In, b.Off)
		}
	}
	switch call.NR() {
	case rm.EscAlloc:
		form, ok := abi.AllocForm(len(call.Outer))
		if !ok || !covered(-1, rm.AllocParams) || form.RightsOff >= 0 && !covered(-1, form.RightsOff) {
			return fmt.Errorf("RM_ALLOC with a bare pointer")
		}
		class, ok := abi.Class(rm.U32(call.Outer, rm.AllocClass))
		if !ok {
			return fmt.Errorf("an unknown class")
		}
		for _, off := range class.Clear {
			if len(call.Blocks) > 0 && rm.U64(call.Blocks[0].Data, off) != 0 {
				return fmt.Errorf("%s with a pointer at %d", class.Name, off)
			}
		}
	case rm.EscControl:
		ctl, ok := abi.Control(rm.U32(call.Outer, rm.ControlCmd))
		if !ok || ctl.Kind == rm.ControlDeny {
			return fmt.Errorf("a denied control")
		}
		if !covered(-1, rm.ControlParams) {
			return fmt.Errorf("%s with a bare pointer", ctl.Name)
		}
		if len(call.Blocks) == 0 {
			break
		}
		p := call.Blocks[0].Data
		if int(rm.U32(call.Outer, rm.ControlParamsSize)) > len(p) && len(p) > 0 {
			return fmt.Errorf("%s: %d bytes behind the pointer, the driver was told more", ctl.Name, len(p))
		}
		for _, x := range ctl.Pointers {
			if n, ok := x.Bytes(p); !ok || !covered(0, x.Off) {
				return fmt.Errorf("%s: nothing behind the pointer at %d", ctl.Name, x.Off)
			} else {
				for _, b := range call.Blocks {
					if b.In == 0 && b.Off == x.Off && len(b.Data) != 0 && len(b.Data) < n {
						return fmt.Errorf("%s: %d bytes behind the pointer at %d, want %d", ctl.Name, len(b.Data), x.Off, n)
					}
				}
			}
		}
		for _, off := range ctl.Clear {
			if rm.U64(p, off) != 0 {
				return fmt.Errorf("%s with a pointer at %d", ctl.Name, off)
			}
		}
	case rm.EscAllocObject, rm.EscIdleChannels, rm.EscI2CAccess, rm.EscAccessRegistry, rm.EscExportDMABuf, rm.EscQueryIntr, rm.EscXferCmd:
		return fmt.Errorf("a denied escape reached the driver: %s", rm.EscapeName(call.NR()))
	}
	return nil
}
