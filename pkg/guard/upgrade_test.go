// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestHungProgram: who asks for an upgrade to a program that cannot be started, since its file system hangs, is told, and the next one who
// asks is when it does not hang any more.
func TestHungProgram(t *testing.T) {
	g := newFakeGuard(t, &inProcess{})
	const program = "/bin/true" // root's, and no guard
	g.upgrading.Store(true)
	syscall.ForkLock.RLock() // nobody starts a program
	said := g.upgradeWithin(time.Millisecond, nil, program).Error
	busy := g.upgrading.Load()
	syscall.ForkLock.RUnlock()
	if !strings.Contains(said, program+" is not opened and started within 1ms; does its file system hang?") || !busy {
		t.Errorf("%q; another one may begin: %v", said, !busy)
	}
	for g.upgrading.Load() {
		time.Sleep(time.Millisecond)
	}
	g.upgrading.Store(true)
	if said := g.upgradeWithin(time.Minute, nil, program).Error; !strings.Contains(said, "it ended without a word") || g.upgrading.Load() {
		t.Errorf("%q; under way: %v", said, g.upgrading.Load())
	}
}
