// SPDX-License-Identifier: Apache-2.0

// Package api is what a guard answers on its control socket, and how it is asked. It is apart from package guard for those who only
// ask: cgpu, cgpu-agent, and through them whoever reads their answers.
package api

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Request is a line of JSON on the control socket. The guard answers with one line of JSON and closes.
type Request struct {
	Op string `json:"op"`
	// Program is what a guard is to go on as.
	Program string `json:"program,omitempty"`
	// Loan is what another guard of the domain wants, and Loans are what it has.
	Loan  *Loan  `json:"loan,omitempty"`
	Loans *Loans `json:"loans,omitempty"`
}

// Loan is an object of a domain's MPS server of which a member makes a second handle.
type Loan struct {
	Domain         string `json:"domain"`
	Client, Object uint32 // of the server
	PID            int    // of the member's process
}

// Lent is the answer to OpLend. The object is open for a second handle until the connection ends, or for LoanTime.
type Lent struct {
	Error string `json:"error,omitempty"`
	UUID  string `json:"uuid,omitempty"` // of its GPU
	Class uint32 `json:"class,omitempty"`
	// Size is what is charged for it. Engine and Group, a number, are a channel group's, Length and Page are device memory's.
	Engine             uint32 `json:"engine,omitempty"`
	Group              int    `json:"group,omitempty"`
	Size, Length, Page quota.Bytes
}

// Loans are the channel groups of a domain's MPS server that a member has, by their numbers, and the processes in whose name.
type Loans struct {
	Domain string
	Groups []int
	PIDs   []int
}

// Renewed is the answer to OpRenew.
type Renewed struct {
	Error string `json:"error,omitempty"`
	Lost  []int  `json:"lost,omitempty"` // of the groups, which the server has no more
}

// LoanTime bounds how long an object is open.
const LoanTime = time.Second

// Refused is what a guard answers to who may not have, or keep, what it asks for.
type Refused string

func (r Refused) Error() string { return string(r) }

// What a guard is asked. To go on as another program is for root, who alone reaches the socket.
const (
	OpStatus  = "status"
	OpUpgrade = "upgrade"
	OpLend    = "lend"
	OpRenew   = "renew"
)

// Upgraded is the answer to OpUpgrade, by the program that serves the container from then on.
type Upgraded struct {
	Done bool `json:"done"`
	// Already: it was that program.
	Already bool `json:"already,omitempty"`
	// Error says why the guard goes on as the program that it was.
	Error string `json:"error,omitempty"`
	// Stall is for how long nobody took up the container's calls, the last time that it was tried; Tries is how often that was.
	Stall time.Duration `json:"stallNs"`
	Tries int           `json:"tries"`
}

// Status is the answer to OpStatus.
type Status struct {
	ID        string          `json:"id"`
	Nonce     string          `json:"nonce"`
	GuardPID  int             `json:"guardPid"`
	InitPID   int             `json:"initPid"`   // the container's first process, in the host's numbers; 0 before it is known
	Listeners int             `json:"listeners"` // live seccomp filters: the container's own and one for each exec
	VGPUs     []VGPUStatus    `json:"vgpus"`
	Processes []ProcessStatus `json:"processes"`
	Calls     CallCounters    `json:"calls"`
}

// VGPUStatus is the memory of one vGPU. Native ones have no limit.
type VGPUStatus struct {
	Index  int         `json:"index"`
	UUID   string      `json:"uuid"`
	Native bool        `json:"native,omitempty"`
	Limit  quota.Bytes `json:"limit"`
	Used   quota.Bytes `json:"used"`
	Peak   quota.Bytes `json:"peak"`
	// Managed is the part of Used that is managed memory; Spill is the host memory allowed beyond Limit, Spilled what is used of it.
	Managed quota.Bytes `json:"managed,omitempty"`
	Spill   quota.Bytes `json:"spill,omitempty"`
	Spilled quota.Bytes `json:"spilled,omitempty"`
	Denied  uint64      `json:"denied"` // allocations refused because of the limit
	// Compute is nil for native GPUs.
	Compute *ComputeStatus `json:"compute,omitempty"`
}

