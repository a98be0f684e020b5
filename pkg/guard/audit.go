package guard

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// auditor is an RM client of the guard's own, with a subdevice of each GPU of the container, to ask the driver how much
// device memory a process holds (NV2080_CTRL_CMD_GPU_GET_PID_INFO). The control takes RM's locks on all GPUs, so it is
// asked on suspicion only.
type auditor struct {
	g      *Guard
	fd     int
	client uint32
	subs   []uint32 // subdevice handles, in the order of g.gpus
}

const (
	classRootClient = 0x41
	classDevice     = 0x80
	classSubdevice  = 0x2080

	controlAttachIDs  = 0x215 // NV0000_CTRL_CMD_GPU_ATTACH_IDS
	attachIDsSize     = 132
	controlGetPidInfo = 0x2080018e
	pidInfoSize       = 14408

	firstAuditHandle = 0xcaf10000
)

func newAuditor(g *Guard) (*auditor, error) {
	fd, err := unix.Open(g.cfg.ControlNode.HostPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", g.cfg.ControlNode.HostPath, err)
	}
	a := &auditor{g: g, fd: fd}
	if a.client, err = a.alloc(0, 0, 0, classRootClient, nil); err != nil {
		a.close()
		return nil, err
	}
	ids := make([]byte, attachIDsSize)
	for i := range rm.GPUIDListLen {
		id := uint32(rm.GPUIDUnused)
		if i < len(g.gpus) {
			id = g.gpus[i].id
		}
		rm.PutU32(ids, 4*i, id)
	}
	_, _ = g.control(a.target(), a.client, a.client, controlAttachIDs, ids) // fails when they are attached already
	for i, x := range g.gpus {
		info := make([]byte, idInfoSize)
		rm.PutU32(info, 0, x.id)
		if s, e := g.control(a.target(), a.client, a.client, controlGetIDInfoV2, info); e != 0 || s != rm.StatusOK {
			a.close()
			return nil, fmt.Errorf("identify GPU %#x: %s", x.id, rm.StatusName(s))
		}
		params := make([]byte, 56) // NV0080_ALLOC_PARAMETERS
		rm.PutU32(params, rm.DeviceID, rm.U32(info, idInfoInstance))
		dev, err := a.alloc(a.client, a.client, firstAuditHandle+uint32(2*i), classDevice, params)
		if err != nil {
			a.close()
			return nil, err
		}
		sub, err := a.alloc(a.client, dev, firstAuditHandle+uint32(2*i+1), classSubdevice, make([]byte, 4))
		if err != nil {
			a.close()
			return nil, err
		}
		a.subs = append(a.subs, sub)
	}
	return a, nil
}

func (a *auditor) target() Target { return Target{FD: a.fd} }

// close frees the client with the file.
func (a *auditor) close() { _ = unix.Close(a.fd) }

func (a *auditor) alloc(client, parent, handle, class uint32, params []byte) (uint32, error) {
	form, ok := a.g.abi.AllocForm(48)
	if !ok {
		form, _ = a.g.abi.AllocForm(32)
	}
	outer := make([]byte, form.Size)
	rm.PutU32(outer, rm.AllocRoot, client)
	rm.PutU32(outer, rm.AllocParent, parent)
	rm.PutU32(outer, rm.AllocObject, handle)
	rm.PutU32(outer, rm.AllocClass, class)
	call := rm.Call{Cmd: 3<<30 | uint32(form.Size)<<16 | 'F'<<8 | rm.EscAlloc, Outer: outer}
	if len(params) > 0 {
		call.Blocks = []rm.Block{{In: -1, Off: rm.AllocParams, Data: params}}
	}
	e := a.g.driver.Exec(a.target(), &call)
	if s := rm.U32(outer, form.StatusOff); e != 0 || s != rm.StatusOK {
		return 0, fmt.Errorf("allocate %s: %s, errno %d", rm.ClassName(class), rm.StatusName(s), e)
	}
	return rm.U32(outer, rm.AllocObject), nil
}

