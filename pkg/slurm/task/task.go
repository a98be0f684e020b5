// SPDX-License-Identifier: Apache-2.0

// Package task gives a task of Slurm's its slice, for the hidden command slurm-task: slurm/cgpu_spank.c starts that as root for each task
// of a step, and the task waits, with a mount namespace of its own, for what is said on descriptor 3.
package task

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/hostrun/runner"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/slurm"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// Task is a task of a step. What it asks for is the user's; all else is slurmstepd's.
type Task struct {
	PID, UID    int
	Job, Name   string
	Gres        string                       // its GPUs, by Slurm; empty: none
	Policy      string                       // slurm.toml
	PolicyNamed bool                         // somebody has said which; it must be there
	Asks        bool                         // for a slice
	Quota       func() (*quota.Quota, error) // what it asks for
	Refused     func(error) error            // tells a refusal in the words of cgpu run
}

// Start prepares the task and tells it how to go on, or why it may not.
func (t Task) Start() error {
	err := t.start()
	if err != nil {
		text := words.Replace(strings.ReplaceAll(err.Error(), "\n", " "))
		_ = say(answer{kind: answerRefused, text: strings.TrimPrefix(text, "run: ")})
	}
	return err
}

// words turn the flags of cgpu run, in its refusals, into those of srun.
var words = strings.NewReplacer("--memory", "--gpu-mem", "--weight", "--gpu-weight", "--percent", "--gpu-percent", "--gpu ", "--gres ")

func (t Task) start() error {
	runner.CleanEnvironment()
	runner.IgnoreStops()
	hostrun.Leave()    // the guard must outlive the step, and nobody who can freeze a step's cgroup may have the node's locks wait
	if t.PolicyNamed { // who names a file means one: without it nobody would be limited
		if _, err := os.Stat(t.Policy); err != nil {
			return fmt.Errorf("plugstack.conf: policy=%s: %w", t.Policy, errors.Unwrap(err))
		}
	}
	policy, err := slurm.Load(t.Policy)
	if err != nil {
		return err
	}
	runDir := device.RunDir()
	switch {
	case t.Asks:
		return t.slice(policy, runDir)
	case policy.Without == slurm.Refuse:
		return errors.New("--gpu-mem: must be given on this node (slurm.toml)")
	case policy.Without == slurm.Open:
		return say(answer{kind: answerOpen})
	}
	// A node without a driver has no table and nothing to hide, and its jobs must start all the same: /dev/nvidia* go by their names.
	var plan spec.Plan
	var nodes []device.Node
	if table, err := node.Load(runDir); err == nil {
		plan, nodes = nothing(table), table.Nodes
	}
	if err := hostrun.Hide(t.PID, plan, runDir); err != nil {
		return err
	}
	return say(answer{kind: answerHidden, majors: hostrun.Majors(nodes)})
}

// nothing is a plan by which all of the node's GPUs are hidden.
func nothing(table *device.Table) spec.Plan {
	p := spec.NewPlan(ledger.Record{}, table)
	p.Hidden, p.Common = append(p.Hidden, p.Common...), nil
	return p
}

// slice reserves a slice and puts the task into it.
func (t Task) slice(policy slurm.Policy, runDir string) error {
	if err := slurm.CanEnd(t.PID); err != nil { // only who has a slice is moved
		return err
	}
	q, err := t.Quota()
	if err != nil {
		return err
	}
	if policy.GPUs == slurm.ByGres {
		if t.Gres == "" {
			return errors.New("--gpu-mem: the step has no GPU of Slurm's: ask for one as well (--gres=gpu:1, or --gres=shard:1)")
		}
		q.Visible.IDs = strings.Split(t.Gres, ",")
	}
	who, err := t.who(policy)
	if err != nil {
		return err
	}
	owners, budgets, err := policy.Admit(who, q)
	if err != nil {
		return err
	}
	run := runner.Command{Quota: q, Name: t.Name, Refused: t.Refused, Run: hostrun.Run{RunDir: runDir}}
	outside := runner.Task{PID: t.PID, Owners: owners, Budgets: budgets}
	return runner.Prepare(run, outside, func(fence hostrun.Fence, table *device.Table) error {
		return say(answer{kind: answerGuarded, majors: hostrun.Majors(table.Nodes), program: fence.Program, text: string(fence.State),
			limiter: fence.Limiter, conn: fence.Conn})
	})
}

// squeuePatience is how long slurmctld may take. The plugin waits 30 s for all.
const squeuePatience = 20 * time.Second

// who finds out whom limits are of, where there are any that need it.
func (t Task) who(policy slurm.Policy) (slurm.Who, error) {
	who := slurm.Who{UID: t.UID}
	if len(policy.Users) > 0 {
		u, err := hostrun.Lookup(strconv.Itoa(who.UID))
		if err != nil {
			return who, fmt.Errorf("user %d: %w: slurm.toml has limits of users by name", who.UID, err)
		}
		who.User = u.Name
	}
	if len(policy.Accounts) > 0 {
		// Not SLURM_JOB_ACCOUNT: of a step that is whatever srun was called with. Nor scontrol, which prints the job's name beside it.
		ctx, cancel := context.WithTimeout(context.Background(), squeuePatience)
		defer cancel()
		out, err := exec.CommandContext(ctx, "squeue", "--noheader", "--format=%A %a", "--jobs="+t.Job).Output()
		if err == nil {
			who.Account, err = slurm.AccountOf(string(out), t.Job)
		}
		if err != nil {
			return who, fmt.Errorf("squeue --jobs=%s: %w: slurm.toml has limits of accounts", t.Job, err)
		}
	}
	return who, nil
}

// How a task goes on, as in slurm/cgpu_spank.c.
const (
	answerOpen    = iota // as it is
	answerHidden         // it has a /dev without GPUs
	answerGuarded        // it takes a filter
	answerRefused        // it ends, with text
)

// answer is what a task is told.
type answer struct {
	kind    uint32
	majors  []uint32 // of devices that its standard input, output and error must not be
	program []byte   // the filter
	text    string   // what goes to the guard beside the listener, or why the task is refused
	limiter string   // for LD_PRELOAD; empty: none
	conn    int      // to the guard
}

// pluginFD is the plugin's end of a socket for packets.
const pluginFD = 3

// say sends the answer as one packet: kind and four lengths, then the parts.
func say(a answer) error {
	unix.CloseOnExec(pluginFD)
	var b bytes.Buffer
	for _, n := range []int{int(a.kind), len(a.majors), len(a.program), len(a.text), len(a.limiter)} {
		_ = binary.Write(&b, binary.NativeEndian, uint32(n))
	}
	_ = binary.Write(&b, binary.NativeEndian, a.majors)
	b.Write(a.program)
	b.WriteString(a.text)
	b.WriteString(a.limiter)
	var rights []byte
	if a.kind == answerGuarded {
		rights = unix.UnixRights(a.conn)
	}
	if err := unix.Sendmsg(pluginFD, b.Bytes(), rights, nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("tell the task: %w", err)
	}
	return nil
}
