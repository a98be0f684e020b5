// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/test/interrupt"
	"github.com/opencgpu/cgpu/test/walk"
)

// The tests run their own binary again as a container's process: it puts a seccomp filter on itself as a container runtime
// would, hands the listener over, and then obeys lines on its standard input. No container engine takes part.

const (
	// childEnv is "filter": install one and send the listener over descriptor 3; "plain": do not; "walk": a process of a walk.
	childEnv   = "CGPU_TEST_CHILD"
	nodesEnv   = "CGPU_TEST_NODES" // folder of the nodes
	killingEnv = "CGPU_TEST_KILLABLE"
)

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == gpusched.RescueName { // else it would be all the tests once more
		fmt.Println("a test's guard has no rescuer: set StartRescuer")
		os.Exit(1)
	}
	if len(os.Args) > 1 && os.Args[1] == handover.StartArg {
		_ = handover.ServeStart()
		os.Exit(1)
	}
	if os.Getenv(childEnv) == "walk" {
		walk.Serve()
	}
	if os.Getenv(childEnv) != "" {
		childMain()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func childMain() {
	runtime.LockOSThread() // commands run on one thread unless they say otherwise
	if os.Getenv(childEnv) == "filter" {
		fd, err := installFilter(os.Getenv(killingEnv) != "")
		if err == nil {
			err = unix.Sendmsg(3, []byte{0}, unix.UnixRights(fd), nil, 0)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "filter:", err)
			os.Exit(2)
		}
		unix.Close(fd)
		unix.Close(3)
	}
	in := bufio.NewScanner(os.Stdin)
	c := &childState{nodes: os.Getenv(nodesEnv), in: in}
	for in.Scan() {
		words := strings.Fields(in.Text())
		f, ok := childCommands[words[0]]
		if !ok {
			fmt.Println("error unknown command", words[0])
			continue
		}
		var args []int
		for _, w := range words[1:] {
			n, _ := strconv.ParseInt(w, 0, 64)
			args = append(args, int(n))
		}
		out, err := f(c, args)
		if err != nil {
			fmt.Println("error", err)
			continue
		}
		fmt.Println("ok", out)
	}
}

