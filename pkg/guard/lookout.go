// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"hash/fnv"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/peerpage"
)

// One guard of each GPU looks for all of them (peerpage.Lookout): who has the GPU, as the driver says; which processes outside of all
// containers have a file of the driver that is not their own; and which containers have used CPU time, without which a program maps
// nothing. It wakes those whom that concerns. The others sleep for as long as nothing happens.

const (
	// lookEvery is how often one guard looks.
	lookEvery = time.Second
	// While no container uses CPU time the driver is not asked again for restShare times as long as it took, but for restLook at most: what
	// was sent away before can still be received by somebody.
	restShare = 1000
	restLook  = 5 * time.Second
	// Between two looks at all processes: at least everywhereLook, and so many times as long as one takes.
	everywhereLook  = 30 * time.Second
	everywhereShare = 500
	// longestLook bounds that, as tenants can make a look take long; and while all containers sleep looks are so seldom: what they sent may
	// wait in a socket until then.
	longestLook = 10 * time.Minute
	// patientLook is how long one may take until another guard takes over.
	patientLook = 10 * time.Second
)

// lookout is the guard's part in that, of one GPU.
type lookout struct {
	gpu      int               // in Config.GPUs
	page     *peerpage.Lookout // nil: not to be had; then the guard looks for itself
	holders  *peerpage.Holders // nil: the same
	suspects *peerpage.Holders
	elect    chan struct{} // who looks has something to say: that he does so no more, perhaps

	// What who looks knows.
	told       map[outsider]bool // who had the GPU
	ask        time.Time         // when the driver is asked next while nothing runs
	rest       time.Time         // and when at the earliest while something does
	usage      map[int]*usage    // of CPU time, by place
	awake      bool              // a container had used some between the last two looks at all processes
	everywhere time.Time         // when all processes are looked at next
	asleep     time.Time         // when they are if no container has used any
}

// joinLookouts takes the guard's part on each of its GPUs.
func (g *Guard) joinLookouts() (list []*lookout) {
	member := fnv.New64a()
	_, _ = member.Write([]byte(g.cfg.Nonce))
	for i, gpu := range g.cfg.GPUs {
		x := &lookout{gpu: i, elect: make(chan struct{}, 1)}
		list = append(list, x)
		var err error
		if x.holders, err = peerpage.OpenHolders(g.cfg.RunDir, gpu.UUID); err == nil {
			x.suspects, err = peerpage.OpenSuspects(g.cfg.RunDir, gpu.UUID)
		}
		if err == nil {
			x.page, err = peerpage.JoinLookout(g.cfg.RunDir, gpu.UUID, member.Sum64(), g.containerCgroups().cpu)
		}
		if err != nil {
			g.logOnce("lookout", "this guard looks by itself which processes have the GPU", "gpu", gpu.Index, "err", err)
			x.page, x.holders = nil, nil
		}
	}
	return list
}

// keepLookout looks for all guards of a GPU whenever nobody else does, until the container is over.
func (g *Guard) keepLookout(x *lookout) {
	defer x.leave()
	for g.serving() {
		if !x.elected() {
			g.awaitTurn(x)
			continue
		}
		g.chargeTime(func() { g.lookForAll(x) })
		x.promise(lookEvery)
		g.pause(lookEvery)
	}
}

// elected reports that it is for this guard to look. Where that cannot be told two may.
func (x *lookout) elected() bool {
	if x.page == nil || x.page.Leads() {
		return true
	}
	mine, err := x.page.Elect(gpusched.Monotonic())
	if mine {
		x.told, x.usage, x.awake = nil, nil, true // the last one may have ended before he told anybody
	}
	return mine || err != nil
}

// promise says until when this guard will have looked again.
func (x *lookout) promise(within time.Duration) {
	if x.page != nil && x.page.Leads() {
		x.page.Looks(gpusched.Monotonic() + within)
	}
}

// awaitTurn waits for the end of who looks, or until it is this guard's turn to see whether he is late.
func (g *Guard) awaitTurn(x *lookout) {
	looker, ok := x.page.LeaderFile()
	if !ok {
		return // gone since
	}
	over := make(chan struct{})
	if looker != nil {
		defer looker.Close()
		go func() {
			if peerpage.AwaitEnd(looker) == nil {
				close(over)
			}
		}()
	}
	turn := time.NewTimer(x.page.Turn(gpusched.Monotonic()))
	defer turn.Stop()
	select {
	case <-g.done:
	case <-over:
	case <-x.elect:
	case <-turn.C:
	}
}

// leave lets another guard look.
func (x *lookout) leave() {
	if x.page != nil {
		x.page.Resign()
		x.page.Leave()
	}
}

// hear waits for what this guard is told of a GPU.
func (g *Guard) hear(x *lookout) {
	for g.serving() {
		seen := x.page.Rung()
		news := x.page.News()
		if news&peerpage.Outsiders != 0 {
			kick(g.sentFDs.look)
			kick(x.elect)
		}
		if news&peerpage.Ran != 0 {
			g.countGPUTime()
			kick(g.managed.ran)
		}
		x.page.AwaitRing(seen)
	}
}