// ComputeStatus is the GPU time of one vGPU, since the container's start unless said otherwise.
type ComputeStatus struct {
	Policy sched.Policy `json:"policy"` // in effect on the GPU
	quota.Share
	Cap    sched.Permille `json:"cap,omitempty"` // hard cap; 0: none
	Paused bool           `json:"paused,omitempty"`
	TSGs   int            `json:"tsgs"` // channel groups on the graphics engine
	Busy   int            `json:"busy"` // of those, with work lately
	Slice  time.Duration  `json:"sliceNs"`

	// Ruled is false while no arbiter decides about the GPU's time, though the container has work.
	Ruled bool `json:"ruled"`

	// What follows comes from the driver's context-switch records. Exact is false where it gives none.
	Exact       bool           `json:"exact"`
	Utilization sched.Permille `json:"utilization"` // of the GPU's time, in about the last second
	Entitled    sched.Permille `json:"entitled"`    // what it should have been
	GPUTime     time.Duration  `json:"gpuTimeNs"`   // on the engine
	Waiting     time.Duration  `json:"waitingNs"`   // switched out in the middle of work
	Throttled   time.Duration  `json:"throttledNs"` // with work, while a hard cap, a turn or cgpu pause kept it off
	Switches    uint64         `json:"switches"`    // times that it was switched in
	Preemptions uint64         `json:"preemptions"` // of the times that it was switched out, those at the end of its timeslice
	Pauses      uint64         `json:"pauses"`      // by a hard cap or cgpu pause
	Granted     time.Duration  `json:"grantedNs"`   // what its share of the GPU's busy time would have been
}

// ProcessStatus is a process that has used the GPU.
type ProcessStatus struct {
	PID     int    `json:"pid"`   // in the host's pid namespace
	NSPID   int    `json:"nspid"` // in the container's
	Name    string `json:"name"`
	Clients int    `json:"clients"`
	// Used is per vGPU, in the order of Status.VGPUs; without context overhead shared memory counts once per process.
	Used []quota.Bytes `json:"used"`
}

// CallCounters count trapped calls since the start.
type CallCounters struct {
	Trapped     uint64 `json:"trapped"`
	Denied      uint64 `json:"denied"`
	Interrupted uint64 `json:"interrupted"` // carried out while a signal took the caller away
	Replayed    uint64 `json:"replayed"`    // of those, answered when the call came again
	Undone      uint64 `json:"undone"`      // of those, taken back because it did not
	Throttled   uint64 `json:"throttled"`   // delayed by the rate limit
	Killed      uint64 `json:"killed"`      // clients freed because of uncharged memory
	// ProcessesKilled counts processes killed for managed memory beyond the limit, Spills allocations that went to host memory.
	ProcessesKilled uint64 `json:"processesKilled"`
	Spills          uint64 `json:"spills"`
}

// Timeout bounds the wait for a guard: it answers in microseconds, unless something is wrong with it, or the machine has no processor
// for it.
const Timeout = time.Second

// Ask asks the guard of one record.
func Ask(r ledger.Record) (s Status, err error) {
	if err := ask(r, Request{Op: OpStatus}, Timeout, &s); err != nil {
		return s, err
	}
	if s.Nonce != r.Nonce {
		return s, errors.New("another container's guard answered")
	}
	return s, nil
}

// Upgrade has the guard of one record go on as another program.
func Upgrade(r ledger.Record, program string, within time.Duration) (u Upgraded, err error) {
	return u, ask(r, Request{Op: OpUpgrade, Program: program}, within, &u)
}

// Borrow calls f while an object of the domain's server is open for a second handle. An error that is not Refused says nothing of whether
// it may be had.
func Borrow(server ledger.Record, l Loan, f func(Lent)) error {
	conn, err := send(server, Request{Op: OpLend, Loan: &l}, LoanTime)
	if err != nil {
		return err
	}
	defer conn.Close()
	var answer Lent
	if err := Receive(conn, &answer); err != nil {
		return err
	}
	if answer.Error != "" {
		return Refused(answer.Error)
	}
	f(answer)
	return nil
}

// Renew tells the server's guard what a member has, and asks which of it the server has no more.
func Renew(server ledger.Record, l Loans) (lost []int, err error) {
	var answer Renewed
	if err := ask(server, Request{Op: OpRenew, Loans: &l}, LoanTime, &answer); err != nil {
		return nil, err
	}
	if answer.Error != "" {
		return nil, Refused(answer.Error)
	}
	return answer.Lost, nil
}

// ask sends a request and reads the answer.
func ask(r ledger.Record, q Request, within time.Duration, answer any) error {
	conn, err := send(r, q, within)
	if err != nil {
		return err
	}
	defer conn.Close()
	return Receive(conn, answer)
}

func send(r ledger.Record, q Request, within time.Duration) (net.Conn, error) {
	deadline := time.Now().Add(within)
	conn, err := net.DialTimeout("unix", r.Control, min(within, time.Second))
	if err != nil {
		return nil, err
	}
	err = conn.SetDeadline(deadline)
	if err == nil {
		err = json.NewEncoder(conn).Encode(q)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// Receive reads a line of another program of ours.
func Receive(conn net.Conn, answer any) error {
	// Many processes make a long line; a line without an end is none of a guard's.
	line, err := bufio.NewReader(io.LimitReader(conn, 16<<20)).ReadBytes('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(line, answer)
}