// installFilter notifies about every ioctl whose low byte is trapped, as pkg/spec's profile does, on all threads.
func installFilter(killable bool) (int, error) {
	const (
		seccompSetModeFilter = 1
		flagTSync            = 1
		flagNewListener      = 1 << 3
		flagTSyncESRCH       = 1 << 4
		flagWaitKillable     = 1 << 5
		retAllow             = 0x7fff0000
		retNotify            = 0x7fc00000
	)
	load := func(off uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	prog := []unix.SockFilter{
		load(0), // nr
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: unix.SYS_IOCTL},
		ret(retAllow),
		load(16 + 8), // args[1], low half
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0xff},
	}
	for i, nr := range rm.TrappedNRs {
		prog = append(prog, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: uint8(len(rm.TrappedNRs) - i), K: uint32(nr)})
	}
	prog = append(prog, ret(retAllow), ret(retNotify))
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	flags := uintptr(flagTSync | flagNewListener | flagTSyncESRCH)
	if killable {
		flags |= flagWaitKillable
	}
	fd, _, e := unix.Syscall(unix.SYS_SECCOMP, seccompSetModeFilter, flags, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(prog)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

// childState is what a child has open.
type childState struct {
	nodes   string
	in      *bufio.Scanner // the rest of standard input
	clients []*rmClient
}

func (s *childState) open(name string, flags int) (int, error) {
	return unix.Open(s.nodes+"/"+name, unix.O_RDWR|flags, 0)
}

// childCommands take numbers and answer a line. A client is named by its index.
var childCommands = map[string]func(*childState, []int) (string, error){
	"trapped": trappedCalls, // see trapped_test.go
	"pid":     func(*childState, []int) (string, error) { return fmt.Sprint(os.Getpid()), nil },
	// open: a client with device and subdevice → index, client handle
	"open": func(s *childState, _ []int) (string, error) {
		c, err := s.newClient(unix.O_CLOEXEC)
		if err != nil {
			return "", err
		}
		s.clients = append(s.clients, c)
		return fmt.Sprint(len(s.clients)-1, " ", c.client), nil
	},
	// close CLIENT: the last close of its file
	"close": func(s *childState, a []int) (string, error) { return "", unix.Close(s.clients[a[0]].fd) },
	// alloc CLIENT SIZE → handle
	"alloc": func(s *childState, a []int) (string, error) {
		h, err := s.clients[a[0]].memory(0, uint64(a[1]))
		return fmt.Sprint(h), err
	},
	// vaspace CLIENT → handle
	"vaspace": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		h, err := c.alloc(c.dev, 0, 0x90f1, make([]byte, 56))
		return fmt.Sprint(h), err
	},
	// virtual CLIENT SIZE FLAGS [VASPACE]: a range of addresses → handle
	"virtual": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		p := make([]byte, 128)
		rm.PutU32(p, rm.MemoryFlags, rm.MemoryFlagVirtual|uint32(a[2]))
		rm.PutU32(p, rm.MemoryAttr, 1<<rm.MemoryAttrPageShift)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, uint64(a[1]))
		if len(a) > 3 {
			rm.PutU32(p, rm.MemoryVASpace, uint32(a[3]))
		}
		h, err := c.alloc(c.dev, 0, classVirtual, p)
		return fmt.Sprint(h), err
	},
	// window CLIENT MEMORY OFFSET LENGTH [NODE]: memory mapped for the processor, on a file that is then closed → address
	"window": func(s *childState, a []int) (string, error) {
		node := "nvidia0"
		if len(a) > 4 {
			node = "nvidiactl"
		}
		address, fd, err := s.mapMemory(a, node)
		_ = unix.Close(fd)
		return fmt.Sprint(address), err
	},
	// keepwindow CLIENT MEMORY OFFSET LENGTH: the same; the file stays open, as it does when it is mapped → address, descriptor
	"keepwindow": func(s *childState, a []int) (string, error) {
		address, fd, err := s.mapMemory(a, "nvidia0")
		return fmt.Sprint(address, " ", fd), err
	},
	// hostmap CLIENT SIZE HANDLE: host memory of RM_ALLOC_MEMORY with a mapping, on a file that stays open → descriptor
	"hostmap": func(s *childState, a []int) (string, error) {
		fd, err := s.open("nvidiactl", unix.O_CLOEXEC)
		if err != nil {
			return "", err
		}
		return fmt.Sprint(fd), s.allocMapped(s.clients[a[0]], uint64(a[1]), uint32(a[2]), fd)
	},
	// hostmapon CLIENT SIZE HANDLE DESCRIPTOR
	"hostmapon": func(s *childState, a []int) (string, error) {
		return "", s.allocMapped(s.clients[a[0]], uint64(a[1]), uint32(a[2]), a[3])
	},
	// unwindow CLIENT MEMORY ADDRESS
	"unwindow": func(s *childState, a []int) (string, error) {
		o := make([]byte, rm.UnmapMemorySize)
		rm.PutU32(o, rm.UnmapMemoryClient, s.clients[a[0]].client)
		rm.PutU32(o, rm.UnmapMemoryMemory, uint32(a[1]))
		rm.PutU64(o, rm.UnmapMemoryAddress, uint64(a[2]))
		if err := s.clients[a[0]].ioctl(rm.EscUnmapMemory, o); err != nil {
			return "", err
		}
		return "", statusError("unmap", rm.U32(o, rm.UnmapMemoryStatus))
	},
	// movewindow CLIENT MEMORY ADDRESS NEW
	"movewindow": func(s *childState, a []int) (string, error) {
		o := make([]byte, rm.UpdateMappingSize)
		rm.PutU32(o, rm.UpdateMappingClient, s.clients[a[0]].client)
		rm.PutU32(o, rm.UpdateMappingMemory, uint32(a[1]))
		rm.PutU64(o, rm.UpdateMappingOld, uint64(a[2]))
		rm.PutU64(o, rm.UpdateMappingNew, uint64(a[3]))
		if err := s.clients[a[0]].ioctl(rm.EscUpdateMapping, o); err != nil {
			return "", err
		}
		return "", statusError("update", rm.U32(o, rm.UpdateMappingStatus))
	},
	// mapdma CLIENT RANGE MEMORY LENGTH → address
	"mapdma": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		o := mapDMA(c.client, uint32(a[1]), uint32(a[2]), 0, uint64(a[3]))
		rm.PutU32(o, rm.DMADevice, c.dev)
		if err := c.ioctl(rm.EscMapDMA, o); err != nil {
			return "", err
		}
		return fmt.Sprint(rm.U64(o, 48)), statusError("map", rm.U32(o, 56))
	},
	// unmapdma CLIENT RANGE ADDRESS
	"unmapdma": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		o := unmapDMA(uint32(a[1]), uint64(a[2]), 0)
		rm.PutU32(o, rm.DMAClient, c.client)
		rm.PutU32(o, rm.DMADevice, c.dev)
		if err := c.ioctl(rm.EscUnmapDMA, o); err != nil {
			return "", err
		}
		return "", statusError("unmap", rm.U32(o, 40))
	},
	// openuvm → descriptor of an address space of UVM's
	"openuvm": func(s *childState, _ []int) (string, error) {
		fd, err := s.open("nvidia-uvm", unix.O_CLOEXEC)
		return fmt.Sprint(fd), err
	},
	// sparse UVM BASE LENGTH
	"sparse": func(_ *childState, a []int) (string, error) {
		o := make([]byte, 40)
		rm.PutU64(o, 0, uint64(a[1]))
		rm.PutU64(o, 8, uint64(a[2]))
		o[uvmSparseGPU+15] = 1 // the first GPU of testGPUs
		if e := rawIoctl(a[0], rm.UVMMapSparse, o); e != 0 {
			return "", e
		}
		return "", statusError("sparse", rm.U32(o, 32))
	},
	// uvmunmap UVM BASE LENGTH
	"uvmunmap": func(_ *childState, a []int) (string, error) {
		o := make([]byte, 40)
		rm.PutU64(o, 0, uint64(a[1]))
		rm.PutU64(o, 8, uint64(a[2]))
		o[uvmUnmapGPU+15] = 1
		if e := rawIoctl(a[0], rm.UVMUnmapExternal, o); e != 0 {
			return "", e
		}
		return "", statusError("unmap", rm.U32(o, 32))
	},
	// uvmfree UVM BASE LENGTH
	"uvmfree": func(_ *childState, a []int) (string, error) {
		o := make([]byte, 24)
		rm.PutU64(o, 0, uint64(a[1]))
		rm.PutU64(o, 8, uint64(a[2]))
		if e := rawIoctl(a[0], rm.UVMFree, o); e != 0 {
			return "", e
		}
		return "", statusError("free", rm.U32(o, 16))
	},
	// event CLIENT NUMBER: an OS event on the client's file
	"event": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		o := osEvent(c.client, uint32(a[1]))
		if err := c.ioctl(rm.EscAllocOSEvent, o); err != nil {
			return "", err
		}
		return "", statusError("event", rm.U32(o, rm.OSEventStatus))
	},
	"free": func(s *childState, a []int) (string, error) { return "", s.clients[a[0]].free(uint32(a[1])) },
	// freeclient CLIENT
	"freeclient": func(s *childState, a []int) (string, error) { c := s.clients[a[0]]; return "", c.free(c.client) },
	// dup TO FROM HANDLE → handle
	"dup": func(s *childState, a []int) (string, error) {
		h, err := s.clients[a[0]].dup(s.clients[a[1]].client, uint32(a[2]))
		return fmt.Sprint(h), err
	},
	// foreign CLIENT: a dup from a client that is not the container's
	"foreign": func(s *childState, a []int) (string, error) {
		_, err := s.clients[a[0]].dup(0xc1d000ff, 0xcaf00000)
		return "", err
	},
	// context CLIENT: a channel group with a channel
	"context": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		p := make([]byte, 20)
		rm.PutU32(p, rm.TSGEngineType, engineGR)
		tsg, err := c.alloc(c.dev, 0, 0xa06c, p)
		if err == nil {
			_, err = c.alloc(tsg, 0, 0xc86f, make([]byte, 368))
		}
		return fmt.Sprint(tsg), err
	},
	// mpscontext CLIENT → group channel: as context, and the channel has a context share, as libcuda's have
	"mpscontext": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		p, q := make([]byte, 20), make([]byte, 368)
		rm.PutU32(p, rm.TSGEngineType, engineGR)
		tsg, err := c.alloc(c.dev, 0, 0xa06c, p)
		if err != nil {
			return "", err
		}
		share, err := c.alloc(tsg, 0, classContextShare, make([]byte, 12))
		if err != nil {
			return "", err
		}
		rm.PutU32(q, rm.ChannelContextShare, share)
		channel, err := c.alloc(tsg, 0, 0xc86f, q)
		return fmt.Sprint(tsg, channel), err
	},
	// channel CLIENT GROUP [SHARE] → channel
	"channel": func(s *childState, a []int) (string, error) {
		p := make([]byte, 368)
		if len(a) > 2 {
			rm.PutU32(p, rm.ChannelContextShare, uint32(a[2]))
		}
		channel, err := s.clients[a[0]].alloc(uint32(a[1]), 0, 0xc86f, p)
		return fmt.Sprint(channel), err
	},
	// share CLIENT GROUP → context share
	"share": func(s *childState, a []int) (string, error) {
		share, err := s.clients[a[0]].alloc(uint32(a[1]), 0, classContextShare, make([]byte, 12))
		return fmt.Sprint(share), err
	},
	// engine CLIENT CHANNEL [CLASS] → an object of the graphics engine, which computes if no class is named
	"engine": func(s *childState, a []int) (string, error) {
		h, err := s.clients[a[0]].alloc(uint32(a[1]), 0, uint32(append(a, 0xcbc0)[2]), make([]byte, 16))
		return fmt.Sprint(h), err
	},
	// schedule CLIENT GROUP: lets its channels run
	"schedule": func(s *childState, a []int) (string, error) {
		return "", s.clients[a[0]].control(uint32(a[1]), scheduleGroup, []byte{1, 0, 0})
	},
	// preempt CLIENT GROUP: takes it off the GPU
	"preempt": func(s *childState, a []int) (string, error) {
		return "", s.clients[a[0]].control(uint32(a[1]), 0xa06c0105, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	},
	// schedulechannel CLIENT CHANNEL
	"schedulechannel": func(s *childState, a []int) (string, error) {
		return "", s.clients[a[0]].control(uint32(a[1]), scheduleChannel, []byte{1, 0, 0})
	},
	// notifier CLIENT MEMORY WHERE → group channel: a channel with an error notifier, which the group names (0), or the channel, or for ECC
	// (2)
	"notifier": func(s *childState, a []int) (string, error) {
		c, p, q := s.clients[a[0]], make([]byte, 20), make([]byte, 368)
		rm.PutU32(p, rm.TSGEngineType, engineGR)
		switch a[2] {
		case 0:
			rm.PutU32(p, rm.TSGNotifiers[0], uint32(a[1]))
		default:
			rm.PutU32(q, rm.ChannelNotifiers[a[2]-1], uint32(a[1]))
		}
		tsg, err := c.alloc(c.dev, 0, 0xa06c, p)
		if err != nil {
			return "", err
		}
		channel, err := c.alloc(tsg, 0, 0xc86f, q)
		if err == nil {
			_, err = c.alloc(channel, 0, 0xcbc0, make([]byte, 16)) // it has no token before
		}
		return fmt.Sprint(tsg, channel), err
	},
	// token CLIENT CHANNEL: has the driver write to the channel's notifier
	"token": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		return "", c.control(uint32(a[1]), 0xc36f0108, make([]byte, 4))
	},
	// gfxp CLIENT: a channel group with a context and graphics preemption
	"gfxp": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		p := make([]byte, 20)
		rm.PutU32(p, rm.TSGEngineType, engineGR)
		tsg, err := c.alloc(c.dev, 0, 0xa06c, p)
		if err != nil {
			return "", err
		}
		channel, err := c.alloc(tsg, 0, 0xc86f, make([]byte, 368))
		if err != nil {
			return "", err
		}
		if _, err := c.alloc(channel, 0, 0xcbc0, make([]byte, 16)); err != nil {
			return "", err
		}
		mode := make([]byte, rm.PreemptSize)
		putWords(mode, 0, 2, tsg, rm.PreemptModeGFXP, 0)
		return fmt.Sprint(tsg), c.control(c.subdev, controlPreemptionMode, mode)
	},
	// export CLIENT HANDLE → descriptor
	"export": func(s *childState, a []int) (string, error) {
		fd, err := s.open("nvidiactl", unix.O_CLOEXEC)
		if err != nil {
			return "", err
		}
		p := make([]byte, 24)
		rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectType, 1)
		rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectHandle, uint32(a[1]))
		rm.PutU32(p, rm.ExportFDFD, uint32(fd))
		err = s.clients[a[0]].control(s.clients[a[0]].client, 0x3d05, p)
		if err == nil && rm.U32(p, rm.ExportFDFD) != uint32(fd) {
			err = errors.New("the guard changed the descriptor number")
		}
		return fmt.Sprint(fd), err
	},
	// import CLIENT FD → handle
	"import": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		p := make([]byte, 20)
		rm.PutU32(p, rm.ImportFDFD, uint32(a[1]))
		rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectType, 1)
		rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectParent, c.dev)
		err := c.control(c.client, 0x3d06, p)
		return fmt.Sprint(rm.U32(p, rm.ImportFDObject+rm.ExportObjectHandle)), err
	},
	"closefd": func(_ *childState, a []int) (string, error) { return "", unix.Close(a[0]) },
	// info CLIENT → total and free KiB
	"info": func(s *childState, a []int) (string, error) {
		p := make([]byte, 1028)
		rm.PutU32(p, rm.FBInfoCount, 2)
		rm.PutU32(p, rm.FBInfoList, rm.FBIndexTotalRAMSize)
		rm.PutU32(p, rm.FBInfoList+rm.FBInfoEntry, rm.FBIndexHeapFree)
		err := s.clients[a[0]].control(s.clients[a[0]].subdev, controlFBInfoV2, p)
		return fmt.Sprint(rm.U32(p, rm.FBInfoList+4), " ", rm.U32(p, rm.FBInfoList+rm.FBInfoEntry+4)), err
	},
	// xfer CLIENT SIZE: an allocation wrapped in an XFER → handle
	"xfer": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		p, o, x := make([]byte, 128), make([]byte, 48), make([]byte, rm.XferSize)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, uint64(a[1]))
		rm.PutU32(o, rm.AllocRoot, c.client)
		rm.PutU32(o, rm.AllocParent, c.dev)
		rm.PutU32(o, rm.AllocClass, classVidmem)
		putPointer(o, rm.AllocParams, p)
		rm.PutU32(x, rm.XferCmd, rm.EscAlloc)
		rm.PutU32(x, rm.XferLength, 48)
		putPointer(x, rm.XferPtr, o)
		err := c.ioctl(rm.EscXferCmd, x)
		runtime.KeepAlive(p)
		if err != nil {
			return "", err
		}
		return fmt.Sprint(rm.U32(o, rm.AllocObject)), statusError("xfer", rm.U32(o, 40))
	},
	// wild CLIENT: a parameter block at an address that is not mapped
	"wild": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		o := make([]byte, 48)
		rm.PutU32(o, rm.AllocRoot, c.client)
		rm.PutU32(o, rm.AllocParent, c.dev)
		rm.PutU32(o, rm.AllocClass, classVidmem)
		rm.PutU64(o, rm.AllocParams, 8)
		return "", c.ioctl(rm.EscAlloc, o)
	},
	// readonly CLIENT SIZE: the answer cannot be written → EFAULT, the object stays
	"readonly": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		m, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return "", err
		}
		p := make([]byte, 128)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, uint64(a[1]))
		o := m[:48]
		rm.PutU32(o, rm.AllocRoot, c.client)
		rm.PutU32(o, rm.AllocParent, c.dev)
		rm.PutU32(o, rm.AllocClass, classVidmem)
		putPointer(o, rm.AllocParams, p)
		if err := unix.Mprotect(m, unix.PROT_READ); err != nil {
			return "", err
		}
		err = c.ioctl(rm.EscAlloc, o)
		runtime.KeepAlive(p)
		return "", err
	},
	// raw NUMBER FILE: an ioctl on another file (0) or on nvidiactl (1) → errno
	"raw": func(s *childState, a []int) (string, error) {
		name := "/dev/null"
		if a[1] == 1 {
			name = s.nodes + "/nvidiactl"
		}
		fd, err := unix.Open(name, unix.O_RDWR, 0)
		if err != nil {
			return "", err
		}
		defer unix.Close(fd)
		return fmt.Sprint(int(rawIoctl(fd, uintptr(a[0]), make([]byte, 1<<14)))), nil
	},
	// badfd: a trapped call on a descriptor that is not open → errno
	"badfd": func(*childState, []int) (string, error) {
		return fmt.Sprint(int(rawIoctl(999, testCmd(rm.EscFree, rm.FreeSize), make([]byte, rm.FreeSize)))), nil
	},
	// beside SLOW FAST: a control on SLOW, and beside it allocations on FAST, which must be done before it
	"beside": func(s *childState, a []int) (string, error) {
		slow, fast := s.clients[a[0]], s.clients[a[1]]
		done := make(chan error, 1)
		go func() { done <- slow.control(slow.subdev, controlFBInfoV2, make([]byte, 1028)) }()
		time.Sleep(20 * time.Millisecond)
		for range 20 {
			h, err := fast.memory(0, 1<<20)
			if err == nil {
				err = fast.free(h)
			}
			if err != nil {
				return "", err
			}
		}
		select {
		case err := <-done:
			return "", fmt.Errorf("the slow control was done first: %v", err)
		default:
		}
		return "", <-done
	},
	// threads N: N goroutines with a client each allocate, dup and free
	"threads": func(s *childState, a []int) (string, error) {
		errs := make(chan error)
		for i := range a[0] {
			go func() {
				c, err := s.newClient(unix.O_CLOEXEC)
				for j := 0; j < 50 && err == nil; j++ {
					var h, d uint32
					if h, err = c.memory(0, uint64(i+1)<<16); err == nil {
						if d, err = c.dup(c.client, h); err == nil {
							if err = c.free(h); err == nil && j%2 == 0 {
								err = c.free(d)
							}
						}
					}
				}
				errs <- err
			}()
		}
		var err error
		for range a[0] {
			err = errors.Join(err, <-errs)
		}
		return "", err
	},
	// fork CLIENT: a child of the child with the client's file at descriptor 3 → its pid
	"fork": func(s *childState, a []int) (string, error) {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), childEnv+"=plain")
		r, w, err := os.Pipe() // it holds both ends, so that it waits until it is killed
		if err != nil {
			return "", err
		}
		cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(s.clients[a[0]].fd), "nvidiactl"), w}
		cmd.Stdin = r
		if err := cmd.Start(); err != nil {
			return "", err
		}
		return fmt.Sprint(cmd.Process.Pid), nil
	},
	// pass CLIENT: the client's file goes into a socket that nobody reads; its descriptor is closed → the socket's descriptors
	"pass": func(s *childState, a []int) (string, error) {
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			return "", err
		}
		c := s.clients[a[0]]
		if err := unix.Sendmsg(p[0], []byte{0}, unix.UnixRights(c.fd), nil, 0); err != nil {
			return "", err
		}
		return fmt.Sprint(p[0], " ", p[1]), unix.Close(c.fd)
	},
	// exec: become the program anew, with the filter but without the clients' files
	"exec": func(*childState, []int) (string, error) {
		env := []string{childEnv + "=plain", nodesEnv + "=" + os.Getenv(nodesEnv)}
		fmt.Println("ok")
		return "", unix.Exec("/proc/self/exe", os.Args, env)
	},
	// longjmp CLIENT SIZE MS: a signal ends an allocation, and the thread never makes it again but another call. On a busy machine the
	// signal may come before the allocation, or after.
	"longjmp": func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		signal.Notify(make(chan os.Signal, 16), syscall.SIGUSR1)
		if err := interrupt.Restart(syscall.SIGUSR1, false); err != nil {
			return "", err
		}
		tid := unix.Gettid()
		var err error
		for range 20 {
			go func() {
				time.Sleep(time.Duration(a[2]) * time.Millisecond)
				_ = unix.Tgkill(os.Getpid(), tid, syscall.SIGUSR1)
			}()
			c.once = true
			var h uint32
			h, err = c.memory(0, uint64(a[1]))
			c.once = false
			if errors.Is(err, unix.EINTR) {
				return "", c.control(c.subdev, controlFBInfoV2, make([]byte, 1028))
			}
			if err == nil {
				err = c.free(h)
			}
			if err != nil {
				return "", err
			}
		}
		return "", errors.New("no allocation was interrupted")
	},
	"map":      childMap,
	"unmap":    childUnmap,
	"kill":     childKill,
	"trace":    childTrace,
	"endfirst": childEndFirst,
	"cycle":    childCycle,
	"private":  childPrivate,
	"apart":    childApart,
	"chroot":   func(*childState, []int) (string, error) { return "", unix.Chroot(os.Getenv("CGPU_TEST_ROOT")) },
	"high":     childHigh,
	"signals":  childSignals,
	"race":     childRace,
	"compute":  childCompute,
	"walk":     childWalk,
}
