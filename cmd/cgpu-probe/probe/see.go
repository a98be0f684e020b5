// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func cmdSelf(args []string) error {
	fs := flag.NewFlagSet("self", flag.ExitOnError)
	want := fs.String("limit", "", "fail unless the memory seen has this size")
	_ = fs.Parse(args)
	status, _ := os.ReadFile("/proc/self/status")
	var e evidence
	for line := range strings.Lines(string(status)) {
		for _, key := range []string{"Seccomp", "Seccomp_filters", "CapEff", "NoNewPrivs"} {
			if v, ok := strings.CutPrefix(line, key+":"); ok {
				print("%s=%s", strings.ToLower(key), strings.TrimSpace(v))
				e.filtered = e.filtered || key == "Seccomp" && strings.TrimSpace(v) == "2"
			}
		}
	}
	libs, err := libraries()
	if err != nil {
		return err
	}
	e.limiter = slices.Contains(libs, "libcgpu.so")
	print("limiter=%s\nlibraries=%s", yesNo(e.limiter), strings.Join(libs, ","))
	e.readPage()
	var how string
	e.listener, how = listens()
	print("listener=%s", how)
	c, total, free, err := openCounted(patient)
	if err != nil {
		return err
	}
	defer c.close()
	e.total = total
	print("client=%#x", c.handle)
	print("gpus=%d", len(c.gpus))
	print("total_mib=%d", total/quota.MiB)
	print("free_mib=%d", free/quota.MiB)
	// FIFO_DISABLE_CHANNELS of no channel: a driver accepts that of everybody, a guard of nobody.
	err = c.control(c.subdevice, 0x2080110b, make([]byte, 536))
	e.denied = err != nil
	print("denied_control=%s", describe(err))
	verdict, err := e.judge()
	print("enforcement=%s", verdict)
	if err != nil {
		return err
	}
	if *want != "" {
		limit, err := parseSize(*want)
		if err != nil {
			return err
		}
		if total != limit {
			return fmt.Errorf("sees %v of memory: want %v", total, limit)
		}
	}
	return nil
}

// evidence is what a process can find out about who holds it.
type evidence struct {
	filtered bool // by seccomp
	listener bool // some filter has one
	limiter  bool // libcgpu.so is loaded
	denied   bool // a control was refused that only a guard refuses
	page     bool // there is a vGPU page
	flags    uint32
	native   bool        // the first GPU is whole
	limit    quota.Bytes // of the first GPU, spill included
	total    quota.Bytes // memory that the driver says the first GPU has
}

// readPage reads what the host has said.
func (e *evidence) readPage() {
	p, err := page.Read(page.Path)
	if err != nil {
		print("page=%v", err)
		return
	}
	e.page, e.flags = true, p.Header().Flags
	if p.Header().VGPUs > 0 {
		v := p.VGPU(0)
		e.native, e.limit = v.Flags&page.VGPUNative != 0, quota.Bytes(v.Limit+v.Spill)
	}
	print("page=ok\npage_limit_mib=%d", e.limit/quota.MiB)
}

// judge says what holds this process to its limit, and why that does not.
func (e *evidence) judge() (verdict string, err error) {
	sees := func() error {
		if e.page && !e.native && e.total != e.limit {
			return fmt.Errorf("sees %v of memory, but its limit is %v", e.total, e.limit)
		}
		return nil
	}
	switch {
	case e.page && e.flags&page.FlagPreload != 0:
		if !e.limiter {
			return "none", errors.New("preload mode, and this program has not loaded libcgpu.so: nothing holds it to its limit")
		}
		return "preload, which a program can walk around", sees()
	case !e.filtered:
		return "none", errors.New("no seccomp filter: this process is in no container of cgpu")
	case !e.listener:
		return "none", errors.New("no seccomp listener: no guard sees the driver calls of this process")
	case !e.denied:
		return "none", errors.New("a control that a guard refuses was carried out")
	}
	return "guard", sees()
}

// listens says whether a filter of this thread has a listener. The kernel allows one, and refuses to make another (EBUSY).
// Should it make one after all, that is closed at once, and what the filter does is nothing.
func listens() (yes bool, how string) {
	runtime.LockOSThread() // the filter stays on this thread, which goes on to serve as any
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return false, "not known: " + err.Error()
	}
	allow := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000}}
	prog := unix.SockFprog{Len: 1, Filter: &allow[0]}
	const setModeFilter, newListener = 1, 1 << 3
	fd, _, errno := syscall.Syscall(unix.SYS_SECCOMP, setModeFilter, newListener, uintptr(unsafe.Pointer(&prog)))
	switch errno {
	case 0:
		_ = syscall.Close(int(fd))
		return false, "no"
	case syscall.EBUSY:
		return true, "yes"
	}
	return true, "not known: " + errno.Error() // the container's own filter forbids to ask; the other signs decide
}

