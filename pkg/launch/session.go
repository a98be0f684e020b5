// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"os"

	"github.com/opencgpu/cgpu/pkg/admit"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
)

// Session is the start of a container, or of a process without one, on slices of GPUs. Its steps, in their order, are a guard, the node's
// table, Ask, Reserve, Tell and Ready. Undo takes back whatever was done of them.
type Session struct {
	RunDir  string
	Guard   *Guard // nil where the container has none
	Table   *device.Table
	Request ledger.Request // what Ask has made
	Record  ledger.Record  // what was reserved
}

// Ask puts what is asked into the ledger's terms, in Request. mine says which container it is; without an ID it is a run. Its launcher
// is this process, unless mine names another.
func (s *Session) Ask(ask *admit.Ask, mine ledger.Record) (err error) {
	if mine.Nonce, err = Nonce(); err != nil {
		return err
	}
	if mine.ID == "" {
		mine.ID = "run-" + mine.Nonce
	}
	if mine.LauncherPID == 0 {
		mine.LauncherPID = os.Getpid()
	}
	if mine.LauncherStart, err = ledger.ProcStart(mine.LauncherPID); err != nil {
		return err
	}
	if s.Guard != nil {
		mine.GuardPID = s.Guard.PID
		if mine.GuardStart, err = ledger.ProcStart(mine.GuardPID); err != nil {
			return err
		}
	}
	if s.Request, err = ask.Reservation(mine, s.Table, s.RunDir); err != nil {
		return err
	}
	return admit.GivePage(&s.Request, s.RunDir)
}

// Reserve has the ledger admit the request. A refusal is the ledger's; Ask.Refused has the container's words for it.
func (s *Session) Reserve() (err error) {
	s.Record, err = ledger.Open(s.RunDir).Reserve(s.Request)
	return err
}

// Tell makes the vGPU page and tells the guard what was reserved. cgroups are folders that the guard has to remove in the end.
func (s *Session) Tell(cgroups []string) error {
	if err := MakePage(s.Record, s.Table, s.RunDir); err != nil || s.Guard == nil {
		return err
	}
	config := GuardConfig(s.Record, s.Table, s.RunDir)
	config.Cgroups = cgroups
	return s.Guard.Tell(&config)
}

// Ready returns when the guard, if there is one, takes the container's calls.
func (s *Session) Ready() error {
	if s.Guard == nil {
		return nil
	}
	return s.Guard.Wait(s.Table.Config.GuardStartTimeout)
}

// Undo takes back all that was done, and says what could not be.
func (s *Session) Undo() error {
	s.Guard.Stop()
	if s.Record.Nonce == "" {
		return nil
	}
	left := page.Remove(s.RunDir, s.Record.Nonce)
	if err := ledger.Open(s.RunDir).Release(s.Record.Nonce); err != nil {
		return err
	}
	return left
}
