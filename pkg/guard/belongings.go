// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// belongings are the mount namespaces of the container's processes, and the mounts in them.
type belongings struct {
	host       map[uint64]bool // the guard's namespace, and that of the node's first process
	namespaces map[uint64]bool
	guarded    map[uint64]bool   // of containers that other guards hold
	guards     map[outsider]bool // those, which copy what their containers were sent
	mounts     map[int]bool
	over       bool // the container is
}

// inCgroup says whether a process is in the container's cgroup, and not below it.
func (g *Guard) inCgroup(tgid int) bool {
	if g.sentFDs.inCgroup != nil {
		return g.sentFDs.inCgroup(tgid)
	}
	folder := g.containerCgroups().procs
	for _, controller := range []string{"devices", ""} {
		if dir, ok := cgroupOf(tgid, controller); ok && dir == folder {
			return true
		}
	}
	return false
}

// isOurs says whether a process is surely of the container, so that its mount namespace is the container's.
func (g *Guard) isOurs(tgid int) bool {
	return g.inCgroup(tgid) || g.tasks.lives(tgid) || tgid == g.livingFirst()
}

// livingFirst is the container's first process; 0: it has ended.
func (g *Guard) livingFirst() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if start, err := ledger.ProcStart(g.initPID); err != nil || start != g.initStart {
		return 0
	}
	return g.initPID
}

// findBelongings looks them up. They are those of living processes: the number of a mount that is gone may be another's. Others' containers
// are left to their guards, until the container is over.
func (g *Guard) findBelongings(over bool) *belongings {
	b := newBelongings()
	b.over = over
	for _, tgid := range append(g.containerPIDs(), g.livingFirst()) { // which is elsewhere if root has moved it
		namespace, ok := mountNamespace(tgid)
		if !ok || b.host[namespace] || b.namespaces[namespace] {
			continue
		}
		mounts := mountsOf(tgid)
		if again, ok := mountNamespace(tgid); !ok || again != namespace || !g.isOurs(tgid) {
			continue // gone, and another's by now; or below the container's cgroup
		}
		b.namespaces[namespace] = true
		for _, id := range mounts {
			b.mounts[id] = true
		}
	}
	g.addGuarded(b, func(r ledger.Record) bool { return !over && r.Nonce != g.cfg.Nonce })
	return b
}

// findShelters are the mount namespaces in which no guard looks for outsiders: the host's, and those of containers' first processes.
func (g *Guard) findShelters() *belongings {
	b := newBelongings()
	g.addGuarded(b, func(ledger.Record) bool { return true })
	return b
}

// shelters says that no guard looks at a process, which is in that mount namespace.
func (b *belongings) shelters(who outsider, namespace uint64) bool {
	return b.host[namespace] || b.guarded[namespace] || b.guards[who]
}

func newBelongings() *belongings {
	b := &belongings{host: map[uint64]bool{}, namespaces: map[uint64]bool{}, guarded: map[uint64]bool{}, guards: map[outsider]bool{},
		mounts: map[int]bool{}}
	for _, pid := range []int{os.Getpid(), 1} {
		if namespace, ok := mountNamespace(pid); ok {
			b.host[namespace] = true
		}
	}
	return b
}

// addGuarded adds the guards of all containers, and the mount namespaces of some.
func (g *Guard) addGuarded(b *belongings, some func(ledger.Record) bool) {
	records, err := ledger.Open(g.cfg.RunDir).List()
	if err != nil {
		g.logOnce("outside-ledger", "cannot tell which containers have guards", "err", err)
	}
	for _, r := range records {
		if r.GuardPID != 0 {
			b.guards[outsider{PID: r.GuardPID, Start: r.GuardStart}] = true
		}
		if start, err := ledger.ProcStart(r.InitPID); some(r) && r.Socket != "" && err == nil && start == r.InitStart {
			if namespace, ok := mountNamespace(r.InitPID); ok {
				b.guarded[namespace] = true
			}
		}
	}
}

// mountNamespace is the number of a process' mount namespace.
func mountNamespace(pid int) (uint64, bool) {
	var st unix.Stat_t
	err := unix.Stat("/proc/"+strconv.Itoa(livingThread(pid))+"/ns/mnt", &st)
	return st.Ino, err == nil
}

// maxMounts bounds what is read of a table of mounts; the kernel's bound is 100000 mounts of a namespace.
const maxMounts = 64 << 20

// mountsOf lists the numbers of the mounts that a process sees.
func mountsOf(pid int) (ids []int) {
	b, err := readBounded("/proc/"+strconv.Itoa(livingThread(pid))+"/mountinfo", maxMounts)
	if err != nil {
		return nil
	}
	for line := range bytes.Lines(b) {
		first, _, _ := bytes.Cut(line, []byte(" "))
		if id, err := strconv.Atoi(string(first)); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// mountOf is the number of the mount through which a file of the guard was opened; -1 if it cannot be told.
func mountOf(fd int) int {
	b, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return -1
	}
	for line := range bytes.Lines(b) {
		if value, ok := bytes.CutPrefix(line, []byte("mnt_id:")); ok {
			if id, err := strconv.Atoi(string(bytes.TrimSpace(value))); err == nil {
				return id
			}
		}
	}
	return -1
}

// cgroupText is what tells a process' cgroups; empty if it is gone.
func cgroupText(pid int) string {
	b, err := readBounded("/proc/"+strconv.Itoa(pid)+"/cgroup", 1<<16)
	if err != nil {
		return ""
	}
	return string(b)
}

// readBounded is os.ReadFile of the beginning of what a container can make long.
func readBounded(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, most))
}
