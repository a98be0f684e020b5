// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/page"
)

// TestEnd: the gate is asked for a member's clients; why it does not end them, or its silence, is told, and nothing is asked for who is no
// member.
func TestEnd(t *testing.T) {
	member := ledger.Record{Domain: "team", Seat: 7, VGPUs: []ledger.VGPU{{UUID: gpu}}}
	release := make(chan struct{})
	defer close(release)
	for name, c := range map[string]struct {
		r     ledger.Record
		end   func() error // nil: it is not asked
		wants string       // in the error; empty: none
	}{
		"it ends": {member, func() error { return nil }, ""},
		"it cannot": {member, func() error { return errors.New("the MPS server\ndoes not\x1banswer") },
			`the MPS server\ndoes not\x1banswer`},
		"it is silent":   {member, func() error { <-release; return nil }, "i/o timeout"},
		"no such seat":   {ledger.Record{Domain: "team", Seat: page.Seats + 1, VGPUs: member.VGPUs}, nil, "EOF"},
		"the server":     {ledger.Record{Domain: "team", DomainServer: true, VGPUs: member.VGPUs}, nil, ""},
		"in no domain":   {ledger.Record{VGPUs: member.VGPUs}, nil, ""},
		"nobody's GPU":   {ledger.Record{Domain: "team", Seat: 7, VGPUs: []ledger.VGPU{{UUID: "GPU-2"}}}, nil, ""},
		"another domain": {ledger.Record{Domain: "none", Seat: 7, VGPUs: member.VGPUs}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			runDir := t.TempDir()
			asked := make(chan []int, 1)
			gateIn(t, page.Pipes(runDir, gpu, "team"), 7, &mps.Gate{End: func(pids []int) error {
				asked <- slices.Clone(pids)
				return c.end()
			}, Doubt: func(error) {}})
			err := End(runDir, c.r, time.Second/2)
			if (err == nil) != (c.wants == "") || err != nil && !strings.Contains(err.Error(), c.wants) {
				t.Errorf("%v, want %q", err, c.wants)
			}
			if len(asked) != 0 != (c.end != nil) {
				t.Errorf("asked %d times", len(asked))
			}
		})
	}
}
