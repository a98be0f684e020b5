// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// TestSMITimeout: a guard that hangs does not hold smi up for ever.
func TestSMITimeout(t *testing.T) { nodetest.Busy(t) }

func TestEnded(t *testing.T) {
	self := os.Getpid()
	start, err := ledger.ProcStart(self)
	if err != nil {
		t.Fatal(err)
	}
	const none = 1 << 30 // above the largest process id
	for name, tt := range map[string]struct {
		r    ledger.Record
		want bool
	}{
		"guard lives":                  {ledger.Record{GuardPID: self, GuardStart: start}, false},
		"guard ended":                  {ledger.Record{GuardPID: none, GuardStart: 1}, true},
		"guard's number is another's":  {ledger.Record{GuardPID: self, GuardStart: start + 1}, true},
		"guard ended, container lives": {ledger.Record{GuardPID: none, InitPID: self, InitStart: start}, false},
		"both ended":                   {ledger.Record{GuardPID: none, InitPID: none}, true},
		"launcher lives":               {ledger.Record{LauncherPID: self, LauncherStart: start}, false},
		"launcher ended":               {ledger.Record{LauncherPID: none}, true},
	} {
		if got := snapshot.Ended(tt.r); got != tt.want {
			t.Errorf("%s: ended %v, want %v", name, got, tt.want)
		}
	}
}

func TestSMIWithoutTable(t *testing.T) {
	_, err := node.View(t.TempDir())
	if !errors.Is(err, device.ErrMissing) || !strings.HasPrefix(err.Error(), "launch: ") {
		t.Errorf("got %v", err)
	}
}
