// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

const (
	controlGetPidInfo = 0x2080018e
	pidInfoSize       = 14408
)

// driverHeld asks the driver (NV2080_CTRL_CMD_GPU_GET_PID_INFO) how much device memory it counts for some processes, per GPU.
// It counts each handle: of private memory, as owner, or as dup (_gpuCollectMemInfo). Which of several is the owner changes, and UVM can be
// it, for which RM counts nothing; so all three are summed. The control takes RM's locks on all GPUs, so it is asked on suspicion, and once
// after root allocs (rootsettled.go).
func (g *Guard) driverHeld(own *rmclient.Client, procs []*process) []quota.Bytes {
	sum := make([]quota.Bytes, len(own.Subdevices()))
	for i, sub := range own.Subdevices() {
		for _, p := range procs {
			info := make([]byte, pidInfoSize)
			rm.PutU32(info, rm.PidInfoCount, 1)
			rm.PutU32(info, rm.PidInfoList+rm.PidInfoPid, uint32(p.tgid))
			if s, e := own.Control(sub, controlGetPidInfo, info); e != 0 || s != rm.StatusOK {
				g.logOnce("audit", "the driver does not say what a process holds", "status", rm.StatusName(s))
				continue
			}
			for _, at := range []int{rm.PidInfoPrivate, rm.PidInfoSharedOwned, rm.PidInfoSharedDuped} {
				sum[i] += quota.Bytes(rm.U64(info, rm.PidInfoList+at))
			}
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

// suspicion is why the two accounts are compared.
type suspicion bool

const (
	unsure   suspicion = false // they could not be compared in a quiet moment, as a container with much to do has none
	suspects suspicion = true  // a root alloc went elsewhere, or may have
)

// startAudit starts to compare the driver's account of the container with the guard's own: now, and for a while.
func (g *Guard) startAudit(why suspicion) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.auditSuspects = g.auditSuspects || why
	g.auditUntil = time.Now().Add(auditTime)
	g.auditWait = auditPause
	if !g.auditing {
		g.auditing = true
		go g.auditLoop()
	}
}

func (g *Guard) auditLoop() {
	for {
		took := g.chargeTime(g.audit)
		g.mu.Lock()
		if time.Now().After(g.auditUntil) {
			g.auditing, g.auditSuspects = false, unsure
			g.mu.Unlock()
			return
		}
		wait := g.auditWait
		g.auditWait = min(2*wait, 3*time.Second)
		g.mu.Unlock()
		time.Sleep(max(wait, backgroundShare*took))
	}
}

// Calls in flight, and files that are being closed, make both numbers wrong for a while; a worker can be kept from running between the
// driver's answer and the account. So guilty is who holds more in auditExcess looks, which take a second. Who allocates and frees all the
// time can have the numbers agree now and then, and is not cleared by one look, but by auditAgree.
const (
	auditStep   = 80 * time.Millisecond
	auditExcess = 12
	auditAgree  = 8
)

// audit compares until it is sure. If the driver counts memory that was never allocated through the guard, all the container's RM
// clients are freed, and with them all it holds. The driver's own lengths are compared: charges are rounded up, and the
// difference could hide something.
func (g *Guard) audit() {
	a, err := g.guardClient()
	if err != nil {
		g.log.Error("cannot ask the driver what the container holds", "err", err)
		return
	}
	g.mu.Lock()
	why := g.auditSuspects
	g.mu.Unlock()
	// A client outlives its process where a child has the file: a daemon's that has used NVML before it forked, say. The driver does not tell
	// of processes that are gone.
	if why == suspects && g.killClients(func(c *client) bool { return g.tasks.byHostPid(c.tgid) == nil }) > 0 {
		g.extendAudit()
	}
	var more uncharged
	for excess, agree := 0, 0; excess < auditExcess; time.Sleep(auditStep) {
		if m, _ := g.holdsUncharged(a); m.driver > m.guard {
			more = m
			excess++
		} else if agree++; agree == auditAgree {
			return
		}
	}
	g.log.Error("the container holds device memory that was never charged; all its RM clients are freed", "driver",
		more.driver, "guard", more.guard)
	g.events.Note(event.Event{Kind: event.Freed, Text: "all RM clients: the container held device memory that was never charged"})
	if g.killClients(func(*client) bool { return true }) > 0 {
		g.extendAudit()
	}
}

// uncharged is what driver and guard count for a container, where the driver counts more.
type uncharged struct{ driver, guard quota.Bytes }

// holdsUncharged compares once. What is allocated or freed meanwhile is none of it. What a client holds whose process has ended, its file
// being a child's, is on neither side: else it were room for what was never charged. So would be what was on a file that was closed
// unnoticed, which the driver has freed; so that is looked at first. quiet says that no memory came or went between the two accounts.
func (g *Guard) holdsUncharged(own *rmclient.Client) (u uncharged, quiet bool) {
	g.startSweep()
	users := g.gpuUsers()
	tgids := map[int]bool{}
	for _, p := range users {
		tgids[p.tgid] = true
	}
	changes, before := g.account.memoryChanges(), g.account.expectedLengths(tgids)
	held, after := g.driverHeld(own, users), g.account.expectedLengths(tgids)
	quiet = g.account.memoryChanges() == changes
	for i := range held {
		if seen := max(before[i], after[i]); held[i] > seen {
			return uncharged{held[i], seen}, quiet
		}
	}
	return uncharged{}, quiet
}

// gpuUsers lists the container's processes that can hold device memory: those with clients that the guard knows, and that the driver names.
// There can be many others, and to ask of each takes all GPUs' locks.
func (g *Guard) gpuUsers() (list []*process) {
	users := g.account.clientPIDs()
	for _, pid := range g.gpuPids() {
		users[pid] = true
	}
	for _, p := range g.tasks.processes() {
		if users[p.tgid] {
			list = append(list, p)
		}
	}
	return list
}

// extendAudit is for clients that could not be freed: their files are under way in a socket, say, and will be back.
func (g *Guard) extendAudit() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.auditUntil = time.Now().Add(auditTime)
}

// killClients frees RM clients of the container, with all they hold, and returns how many it could not, as their files were not found.
func (g *Guard) killClients(which func(*client) bool) (left int) {
	g.stopChannels(which)
	g.account.mu.Lock()
	var victims []*client
	for _, c := range g.account.clients {
		if which(c) {
			victims = append(victims, c)
		}
	}
	g.account.mu.Unlock()
	for _, c := range victims {
		t, ok := g.fileOf(c)
		if !ok {
			g.logOnce("nofile", "cannot find the file of an RM client", "pid", c.tgid)
			left++
			continue
		}
		if s, e := g.rmFree(t, c.handle, c.handle); e == 0 && s == rm.StatusOK {
			g.clientGone(c)
			g.stats.killed.Add(1)
		}
		t.Done()
	}
	return left
}
