// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

const (
	domainLook    = time.Second // how often the guard of a domain's server looks
	domainLeisure = 10          // looks at a domain without members, after which its server ends: who is started anew comes back within
)

// watchDomain ends the MPS server of a domain when nobody names that any more, and what is left of it when its first process, which has the
// daemon and the members' pipes, is gone: nobody else would.
func (g *Guard) watchDomain(over <-chan struct{}) {
	for alone := 0; ; {
		select {
		case <-over:
			return
		case <-time.After(domainLook):
		}
		if alone++; g.domainHasMembers() {
			alone = 0
		}
		g.mu.Lock()
		pid, start := g.initPID, g.initStart
		g.mu.Unlock()
		if pid == 0 {
			continue
		}
		now, err := ledger.ProcStart(pid)
		switch {
		case err != nil || now != start:
			g.killAll()
		case alone >= domainLeisure && g.retire():
			g.killAll()
		}
	}
}

func (g *Guard) domainHasMembers() bool {
	records, err := ledger.Open(g.cfg.RunDir).List()
	return err != nil || ledger.HasMembers(records, g.cfg.Domain, g.cfg.GPUs[0].UUID)
}

// retire has the ledger take no more members for this server. False: it has some.
func (g *Guard) retire() bool {
	retired, err := ledger.Open(g.cfg.RunDir).Retire(g.cfg.Nonce)
	if err != nil {
		g.log.Warn("cannot end the domain's MPS server", "err", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.retired = g.retired || retired
	return retired
}

// killAll kills all of the container.
func (g *Guard) killAll() {
	for _, pid := range g.containerPIDs() {
		g.killProcess(pid)
	}
}

// noteDomainEnd tells of a server that ended before its members, whose contexts are gone with it.
func (g *Guard) noteDomainEnd() {
	g.mu.Lock()
	retired := g.retired
	g.mu.Unlock()
	if g.cfg.DomainServer && !retired && g.domainHasMembers() {
		x := g.cfg.GPUs[0]
		g.events.Write(event.Event{Kind: event.Warning, GPU: &event.GPU{Index: x.Index, UUID: x.UUID},
			Text: fmt.Sprintf("the MPS server of domain %s has ended: so have its members' CUDA contexts; the next member to start starts it again",
				g.cfg.Domain)})
	}
}
