// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// A descriptor of a driver's file can be sent out of the container, by a socket, to a process that no filter and no guard holds:
// the device cgroup checks only who opens. There it is the whole GPU. So the guard looks for such holders and ends them.
//
// Once a second it looks which processes have the GPU: one guard asks the driver for all of the GPU's (NV2080_CTRL_CMD_GPU_GET_PIDS). One
// that is new, and not of the container, has its descriptors looked at. The driver does not name a process that made a client and has
// ended, nor who has only the file; so now and then all processes of the node are looked at.
//
// What tells is the mount through which a file was opened: the container's namespace has mounts of its own, also of nodes that are
// bind mounts of the host's. Processes in the mount namespace of the guard or of the node's first process are the host's, and are let
// be, as are another guard, whoever one holds, and the container's own. Of the container is who
//
//   - has its filter, which a trapped call has shown;
//   - is in a mount namespace of its first process, or of one that has its filter or its cgroup: nobody comes into another's without root;
//   - is in the cgroup that the engine has made for it, and not below that: docker run --cgroup-parent=/docker/ID makes a container
//     below another's, and --pid=container:ID lets orphans become children of that one's first process.
//
// So one that has gone into both a cgroup and a mount namespace of its own is the container's from its first trapped call on.

const (
	outsiderLook = time.Second
	// holdersAge is how old the answer to another guard's question may be: so long it takes longer until an outsider is found.
	holdersAge = outsiderLook / 2
	// Between two looks at all processes: at least everywhereLook, and so many times as long as one takes.
	everywhereLook  = 30 * time.Second
	everywhereShare = 500
	// longestLook bounds that, as tenants can make a look take long; and while the container sleeps looks are so seldom: what it sent
	// may wait in a socket until then.
	longestLook = 10 * time.Minute
	// suspectShare is the same where something calls for a look at once: whoever can must not keep a CPU busy by it.
	suspectShare = 20
	// maxPassed bounds the files of one holder that are compared with those in the container.
	maxPassed = 64

	controlGetPids = 0x2080018d // NV2080_CTRL_CMD_GPU_GET_PIDS (ctrl2080gpu.h)
	pidsSize       = rm.PidsTable + 4*rm.PidsMax
	_              = uint(peerpage.MaxHolders - rm.PidsMax) // the page has room for all
)

// sentFDs is what the guard knows of processes beyond its container.
type sentFDs struct {
	mu           sync.Mutex
	clean        map[outsider]bool // have the GPU by files of their own
	everywhere   time.Time         // when all processes are looked at next
	suspectAfter time.Time         // when they may be, on suspicion
	cpu          time.Duration     // that the container had used at the last such look
	awake        bool              // it had used some
	asleep       time.Time         // when all processes are looked at if it sleeps
	inCgroup     func(tgid int) bool
	pids         func() []int // tests: who has the GPU
	// holders of each GPU of the container, as all its guards know them; nil: that cannot be had.
	holders []*peerpage.Holders
}

// outsider is a process that may not be the container's.
type outsider = peerpage.Holder

// watchOutsiders looks for outsiders until the container is over.
func (g *Guard) watchOutsiders() {
	wait := outsiderLook
	for {
		select {
		case <-g.done:
			return
		case <-time.After(wait):
		}
		g.countGPUTime()
		if g.knowsMembers() {
			wait = max(outsiderLook, backgroundShare*g.chargeTime(g.checkGPUHolders))
		}
	}
}

// knowsMembers: without a cgroup of the container it is not known who is of it.
func (g *Guard) knowsMembers() bool {
	return g.sentFDs.inCgroup != nil || g.containerCgroups().procs != ""
}