// meminfo is what each way of asking says, in bytes.
type meminfo struct {
	TotalMiB     quota.Bytes `json:"totalMiB"`
	FreeMiB      quota.Bytes `json:"freeMiB"`
	UsedMiB      quota.Bytes `json:"usedMiB"`
	TotalV1MiB   quota.Bytes `json:"totalV1MiB"`
	FreeV1MiB    quota.Bytes `json:"freeV1MiB"`
	HeapTotalMiB quota.Bytes `json:"heapTotalMiB"`
	HeapFreeMiB  quota.Bytes `json:"heapFreeMiB"`
	HeapStatus   string      `json:"heapStatus"`
	V1Status     string      `json:"v1Status"`
	// Indices of FB_GET_INFO_V2, in KiB.
	Indices map[string]quota.Bytes `json:"indicesKiB"`
}

func cmdMeminfo(args []string) error {
	fs := flag.NewFlagSet("meminfo", flag.ExitOnError)
	asJSON := fs.Bool("json", false, "print JSON")
	_ = fs.Parse(args)
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	indices := []uint32{rm.FBIndexRAMSize, rm.FBIndexTotalRAMSize, rm.FBIndexHeapSize, rm.FBIndexMappableHeapSize,
		rm.FBIndexLargestFreeRegion, rm.FBIndexHeapFree, rm.FBIndexUsableRAMSize}
	v, err := c.fb(indices...)
	if err != nil {
		return err
	}
	m := meminfo{TotalMiB: v[1] / quota.MiB, FreeMiB: v[5] / quota.MiB, UsedMiB: (v[1] - v[5]) / quota.MiB, Indices: map[string]quota.Bytes{}}
	for i, x := range indices {
		m.Indices[fmt.Sprintf("%#x", x)] = v[i] / quota.KiB
	}
	total, free, err := c.fbV1()
	m.TotalV1MiB, m.FreeV1MiB, m.V1Status = total/quota.MiB, free/quota.MiB, describe(err)
	total, free, err = c.heapInfo()
	m.HeapTotalMiB, m.HeapFreeMiB, m.HeapStatus = total/quota.MiB, free/quota.MiB, describe(err)
	if *asJSON {
		return json.NewEncoder(os.Stdout).Encode(m)
	}
	print("total_mib=%d\nfree_mib=%d\nused_mib=%d", m.TotalMiB, m.FreeMiB, m.UsedMiB)
	print("v1_total_mib=%d\nv1_free_mib=%d\nv1=%s", m.TotalV1MiB, m.FreeV1MiB, m.V1Status)
	print("heap_total_mib=%d\nheap_free_mib=%d\nheap=%s", m.HeapTotalMiB, m.HeapFreeMiB, m.HeapStatus)
	for i, x := range indices {
		print("fb_%#x_kib=%d", x, v[i]/quota.KiB)
	}
	return nil
}

// fbV1 is FB_GET_INFO, whose list sits behind a pointer.
func (c *client) fbV1() (total, free quota.Bytes, err error) {
	list := make([]byte, 2*rm.FBInfoEntry)
	rm.PutU32(list, 0, rm.FBIndexTotalRAMSize)
	rm.PutU32(list, rm.FBInfoEntry, rm.FBIndexHeapFree)
	p := make([]byte, 16)
	rm.PutU32(p, rm.FBInfoV1Count, 2)
	putPtr(p, rm.FBInfoV1List, list)
	err = c.control(c.subdevice, 0x20801301, p)
	runtime.KeepAlive(list)
	return quota.Bytes(rm.U32(list, 4)) * quota.KiB, quota.Bytes(rm.U32(list, rm.FBInfoEntry+4)) * quota.KiB, err
}

// heapCall issues RM_VID_HEAP_CONTROL.
func (c *client) heapCall(b []byte) error {
	rm.PutU32(b, rm.HeapRoot, c.handle)
	rm.PutU32(b, rm.HeapParent, c.device)
	rm.PutU32(b, rm.HeapStatus, 0xbad)
	errno := c.call.escape(c.fd, rm.EscVidHeapControl, b)
	if st := rm.U32(b, rm.HeapStatus); errno != 0 || st != rm.StatusOK {
		return &rmError{what: fmt.Sprintf("RM_VID_HEAP_CONTROL function %d", rm.U32(b, rm.HeapFunction)), errno: errno, status: st}
	}
	return nil
}

