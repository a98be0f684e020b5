// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// What is lent ends with who has lent it. A second handle keeps a channel group in the driver when the server has freed it, or is gone, and
// channels below it run: nobody schedules them then, and nobody has their time. So a member's guard tells the server's each second which
// groups it has, and of which processes, and frees the RM clients with a group that the server has no more, or whose server is gone or does
// not answer. So the server's guard knows whom the driver names for its groups, also where it has just gone on in another's place.

const (
	// renewEvery is how often a member's guard tells what it has.
	renewEvery = time.Second
	// renewTries is how often in a row a server's guard may not answer: one that goes on as another program is away for less than a second.
	renewTries = 5
	// guestTime is for how long a process counts that its guard has told of: longer than that may be away. newGuestTime is until it has.
	guestTime, newGuestTime = 10 * time.Second, 3 * renewEvery
	// maxGuests is more than an MPS server takes, and leaves room for its own processes among those that the arbiter is told of.
	maxGuests = 100
)

// watchLoans renews what a member's container has of its domain's server.
func (g *Guard) watchLoans(over <-chan struct{}) {
	unanswered := map[string]int{}
	for {
		select {
		case <-over:
			return
		case <-time.After(renewEvery):
			g.renewLoans(unanswered)
		}
	}
}

// renewLoans renews it once. unanswered counts, by the server's record, how often its guard has not answered.
func (g *Guard) renewLoans(unanswered map[string]int) {
	held := g.account.loans(g.cfg.Domain)
	maps.DeleteFunc(unanswered, func(nonce string, _ int) bool { return held[nonce] == nil })
	for nonce, l := range held {
		lost, err := g.renew(nonce, *l)
		switch {
		case err == nil:
			unanswered[nonce] = 0
		case errors.Is(err, ledger.ErrNotFound):
			lost = l.Groups
		default:
			if unanswered[nonce]++; unanswered[nonce] >= renewTries {
				lost = l.Groups
			}
		}
		if len(lost) > 0 {
			g.endLoans(nonce, lost, err)
		}
	}
}

func (g *Guard) renew(nonce string, l api.Loans) (lost []int, err error) {
	server, err := ledger.Open(g.cfg.RunDir).Get(nonce)
	if err != nil {
		return nil, err
	}
	return api.Renew(server, l)
}

// endLoans frees the RM clients with groups that are the server's no more. For a program its context is lost then, as it is where the
// server has ended.
func (g *Guard) endLoans(nonce string, groups []int, why error) {
	g.logOnce("loanover"+nonce, "RM clients are freed: they have a channel group that the domain's MPS server has no more", "server", nonce,
		"err", why)
	g.events.Note(event.Event{Kind: event.Warning,
		Text: fmt.Sprintf("CUDA contexts are ended: the MPS server of domain %s that they were made "+
			"by is gone; start the program again, and the next member to start starts the server", g.cfg.Domain)})
	g.chargeTime(func() {
		g.killClients(func(c *client) bool { // the account is locked
			for _, o := range c.groups {
				if o.group.lender.nonce == nonce && slices.Contains(groups, o.group.lender.group) {
					return true
				}
			}
			return false
		})
	})
}

// loans are what the container has of its domain's servers, by their records.
func (a *account) loans(domain string) map[string]*api.Loans {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := map[string]*api.Loans{}
	for _, c := range a.clients {
		for _, o := range c.groups {
			if !o.group.lent() {
				continue
			}
			from := o.group.lender
			l := list[from.nonce]
			if l == nil {
				l = &api.Loans{Domain: domain}
				list[from.nonce] = l
			}
			if !slices.Contains(l.Groups, from.group) {
				l.Groups = append(l.Groups, from.group)
			}
			if !slices.Contains(l.PIDs, c.tgid) {
				l.PIDs = append(l.PIDs, c.tgid)
			}
		}
	}
	return list
}

// renewed answers the guard of a member.
func (g *Guard) renewed(l api.Loans) (answer api.Renewed) {
	if !g.cfg.DomainServer || l.Domain != g.cfg.Domain {
		return api.Renewed{Error: "it is not the domain's server"}
	}
	for _, pid := range l.PIDs {
		if !g.noteGuest(0, pid, guestTime) {
			return api.Renewed{Error: "it cannot keep account of so many processes"}
		}
	}
	have := g.account.groupNumbers()
	return api.Renewed{Lost: slices.DeleteFunc(l.Groups, func(n int) bool { return have[n] })}
}

// groupNumbers are those of the container's own channel groups.
func (a *account) groupNumbers() map[int]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := map[int]bool{}
	for _, c := range a.clients {
		for _, o := range c.groups {
			list[o.group.number] = !o.group.lent() && o.group.preempts
		}
	}
	return list
}

// guests are the processes in whose name others have channel groups of the container's, by which switch records may name these, and until
// when they count. A process may have ended, and a child have its client.
type guests struct {
	mu   sync.Mutex
	list map[int]time.Time
}

// noteGuest notes one on a GPU. False: there are too many.
func (g *Guard) noteGuest(gpu, pid int, keep time.Duration) bool {
	known, ok := g.guests.add(pid, keep)
	if ok && !known {
		g.gpuTime.Made(gpu) // it tells the arbiter
	}
	return ok
}

func (x *guests) add(pid int, keep time.Duration) (known, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.list == nil {
		x.list = map[int]time.Time{}
	}
	x.prune()
	until, known := x.list[pid]
	if !known && len(x.list) >= maxGuests {
		return false, false
	}
	if later := time.Now().Add(keep); later.After(until) {
		x.list[pid] = later
	}
	return known, true
}

func (x *guests) prune() {
	maps.DeleteFunc(x.list, func(_ int, until time.Time) bool { return time.Now().After(until) })
}

func (x *guests) present() (pids []int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.prune()
	return slices.Collect(maps.Keys(x.list))
}