// checkGPUHolders looks once.
func (g *Guard) checkGPUHolders() {
	o := &g.sentFDs
	o.mu.Lock()
	defer o.mu.Unlock()
	clean := map[outsider]bool{}
	var b *belongings // nobody new, no work
	all := false
	for _, who := range g.gpuHolders() {
		if who.PID == os.Getpid() || g.tasks.byHostPid(who.PID) != nil {
			continue
		}
		if o.clean[who] {
			clean[who] = true
			continue
		}
		if b == nil {
			b = g.findBelongings(false)
		}
		switch g.checkOutsider(who, b) {
		case outsiderClean:
			clean[who] = true
		case outsiderUnclear: // it has given its file away
			clean[who], all = true, true
		case outsiderGuilty:
			all = true // there may be others with the same file
		}
	}
	o.clean = clean
	switch now := time.Now(); {
	case all && now.Before(o.suspectAfter):
		o.everywhere, o.awake = o.suspectAfter, true
		return
	case all:
	case now.Before(o.everywhere):
		return
	default:
		used, ok := cpuUsage(g.containerCgroups().cpu)
		was := o.awake
		o.awake, o.cpu = !ok || used != o.cpu, used
		if !o.awake && !was && now.Before(o.asleep) { // what was sent at the last moment may have been received since: hence once more
			o.everywhere = now.Add(everywhereLook)
			return
		}
	}
	begin := time.Now()
	if b == nil {
		b = g.findBelongings(false)
	}
	wait := everywhereLook
	if g.checkAllProcesses(b) > 0 {
		wait = outsiderLook
	}
	took, now := time.Since(begin), time.Now()
	o.suspectAfter, o.asleep = now.Add(suspectShare*took), now.Add(max(longestLook, suspectShare*took))
	if o.everywhere = now.Add(pauseAfter(wait, took)); wait == outsiderLook { // once more for who had it from who is ended
		o.everywhere, o.awake = o.suspectAfter, true
	}
}

// pauseAfter is the time from a look at all processes to the next.
func pauseAfter(wait, took time.Duration) time.Duration {
	return max(wait, min(everywhereShare*took, longestLook), suspectShare*took)
}

// endOutsiders ends whoever outside still holds the files of a container that is over.
func (g *Guard) endOutsiders() int {
	if !g.knowsMembers() {
		return 0
	}
	g.sentFDs.mu.Lock()
	defer g.sentFDs.mu.Unlock()
	return g.checkAllProcesses(g.findBelongings(true))
}

// checkAllProcesses looks at all processes of the node, and returns how many were guilty.
func (g *Guard) checkAllProcesses(b *belongings) (guilty int) {
	proc, err := os.Open("/proc")
	if err != nil {
		return 0
	}
	defer proc.Close()
	names, _ := proc.Readdirnames(-1)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == os.Getpid() || g.tasks.byHostPid(pid) != nil {
			continue
		}
		start, err := ledger.ProcStart(pid)
		if err == nil && g.checkOutsider(outsider{PID: pid, Start: start}, b) == outsiderGuilty {
			guilty++
		}
	}
	return guilty
}

// gpuHolders lists who has a GPU of the container, as one guard of each GPU was told by the driver a moment ago.
func (g *Guard) gpuHolders() (list []outsider) {
	o := &g.sentFDs
	if o.pids != nil {
		return started(o.pids())
	}
	if o.holders == nil {
		o.holders = g.openHolders()
	}
	for i, h := range o.holders {
		ask := func() ([]outsider, bool) {
			pids, ok := g.pidsOn(i)
			return started(pids), ok
		}
		got, ok := []outsider(nil), false
		if h != nil {
			got, ok = h.Get(gpusched.Monotonic(), holdersAge, ask)
		} else {
			got, ok = ask()
		}
		if ok {
			list = append(list, got...)
		}
	}
	return list
}

func (g *Guard) openHolders() []*peerpage.Holders {
	list := make([]*peerpage.Holders, len(g.cfg.GPUs))
	for i, x := range g.cfg.GPUs {
		h, err := peerpage.OpenHolders(g.cfg.RunDir, x.UUID)
		if err != nil {
			g.logOnce("holders", "this guard asks the driver itself which processes have the GPU", "err", err)
			continue
		}
		list[i] = h
	}
	return list
}

// started are those processes that live, with their starts.
func started(pids []int) (list []outsider) {
	for _, pid := range pids {
		if start, err := ledger.ProcStart(pid); err == nil {
			list = append(list, outsider{PID: pid, Start: start})
		}
	}
	return list
}

// gpuPids asks the driver who has a GPU of the container.
func (g *Guard) gpuPids() (pids []int) {
	if g.sentFDs.pids != nil {
		return g.sentFDs.pids()
	}
	for i := range g.cfg.GPUs {
		on, _ := g.pidsOn(i)
		pids = append(pids, on...)
	}
	return pids
}

// pidsOn asks the driver who has one of them.
func (g *Guard) pidsOn(i int) (pids []int, ok bool) {
	a, err := g.guardClient()
	if err != nil {
		g.logOnce("outside", "cannot ask the driver which processes have the GPU", "err", err)
		return nil, false
	}
	params := make([]byte, pidsSize)
	rm.PutU32(params, rm.PidsID, rmclient.ClassSubdevice)
	subs := a.Subdevices()
	if i >= len(subs) {
		return nil, false
	}
	if s, e := a.Control(subs[i], controlGetPids, params); e != 0 || s != rm.StatusOK {
		g.logOnce("outside", "the driver does not say which processes have the GPU", "status", rm.StatusName(s), "errno", e)
		return nil, false
	}
	for i := range int(min(rm.U32(params, rm.PidsCount), rm.PidsMax)) {
		pids = append(pids, int(rm.U32(params, rm.PidsTable+4*i)))
	}
	return pids, true
}

