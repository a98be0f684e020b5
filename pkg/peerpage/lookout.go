// SPDX-License-Identifier: Apache-2.0

package peerpage

import (
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Lookout is where the guards of a GPU have one of them look for all, so that the others sleep until there is something to see. It is laid
// out as a Page: the leader is who looks, and by an entry's ring he wakes a guard. He says until when he will have looked again. Whoever
// sees that he has ended, or that this time is past, takes over.
type Lookout struct {
	*Entry
	path string
}

// News is what a guard is woken for.
type News uint32

const (
	Outsiders News = 1 << iota // there may be processes outside that have the container's files
	Ran                        // the container has used CPU time
)

const (
	lookoutMagic = 0x63676c01

	// Header, where a Page has what its arbiter found. In offStepped stands until when the leader will have looked again.
	offLooker = 32 // u32: his entry

	// Entry.
	offAwaits = 4  // u32: Ran, if the guard wants to be told of it
	offNews   = 20 // u32: for what it was woken
	offMember = 24 // u64: which guard of its process; the program that goes on in the place of another has the same
	offFolder = 64 // u64: the length of the name that follows, where the container's CPU time is told
	maxFolder = entrySize - offFolder - 8

	// lookGrace is how late the leader may be.
	lookGrace = time.Second
	// lookTurn is how often one of the guards sees whether he is.
	lookTurn = 2 * time.Second
)

// JoinLookout takes a place among the guards of a GPU, or the one that the guard has. folder is where its container's CPU time is told.
func JoinLookout(runDir, uuid string, member uint64, folder string) (*Lookout, error) {
	l := &Lookout{&Entry{Page: &Page{}}, filepath.Join(filepath.Dir(Path(runDir, uuid)), filepath.Base(uuid)+".lookout")}
	if err := l.mapFile(l.path, pageSize, lookoutMagic, func() error { return l.takePlace(member, folder) }); err != nil {
		return nil, fmt.Errorf("lookout of GPU %s: %w", uuid, err)
	}
	return l, nil
}

// takePlace takes the guard's entry. The file is locked.
func (l *Lookout) takePlace(member uint64, folder string) error {
	if len(folder) > maxFolder {
		return fmt.Errorf("%.40s… is longer than %d bytes", folder, maxFolder)
	}
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		return err
	}
	for i := 1; i <= l.used() && l.at == 0; i++ {
		at := i * entrySize
		if int(l.u32(at+offOwner).Load()) == os.Getpid() && l.u64(at+offStart).Load() == start && l.u64(at+offMember).Load() == member {
			l.at = at
		}
	}
	if l.at == 0 {
		if err := l.claim(); err != nil {
			return err
		}
	}
	l.store64(l.at+offFolder, uint64(len(folder)))
	copy(l.mem[l.at+offFolder+8:], folder)
	l.store64(l.at+offMember, member)
	return nil
}

// Elect makes this guard the one that looks, unless somebody else does: then it returns false.
func (l *Lookout) Elect(now time.Duration) (bool, error) {
	if l.Leads() {
		return true, nil
	}
	if l.led(now) {
		return false, nil
	}
	file, err := os.OpenFile(l.path, os.O_RDWR, 0)
	if err != nil {
		return false, err
	}
	defer file.Close()
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		return false, err
	}
	if l.led(now) { // since
		return false, nil
	}
	l.store32(offLooker, uint32(l.Place()))
	l.Looks(now + lookGrace)
	return true, l.Lead()
}

// led reports that somebody looks, and is not late.
func (l *Lookout) led(now time.Duration) bool {
	file, ok := l.LeaderFile() // one that nobody has waited for is over, too
	if file != nil {
		_ = file.Close()
	}
	_, until, _ := l.Leader()
	return ok && now < until+lookGrace && until < now+longestPause
}

// longestPause is what nobody says that his next look is off; a later time is from before a reboot.
const longestPause = time.Hour

// Leads reports that this guard is the one that looks. Who was late may find that another one is.
func (l *Lookout) Leads() bool {
	pid, _, ok := l.Leader()
	return ok && pid == os.Getpid() && int(l.u32(offLooker).Load()) == l.Place()
}

// Looks says until when this guard will have looked again.
func (l *Lookout) Looks(until time.Duration) { l.store64(offStepped, uint64(until)) }

// Resign lets another guard look, as this one ends, and wakes them all.
func (l *Lookout) Resign() {
	if l.Leads() {
		l.store32(offLeader, 0)
		l.WakeAll(Outsiders)
	}
}

// Turn is after what time a guard that does not look should see whether who does is late. Each has its time on the clock, so that one does
// so in lookTurn, however many there are.
func (l *Lookout) Turn(now time.Duration) time.Duration {
	n, own := time.Duration(0), time.Duration(0)
	for m := range l.Members() {
		if m.Place == l.Place() {
			own = n
		}
		n++
	}
	round := max(n, 1) * lookTurn
	return (own*lookTurn-now%round+round-1)%round + 1
}

// AwaitRan has the guard told when its container has used CPU time.
func (l *Lookout) AwaitRan() { l.store32(l.at+offAwaits, uint32(Ran)) }

// News is what the guard was woken for since it was asked last.
func (l *Lookout) News() News { return News(l.u32(l.at + offNews).Swap(0)) }

// Member is a guard that has a place and lives.
type Member struct {
	Place  int
	Folder string
	Awaits bool // AwaitRan
}

// Members are the guards that live, this one too. It is for one goroutine.
func (l *Lookout) Members() iter.Seq[Member] {
	return func(yield func(Member) bool) {
		for i := 1; i <= l.used(); i++ {
			at := i * entrySize
			if !l.owned(i) {
				continue
			}
			n := within(l.u64(at+offFolder).Load(), 0, maxFolder)
			folder := string(l.mem[at+offFolder+8 : at+offFolder+8+n])
			if !yield(Member{i, folder, l.u32(at+offAwaits).Load() != 0}) {
				return
			}
		}
	}
}

// Wake tells a guard something. Of Ran it is told once.
func (l *Lookout) Wake(place int, news News) {
	at := place * entrySize
	if news&Ran != 0 {
		l.store32(at+offAwaits, 0)
	}
	l.u32(at + offNews).Or(uint32(news))
	l.ring(at + offRing)
}

// WakeAll tells all guards something, this one too.
func (l *Lookout) WakeAll(news News) {
	for m := range l.Members() {
		l.Wake(m.Place, news)
	}
}
