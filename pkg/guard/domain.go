// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"time"

	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

const (
	domainLook    = time.Second // how often the guard of a domain's server looks
	domainLeisure = 10          // looks at a domain without members, after which its server ends: who is started anew comes back within

	domainAsk       = 10 // looks from one question to the server's gate to the next
	domainSilence   = 2  // questions without an answer, after which it ends
	domainBeginning = 2  // more of them while it begins: NVIDIA's daemon has half a minute (pkg/mps)
)

// isMember reports that the container computes through the MPS server of a trust domain.
func (g *Guard) isMember() bool { return g.cfg.Domain != "" && !g.cfg.DomainServer }

// watchDomain ends the MPS server of a domain when nobody names that any more, and what is left of it when its first process, which has the
// daemon and the members' pipes, is gone or does not answer: nobody else would. Whoever has taken NVIDIA's server over can stop that
// process.
func (g *Guard) watchDomain(over <-chan struct{}) {
	g.mu.Lock()
	g.silence = -domainBeginning
	g.mu.Unlock()
	for looks, alone := 1, 0; ; looks++ {
		select {
		case <-over:
			return
		case <-time.After(domainLook):
		}
		if err := domain.WriteParts(g.cfg.RunDir, g.cfg.GPUs[0].UUID, g.cfg.Domain); err != nil {
			g.logOnce("parts", "members may have other parts of the multiprocessors than the ledger says", "err", err)
		}
		if alone++; g.domainHasMembers() {
			alone = 0
		}
		if alone >= domainLeisure {
			if _, err := ledger.Open(g.cfg.RunDir).Retire(g.cfg.Nonce); err != nil {
				g.logOnce("retire", "cannot end the domain's MPS server", "err", err)
			}
		}
		if looks%domainAsk == 0 {
			g.askDomain()
		}
		if g.domainIsOver() {
			g.killAll()
		}
	}
}

// askDomain counts questions without an answer, as a member's guard puts them.
func (g *Guard) askDomain() {
	answers := domain.Answers(g.cfg.RunDir, g.cfg.GPUs[0].UUID, g.cfg.Domain)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.silence++; answers {
		g.silence = 0
	}
}

// domainIsOver reports that the server must end: it takes no more members, does not answer, or its first process is gone.
func (g *Guard) domainIsOver() bool {
	g.mu.Lock()
	pid, start := g.initPID, g.initStart
	g.mu.Unlock()
	if pid == 0 {
		return false
	}
	if now, err := ledger.ProcStart(pid); err != nil || now != start {
		return true
	}
	g.mu.Lock()
	g.holdWords(pid)
	silent := g.silence >= domainSilence
	g.mu.Unlock()
	return silent || g.isRetired()
}

// holdWords opens what the domain's server writes at its end, which goes with its mounts: at its beginning, or where this guard goes on in
// another's place. g.mu is locked.
func (g *Guard) holdWords(pid int) {
	if g.cfg.DomainServer && g.words == nil {
		g.words, _ = domain.Words(pid)
	}
}

// isRetired asks the ledger, which outlives this guard.
func (g *Guard) isRetired() bool {
	r, err := ledger.Open(g.cfg.RunDir).Get(g.cfg.Nonce)
	return err == nil && r.Retired
}

func (g *Guard) domainHasMembers() bool {
	some, err := ledger.Open(g.cfg.RunDir).HasMembers(g.cfg.Domain, g.cfg.GPUs[0].UUID)
	return some || err != nil
}

// killAll kills all of the container.
func (g *Guard) killAll() {
	for _, pid := range g.containerPIDs() {
		g.killProcess(pid)
	}
}

// noteDomainEnd tells of a server that ended before its members, whose contexts are gone with it, or that says why it ended: its members
// may have gone in the same moment.
func (g *Guard) noteDomainEnd() {
	if !g.cfg.DomainServer {
		return
	}
	x := g.cfg.GPUs[0]
	g.mu.Lock()
	why := domain.Ended(g.words) // nobody's is empty
	if why == "" && g.silence >= domainSilence {
		why = "its gate did not answer"
	}
	g.mu.Unlock()
	if why == "" && !g.domainHasMembers() {
		return
	}
	text := fmt.Sprintf("the MPS server of domain %s has ended: so have its members' CUDA contexts; the next member to start starts it again",
		g.cfg.Domain)
	if why != "" {
		text += "; why: " + why
	}
	g.events.Write(event.Event{Kind: event.Warning, GPU: &event.GPU{Index: x.Index, UUID: x.UUID}, Text: text})
}
