// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"golang.org/x/sys/unix"
)

// fileOf copies the file that a client lives on back from the container, to make a call in the client's name. The guard
// keeps none: it would hold the client's memory when the container has closed it. Close the target's descriptor.
func (g *Guard) fileOf(c *client) (Target, bool) { return g.fileWithin(c, &g.bill.searches) }

// fileWithin is fileOf, which searches for as long as a bucket has seconds.
func (g *Guard) fileWithin(c *client, searches *bucket) (Target, bool) {
	t := Target{FD: -1, PID: c.tgid, TID: c.tgid}
	if c.file == nil {
		return t, false
	}
	g.account.mu.Lock()
	seen := c.fileSeenAt
	g.account.mu.Unlock()
	if seen.tgid != 0 {
		if t.FD = g.fileAt(seen, c.file); t.FD >= 0 {
			return t, true
		}
	}
	if searches.owed(time.Now()) > 0 {
		return t, false
	}
	defer func(begin time.Time) { searches.spend(time.Now(), time.Since(begin).Seconds()) }(time.Now())
	tgids := []int{c.tgid}
	for _, p := range g.tasks.processes() {
		if p.tgid != c.tgid {
			tgids = append(tgids, p.tgid)
		}
	}
	tgids = append(tgids, g.containerCgroups().processes()...)
	for _, tgid := range tgids {
		if fd, at := findFile(g.files.self, tgid, c.file, &g.nodes); fd >= 0 {
			g.account.mu.Lock()
			c.fileSeenAt = at
			g.account.mu.Unlock()
			t.FD = fd
			return t, true
		}
	}
	return t, false
}

// fileAt copies a descriptor if it is the file.
func (g *Guard) fileAt(p place, f *file) int {
	pidfd, err := openThread(p.tid, p.tgid)
	if err != nil {
		return -1
	}
	defer unix.Close(pidfd)
	fd, _, e := unix.RawSyscall(unix.SYS_PIDFD_GETFD, uintptr(pidfd), uintptr(p.fd), 0)
	if e != 0 {
		return -1
	}
	if order, e := f.compare(g.files.self, int(fd)); e != 0 || order != kcmpEqual {
		_ = unix.Close(int(fd))
		return -1
	}
	return int(fd)
}
