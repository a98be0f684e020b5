// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// watchLedger reads the ledger whenever it changes: limits, weights, caps, policies and pauses are what it says, at any time. It
// waits in inotify(7), so a node where nothing is started or set costs nothing, and reads no more often than pace lets it.
func (g *Guard) watchLedger(over <-chan struct{}) {
	path := ledger.File(g.cfg.RunDir)
	fd, err := g.followLedger(path)
	if err != nil {
		g.log.Error("cannot follow the ledger: `cgpu set` and `cgpu policy` reach this container only when it is started again", "err", err)
		g.readLedger()
		return
	}
	defer unix.Close(fd)
	go func() {
		<-over
		_, _ = unix.InotifyRmWatch(fd, 1) // ends the read below
	}()
	buf := make([]byte, 4096)
	var p pace
	for {
		g.readLedger()
		for seen := false; !seen; {
			n, err := unix.Read(fd, buf)
			if err == unix.EINTR {
				continue
			}
			select {
			case <-over:
				return
			default:
			}
			if err != nil || n < unix.SizeofInotifyEvent {
				return
			}
			seen = hasEventFor(buf[:n], filepath.Base(path))
		}
		select {
		case <-over:
			return
		case <-time.After(p.next(time.Now())):
		}
	}
}

// followLedger has an inotify instance for the ledger: that of the program before, should this one have taken its place. To close one waits
// for a worker of the kernel's, milliseconds on a busy machine, and so would execve(2) while the container's calls wait.
func (g *Guard) followLedger(path string) (fd int, err error) {
	if fd = int(g.ledgerFD.Load()); fd == 0 {
		if fd, err = unix.InotifyInit1(unix.IN_CLOEXEC); err != nil {
			return 0, err
		}
		if _, err = unix.InotifyAddWatch(fd, filepath.Dir(path), unix.IN_MOVED_TO); err != nil {
			_ = unix.Close(fd)
			return 0, err
		}
	}
	g.ledgerFD.Store(int32(fd))
	return fd, nil
}

// pace is how often a guard reads the ledger. All guards of a node read all of it after each change, 1.5 ms of a core each with 160
// containers; where there is no end of changes, that would be all cores.
type pace struct {
	spent int // of paceBurst
	at    time.Time
}

const (
	paceLeast = 2 * time.Millisecond // several changes at once are one
	paceBurst = 16                   // that many are followed at once
	paceEvery = 250 * time.Millisecond
)

// next is how long to wait before the ledger is read for a change that was seen now. What changes meanwhile is read with it.
func (p *pace) next(now time.Time) time.Duration {
	regained := max(int(now.Sub(p.at)/paceEvery), 0)
	if regained >= p.spent {
		p.spent, p.at = 0, now
	} else {
		p.spent -= regained
		p.at = p.at.Add(time.Duration(regained) * paceEvery)
	}
	if p.spent < paceBurst {
		p.spent++
		return paceLeast
	}
	p.at = p.at.Add(paceEvery) // the next to be regained is spent
	return min(max(p.at.Sub(now), paceLeast), paceEvery)
}

// hasEventFor reports an event for a name.
func hasEventFor(events []byte, name string) bool {
	for len(events) >= unix.SizeofInotifyEvent {
		e := (*unix.InotifyEvent)(unsafe.Pointer(&events[0]))
		end := unix.SizeofInotifyEvent + int(e.Len)
		if end > len(events) {
			return true
		}
		if e.Mask&unix.IN_Q_OVERFLOW != 0 { // whatever was moved, it is not told
			return true
		}
		if strings.TrimRight(string(events[unix.SizeofInotifyEvent:end]), "\x00") == name {
			return true
		}
		events = events[end:]
	}
	return false
}

func (g *Guard) readLedger() {
	g.work.RLock()
	defer g.work.RUnlock()
	records, cards, err := ledger.Open(g.cfg.RunDir).State()
	if err != nil {
		g.log.Error("cannot read the ledger; shares stay as they are", "err", err)
		return
	}
	g.applyLedger(records, cards)
	g.books.commit(nil)
	g.noteLedgerChanges(records)
}

// applyLedger hands what the ledger says of the container to whom it concerns: limits to the account, plans to GPU time.
func (g *Guard) applyLedger(records []ledger.Record, cards map[string]sched.Card) {
	own := slices.IndexFunc(records, func(r ledger.Record) bool { return r.Nonce == g.cfg.Nonce })
	if own < 0 {
		return
	}
	plans := g.plans(records, records[own], cards)
	for i, x := range g.cfg.GPUs {
		v := slices.IndexFunc(records[own].VGPUs, func(v ledger.VGPU) bool { return v.UUID == x.UUID })
		if v < 0 {
			continue
		}
		g.gpuTime.Adopt(i, plans[x.UUID])
		g.account.setLimits(i, records[own].VGPUs[v].Limit, records[own].VGPUs[v].Spill)
	}
}

// plans are those of the container's vGPUs, by GPU. A member of a trust domain is off when its server is, which has the domain's cap.
func (g *Guard) plans(records []ledger.Record, own ledger.Record, cards map[string]sched.Card) map[string]sched.Plan {
	cardOf := func(uuid string) sched.Card {
		if card, ok := cards[uuid]; ok {
			return card
		}
		return g.cfg.Settings.Card()
	}
	var claims []sched.Claim
	shares := map[string][]sched.Share{}
	for _, r := range records {
		claim := sched.Claim{ID: r.Nonce, Caps: map[string]sched.Permille{}}
		for _, v := range r.VGPUs {
			shares[v.UUID] = append(shares[v.UUID], v.Share)
			if p, capped := cardOf(v.UUID).Cap(v.Share); capped && r.Leader(records, v.UUID).Nonce == r.Nonce {
				claim.Caps[v.UUID] = p
			}
		}
		claims = append(claims, claim)
	}
	slots := gpusched.TimingOf(g.cfg).Layout(claims)
	plans := map[string]sched.Plan{}
	for _, v := range own.VGPUs {
		card, domain := cardOf(v.UUID), own.Leader(records, v.UUID)
		p := sched.Plan{Card: card, Effective: card.Effective(shares[v.UUID]), Share: v.Share, Suspended: own.Paused || domain.Paused}
		if capped, ok := card.Cap(domain.Share(v.UUID)); ok {
			p.Cap, p.Slot = capped, slots[domain.Nonce][v.UUID]
		}
		plans[v.UUID] = p
	}
	return plans
}