// lookForAll looks once, and wakes whom it concerns.
func (g *Guard) lookForAll(x *lookout) {
	running := x.wakeRunning()
	news := false
	if now := time.Now(); (running || !now.Before(x.ask)) && !now.Before(x.rest) {
		begin := threadTime()
		news = g.newHolders(x)
		took := threadTime() - begin
		x.ask, x.rest = now.Add(min(restShare*took, restLook)), now.Add(backgroundShare*took)
	}
	if now := time.Now(); !now.Before(x.everywhere) && x.mayHaveSent(now) {
		news = g.lookEverywhere(x) || news
	}
	switch {
	case !news:
	case x.page == nil:
		kick(g.sentFDs.look)
	default:
		x.page.WakeAll(peerpage.Outsiders)
	}
}

// newHolders reports that somebody has the GPU who had not before, and who may be outside of all containers.
func (g *Guard) newHolders(x *lookout) (news bool) {
	told := map[outsider]bool{}
	var b *belongings
	list, ok := g.holdersOn(x)
	news = !ok // another guard may be told
	for _, who := range list {
		told[who] = true
		if x.told[who] {
			continue
		}
		if b == nil {
			b = g.findShelters()
		}
		if namespace, ok := mountNamespace(who.PID); ok && !b.shelters(who, namespace) {
			news = true
		}
	}
	x.told = told
	return news
}

// mayHaveSent reports that a container has used CPU time since the last look at all processes, or that it is time for one all the same.
func (x *lookout) mayHaveSent(now time.Time) bool {
	was := x.awake
	x.awake = x.ranSince()
	if x.awake || was || !now.Before(x.asleep) { // what was sent at the last moment may have been received since: hence once more
		return true
	}
	x.everywhere = now.Add(everywhereLook)
	return false
}

// lookEverywhere looks at all processes of the node, and reports that guards should look at some of them.
func (g *Guard) lookEverywhere(x *lookout) (news bool) {
	begin := time.Now()
	x.promise(patientLook)
	if x.page == nil {
		g.sentFDs.lookAtAll(begin)
		news = true
	} else {
		list := g.findSuspects(x)
		if x.page.Leads() { // else another guard has taken over meanwhile
			x.suspects.Put(gpusched.Monotonic(), list)
		}
		news = len(list) > 0
	}
	took, now := time.Since(begin), time.Now()
	x.asleep, x.everywhere = now.Add(max(longestLook, suspectShare*took)), now.Add(pauseAfter(everywhereLook, took))
	return news
}

// pauseAfter is the time from a look at all processes to the next.
func pauseAfter(wait, took time.Duration) time.Duration {
	return max(wait, min(everywhereShare*took, longestLook), suspectShare*took)
}

// findSuspects are those outside of all containers that have a file of the driver which may be a container's.
func (g *Guard) findSuspects(x *lookout) (list []outsider) {
	b := g.findShelters()
	for pid := range processNumbers() {
		x.promise(patientLook)
		// First what is cheap, and tells of most.
		namespace, ok := mountNamespace(pid)
		if !ok || b.host[namespace] || b.guarded[namespace] {
			continue
		}
		start, err := ledger.ProcStart(pid)
		if who := (outsider{PID: pid, Start: start}); err == nil && !b.shelters(who, namespace) && g.hasForeignFile(pid) {
			list = append(list, who)
		}
	}
	return list
}

// hasForeignFile reports that a process has a file of the driver that was not opened through a mount which it sees, as one has that
// somebody sent it: a mount is of one namespace.
func (g *Guard) hasForeignFile(pid int) (found bool) {
	var mounts []int
	eachTable(pid, &g.nodes, func(fd int, _ place) bool {
		if mounts == nil {
			mounts = mountsOf(pid)
		}
		found = !slices.Contains(mounts, mountOf(fd))
		_ = unix.Close(fd)
		return !found
	})
	return found
}

// usage is what a container had used of the CPUs.
type usage struct {
	folder     string
	file       *os.File      // there it is told
	last       time.Duration // when its guard was told
	everywhere time.Duration // at the last look at all processes
}

// wakeRunning wakes the guards that wait for their container to use CPU time, and reports that one has.
func (x *lookout) wakeRunning() (running bool) {
	if x.page == nil {
		return true
	}
	for m := range x.page.Members() {
		if !m.Awaits {
			continue
		}
		u := x.usageOf(m)
		if now, ok := u.read(); !ok || now != u.last {
			u.last, running = now, true
			x.page.Wake(m.Place, peerpage.Ran)
		}
	}
	return running
}

// ranSince reports that a container has used CPU time since it was last asked.
func (x *lookout) ranSince() (ran bool) {
	if x.page == nil {
		return true
	}
	for m := range x.page.Members() {
		u := x.usageOf(m)
		now, ok := u.read()
		ran = ran || !ok || now != u.everywhere
		u.everywhere = now
	}
	return ran
}

// usageOf is what is known of a container. What was known of the one before it in its guard's place is dropped.
func (x *lookout) usageOf(m peerpage.Member) *usage {
	if x.usage == nil {
		x.usage = map[int]*usage{}
	}
	u := x.usage[m.Place]
	if u == nil || u.folder != m.Folder {
		if u != nil {
			u.close()
		}
		u = &usage{folder: m.Folder, last: -1, everywhere: -1}
		x.usage[m.Place] = u
	}
	return u
}

// read asks the kernel. False: it does not tell, or no more.
func (u *usage) read() (time.Duration, bool) {
	if u.file == nil {
		f, err := openUsage(u.folder)
		if err != nil {
			return 0, false
		}
		u.file = f
	}
	used, ok := readUsage(u.file)
	if !ok {
		u.close() // of another cgroup by that name, perhaps
	}
	return used, ok
}

func (u *usage) close() {
	_ = u.file.Close()
	u.file = nil
}
