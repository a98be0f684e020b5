// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"iter"
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
// One guard looks for all of a GPU's (lookout.go): who has the GPU, as the driver says (NV2080_CTRL_CMD_GPU_GET_PIDS), and, as the driver
// does not name a process that made a client and has ended, nor who has only the file, now and then which of all processes have a file of
// the driver. Of one that is new, and not of the container, each guard looks at the descriptors: only it knows its container's files.
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
	// holdersAge is how old the answer to another guard's question may be: so long it takes longer until an outsider is found.
	holdersAge = lookEvery / 2
	// suspectShare is how many times as long as a look at all processes takes the next one is off where something calls for one at once:
	// whoever can must not keep a CPU busy by it.
	suspectShare = 20
	// maxPassed bounds the files of one holder that are compared with those in the container.
	maxPassed = 64

	controlGetPids = 0x2080018d // NV2080_CTRL_CMD_GPU_GET_PIDS (ctrl2080gpu.h)
	pidsSize       = rm.PidsTable + 4*rm.PidsMax
	_              = uint(peerpage.MaxHolders - rm.PidsMax) // the page has room for all
)

// sentFDs is what the guard knows of processes beyond its container.
type sentFDs struct {
	members chan struct{} // who is of the container can be told now
	look    chan struct{} // there may be somebody

	mu           sync.Mutex
	lookouts     []*lookout                 // by GPU; nil before members
	clean        map[outsider]bool          // have the GPU by files of their own
	seen         map[*lookout]time.Duration // which suspects were looked at, by when they were found
	everywhere   time.Time                  // when this guard looks at all processes; zero: it has no reason to
	suspectAfter time.Time                  // when it may next
	inCgroup     func(tgid int) bool
	pids         func() []int // tests: who has the GPU
}

// outsider is a process that may not be the container's.
type outsider = peerpage.Holder

// watchOutsiders looks for outsiders whenever there may be some, until the container is over.
func (g *Guard) watchOutsiders() {
	o := &g.sentFDs
	for !g.knowsMembers() {
		select {
		case <-g.done:
			return
		case <-o.members:
		}
	}
	g.pause(lookEvery) // the container begins
	list := g.joinLookouts()
	o.mu.Lock()
	o.lookouts = list
	o.mu.Unlock()
	for _, x := range list {
		if x.page != nil {
			g.managed.looker.CompareAndSwap(nil, x.page)
		}
		go g.keepLookout(x)
		if x.page != nil {
			go g.hear(x)
		}
	}
	for g.serving() {
		took := g.chargeTime(g.checkOutsiders)
		g.pause(backgroundShare * took)
		g.awaitOutsiders()
	}
}

// awaitOutsiders waits until there may be an outsider.
func (g *Guard) awaitOutsiders() {
	o := &g.sentFDs
	o.mu.Lock()
	at := o.everywhere
	o.mu.Unlock()
	var due <-chan time.Time
	if !at.IsZero() {
		timer := time.NewTimer(time.Until(at))
		defer timer.Stop()
		due = timer.C
	}
	select {
	case <-g.done:
	case <-o.look:
	case <-due:
	}
}

// knowsMembers: without a cgroup of the container it is not known who is of it.
func (g *Guard) knowsMembers() bool {
	return g.sentFDs.inCgroup != nil || g.containerCgroups().procs != ""
}

// checkOutsiders looks at who is new among those that have the GPU, and among those that a look at all processes found.
func (g *Guard) checkOutsiders() {
	o := &g.sentFDs
	o.mu.Lock()
	defer o.mu.Unlock()
	var b *belongings // nobody new, no work
	ours := func() *belongings {
		if b == nil {
			b = g.findBelongings(false)
		}
		return b
	}
	holders, suspects := g.checkHolders(ours), g.checkSuspects(ours)
	if holders || suspects {
		o.everywhere = later(time.Now(), o.suspectAfter)
	}
	if begin := time.Now(); !o.everywhere.IsZero() && !begin.Before(o.everywhere) {
		guilty := g.checkAllProcesses(ours())
		o.everywhere, o.suspectAfter = time.Time{}, time.Now().Add(suspectShare*time.Since(begin))
		if guilty > 0 { // once more for who had it from who is ended
			o.everywhere = o.suspectAfter
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// lookAtAll has this guard look at all processes.
func (o *sentFDs) lookAtAll(at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.everywhere = later(at, o.suspectAfter)
}

// checkHolders looks at who is new among those that have the GPU, and reports that others may have the container's files.
func (g *Guard) checkHolders(ours func() *belongings) (all bool) {
	o := &g.sentFDs
	clean := map[outsider]bool{}
	for _, who := range g.gpuHolders() {
		if who.PID == os.Getpid() || g.tasks.byHostPid(who.PID) != nil {
			continue
		}
		if o.clean[who] {
			clean[who] = true
			continue
		}
		switch g.checkOutsider(who, ours()) {
		case outsiderClean:
			clean[who] = true
		case outsiderUnclear: // it has given its file away
			clean[who], all = true, true
		case outsiderGuilty:
			all = true // there may be others with the same file
		}
	}
	o.clean = clean
	return all
}

// checkSuspects looks at those that a look at all processes found since the last time, and reports that there may be more.
func (g *Guard) checkSuspects(ours func() *belongings) (all bool) {
	o := &g.sentFDs
	for _, x := range o.lookouts {
		if x.page == nil {
			continue
		}
		list, at := x.suspects.Last()
		if at != 0 && at == o.seen[x] {
			continue
		}
		if o.seen == nil {
			o.seen = map[*lookout]time.Duration{}
		}
		o.seen[x] = at
		all = all || len(list) == peerpage.MaxHolders // and others, for whom there was no room
		for _, who := range list {
			if g.tasks.byHostPid(who.PID) == nil && g.checkOutsider(who, ours()) == outsiderGuilty {
				all = true
			}
		}
	}
	return all
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
	for pid := range processNumbers() {
		if pid == os.Getpid() || g.tasks.byHostPid(pid) != nil {
			continue
		}
		start, err := ledger.ProcStart(pid)
		if err == nil && g.checkOutsider(outsider{PID: pid, Start: start}, b) == outsiderGuilty {
			guilty++
		}
	}
	return guilty
}

// processNumbers are those of the node's processes.
func processNumbers() iter.Seq[int] {
	return func(yield func(int) bool) {
		proc, err := os.Open("/proc")
		if err != nil {
			return
		}
		defer proc.Close()
		names, _ := proc.Readdirnames(-1)
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil && !yield(pid) {
				return
			}
		}
	}
}

// gpuHolders lists who has a GPU of the container.
func (g *Guard) gpuHolders() (list []outsider) {
	if len(g.sentFDs.lookouts) == 0 {
		return started(g.gpuPids())
	}
	for _, x := range g.sentFDs.lookouts {
		some, _ := g.holdersOn(x)
		list = append(list, some...)
	}
	return list
}

// holdersOn lists who has one of them, as one guard of it was told by the driver a moment ago. False: the driver does not tell.
func (g *Guard) holdersOn(x *lookout) ([]outsider, bool) {
	ask := func() ([]outsider, bool) {
		pids, ok := g.pidsOn(x.gpu)
		return started(pids), ok
	}
	if x.holders == nil {
		return ask()
	}
	return x.holders.Get(gpusched.Monotonic(), holdersAge, ask)
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
	if g.sentFDs.pids != nil {
		return g.sentFDs.pids(), true
	}
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