type verdict int

const (
	outsiderClean   verdict = iota // the host's, the container's own, or with files of its own
	outsiderUnclear                // it has no file of the driver at all, or none any more that is the container's
	outsiderGuilty
)

// checkOutsider looks at a process, and ends it if it has a file of the container.
func (g *Guard) checkOutsider(who outsider, b *belongings) verdict {
	namespace, ok := mountNamespace(who.PID)
	if !ok || b.host[namespace] || b.namespaces[namespace] || b.guarded[namespace] || b.guards[who] || g.inCgroup(who.PID) {
		return outsiderClean
	}
	var passed []int
	defer func() {
		for _, fd := range passed {
			_ = unix.Close(fd)
		}
	}()
	own := false
	eachTable(who.PID, &g.nodes, func(fd int, _ place) bool {
		n, _, err := g.nodes.classify(fd)
		switch {
		case err != nil:
		case g.isContainersFile(fd, n, b):
			passed = append(passed, fd)
			return len(passed) < maxPassed
		default:
			own = own || n.kind == nodeControl
		}
		_ = unix.Close(fd)
		return true
	})
	switch {
	case len(passed) > 0:
		// A look at all processes takes a while, in which the number of a mount that is gone can become another's, and the container
		// can get a mount namespace more. The mounts of passed stay: we have them open.
		b = g.findBelongings(b.over)
		still := func(fd int) bool {
			n, _, err := g.nodes.classify(fd)
			return err == nil && g.isContainersFile(fd, n, b)
		}
		if b.namespaces[namespace] || b.guarded[namespace] {
			return outsiderClean
		}
		if !slices.ContainsFunc(passed, still) {
			return outsiderUnclear
		}
		g.endOutsider(who, b, passed)
		return outsiderGuilty
	case own:
		return outsiderClean
	}
	return outsiderUnclear
}

// isContainersFile says whether a file, of that node, is the container's.
func (g *Guard) isContainersFile(fd int, n node, b *belongings) bool {
	return b.mounts[mountOf(fd)] || g.files.find(fd, n.kind) != nil ||
		b.over && n.kind != nodeOther && g.account.hasLooseWindowOn(g.files.self, fd)
}

// endOutsider ends a process outside that has files of the container, and those in the container that have the same files: what was
// allocated on a file lives until the last of its descriptors is closed, wherever that is.
func (g *Guard) endOutsider(who outsider, b *belongings, passed []int) {
	pidfd, err := unix.PidfdOpen(who.PID, 0) // first, or the number may be another's after the comparison
	if err != nil {
		return // gone
	}
	defer unix.Close(pidfd)
	if start, err := ledger.ProcStart(who.PID); err != nil || start != who.Start {
		return // gone
	}
	g.log.Warn("ending a process outside of the container that has the container's driver files", "pid", who.PID, "files", len(passed))
	g.stats.processesKilled.Add(1)
	g.events.Note(event.Event{Kind: event.Killed, PID: who.PID, Text: "a process outside of the container that was sent its GPU's files"})
	files := map[*file]bool{}
	for _, fd := range passed {
		if f := g.files.find(fd, nodeControl); f != nil {
			files[f] = true
		}
	}
	g.stopChannels(func(c *client) bool { return files[c.file] })
	if err := killHeld(pidfd, who.PID); err != nil {
		// Whoever traces it is its companion, or the host's.
		tracer := tracerOf(who.PID)
		if namespace, ok := mountNamespace(tracer); tracer != 0 && ok && !b.host[namespace] && cgroupText(tracer) == cgroupText(who.PID) {
			err = killOne(tracer)
		}
		if err != nil {
			g.logOnce("outsider", "cannot end a process outside of the container that has its driver files", "pid", who.PID, "err", err)
		}
	}
	for _, tgid := range g.containerPIDs() {
		for _, fd := range passed {
			if hasFile(g.files.self, tgid, fd, &g.nodes) {
				g.log.Warn("ending the process that shares driver files with one outside of the container", "pid", tgid)
				g.events.Note(event.Event{Kind: event.Killed, PID: tgid, Text: "it shares its GPU's files with a process outside of the container"})
				g.killProcess(tgid)
				break
			}
		}
	}
}