func (c *client) heapInfo() (total, free quota.Bytes, err error) {
	b := make([]byte, rm.HeapSize)
	rm.PutU32(b, rm.HeapFunction, rm.HeapFnInfo)
	err = c.heapCall(b)
	return quota.Bytes(rm.U64(b, rm.HeapTotal)), quota.Bytes(rm.U64(b, rm.HeapFree)), err
}

func cmdGPUs(c *client, args []string) error {
	for i, g := range c.gpus {
		print("card%d=id:%#x,minor:%d,bus:%04x:%02x:%02x.0", i, g.id, g.minor, g.domain, g.bus, g.slot)
		uuid := make([]byte, 268)
		rm.PutU32(uuid, 0, g.id)
		err := c.control(c.handle, 0x275, uuid)
		print("uuid%d=%s", i, text(uuid[8:264], err))
	}
	for _, q := range []struct {
		name string
		cmd  uint32
		size []int
	}{{"attached", 0x201, []int{128}}, {"probed", 0x214, []int{384, 256}}} {
		var err error
		for _, size := range q.size {
			p := make([]byte, size)
			if err = c.control(c.handle, q.cmd, p); err == nil {
				var ids []string
				for i := range rm.GPUIDListLen {
					if id := rm.U32(p, 4*i); id != rm.GPUIDUnused {
						ids = append(ids, fmt.Sprintf("%#x", id))
					}
				}
				print("%s=%s", q.name, strings.Join(ids, ","))
				break
			}
		}
		if err != nil {
			print("%s=%s", q.name, describe(err))
		}
	}
	active := make([]byte, 3076)
	if err := c.control(c.handle, 0x288, active); err != nil {
		print("active=%s", describe(err))
	} else {
		print("active=%d", rm.U32(active, 0))
	}
	mask := make([]byte, 4)
	if err := c.control(c.handle, 0x204, mask); err == nil {
		print("device_mask=%#x", rm.U32(mask, 0))
	}
	name := make([]byte, 132)
	err := c.control(c.subdevice, 0x20800110, name)
	print("name=%s", text(name[4:], err))
	paths, _ := filepath.Glob("/dev/nvidia*")
	print("nodes=%s", strings.Join(paths, ","))
	if len(nodes()) != len(c.gpus) {
		return fmt.Errorf("%d GPU nodes in /dev but CARD_INFO shows %d GPUs", len(nodes()), len(c.gpus))
	}
	return nil
}

// text is a NUL-terminated string, or the error.
func text(b []byte, err error) string {
	if err != nil {
		return describe(err)
	}
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

func cmdPids(c *client, args []string) error {
	for _, q := range []struct {
		name string
		id   uint32
	}{{"users", classSubdevice}, {"contexts", 0xc0}} {
		p := make([]byte, 3812)
		rm.PutU32(p, rm.PidsID, q.id)
		err := c.control(c.subdevice, 0x2080018d, p)
		if err != nil {
			print("%s=%s", q.name, describe(err))
			continue
		}
		var pids []string
		for i := range min(int(rm.U32(p, rm.PidsCount)), rm.PidsMax) {
			pids = append(pids, fmt.Sprint(rm.U32(p, rm.PidsTable+4*i)))
		}
		print("%s=%s", q.name, strings.Join(pids, ","))
	}
	print("self=%d", os.Getpid())
	p := make([]byte, 14408)
	rm.PutU32(p, rm.PidInfoCount, 1)
	rm.PutU32(p, rm.PidInfoList+rm.PidInfoPid, uint32(os.Getpid()))
	if err := c.control(c.subdevice, 0x2080018e, p); err != nil {
		print("self_memory=%s", describe(err))
		return nil
	}
	print("self_memory=%d", rm.U64(p, rm.PidInfoList+rm.PidInfoPrivate)+rm.U64(p, rm.PidInfoList+rm.PidInfoSharedOwned))
	return nil
}

// cmdGSPHeap shows the memory of the GPU's firmware (NV2080_CTRL_CMD_GSP_GET_RM_HEAP_STATS, ctrl2080gsp.h): one piece for all, and
// without it nobody makes a client. Not for containers.
func cmdGSPHeap(c *client, _ []string) error {
	p := make([]byte, 88)
	if err := c.control(c.subdevice, 0x20803602, p); err != nil {
		return err
	}
	print("heap_size=%d\nheap_free_chunk=%d\nheap_used=%d\nheap_allocations=%d\nheap_peak=%d", rm.U64(p, 8), rm.U64(p, 16), rm.U64(p, 24),
		rm.U32(p, 48), rm.U64(p, 56))
	return nil
}