// held is how much device memory the driver counts for some processes, per GPU. Private and owned memory count once each;
// duped memory is some other client's (_gpuCollectMemInfo).
func (a *auditor) held(procs []*process) []quota.Bytes {
	sum := make([]quota.Bytes, len(a.subs))
	for i, sub := range a.subs {
		for _, p := range procs {
			info := make([]byte, pidInfoSize)
			rm.PutU32(info, rm.PidInfoCount, 1)
			rm.PutU32(info, rm.PidInfoList+rm.PidInfoPid, uint32(p.tgid))
			if s, e := a.g.control(a.target(), a.client, sub, controlGetPidInfo, info); e != 0 || s != rm.StatusOK {
				a.g.logOnce("audit", "the driver does not say what a process holds", "status", rm.StatusName(s))
				continue
			}
			sum[i] += quota.Bytes(rm.U64(info, rm.PidInfoList+rm.PidInfoPrivate) + rm.U64(info, rm.PidInfoList+rm.PidInfoSharedOwned))
		}
	}
	return sum
}

// auditTime is for how long the guard looks again after something that it could not explain, and auditPause how long it
// waits between: a thread can be kept from running, and the control takes the locks of all the machine's GPUs.
const (
	auditTime  = 10 * time.Second
	auditPause = 200 * time.Millisecond
)

// suspect starts to compare the driver's account of the container with the guard's own: now, and for a while.
func (g *Guard) suspect() {
	if !g.driver.Native() {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.auditUntil = time.Now().Add(auditTime)
	g.auditWait = auditPause
	if !g.auditing {
		g.auditing = true
		go g.auditLoop()
	}
}

func (g *Guard) auditLoop() {
	for {
		g.audit()
		g.mu.Lock()
		if time.Now().After(g.auditUntil) {
			g.auditing = false
			g.mu.Unlock()
			return
		}
		wait := g.auditWait
		g.auditWait = min(2*wait, 3*time.Second)
		g.mu.Unlock()
		time.Sleep(wait)
	}
}

// audit compares once. If the driver counts memory that was never allocated through the guard, all the container's RM
// clients are freed, and with them all it holds. The driver's own lengths are compared: charges are rounded up, and the
// difference could hide something.
func (g *Guard) audit() {
	a, err := newAuditor(g)
	if err != nil {
		g.log.Error("cannot ask the driver what the container holds", "err", err)
		return
	}
	defer a.close()
	// A client outlives its process where a child has the file. The driver does not tell of processes that are gone.
	g.killClients(func(c *client) bool { return g.tasks.byHostPid(c.tgid) == nil })
	// Calls in flight make both numbers wrong for a moment: only what stays wrong counts.
	for range 3 {
		held, seen := a.held(g.tasks.processes()), g.account.lengths()
		excess := false
		for i := range held {
			if held[i] > seen[i] {
				excess = true
				g.log.Warn("the driver counts more device memory for the container than was allocated for it", "driver", held[i], "guard", seen[i])
			}
		}
		if !excess {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	g.log.Error("the container holds device memory that was never charged; all its RM clients are freed")
	g.killClients(func(*client) bool { return true })
}

// killClients frees RM clients of the container, with all they hold.
func (g *Guard) killClients(which func(*client) bool) {
	g.account.mu.Lock()
	var victims []*client
	for _, c := range g.account.clients {
		if which(c) {
			victims = append(victims, c)
		}
	}
	g.account.mu.Unlock()
	if len(victims) == 0 {
		return
	}
	tgids := containerProcesses(g.firstPID())
	for _, p := range g.tasks.processes() {
		tgids = append(tgids, p.tgid)
	}
	for _, c := range victims {
		fd := -1
		for _, tgid := range tgids {
			if fd = findFile(g.files.self, tgid, c.file, &g.nodes); fd >= 0 {
				break
			}
		}
		if fd < 0 {
			g.log.Error("cannot find the file of an RM client", "pid", c.tgid)
			continue
		}
		if s, e := g.free(Target{FD: fd, PID: c.tgid, TID: c.tgid}, c.handle, c.handle); e == 0 && s == rm.StatusOK {
			g.clientGone(c)
			g.stats.killed.Add(1)
		}
		_ = unix.Close(fd)
	}
}
