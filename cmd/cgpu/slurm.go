// SPDX-License-Identifier: Apache-2.0

package main

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

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/hostrun/runner"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/slurm"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// slurmCommand is what slurm/cgpu_spank.c starts as root for each task of a step: the task waits, with a mount namespace of its own,
// for what this says on descriptor 3. Flags have the user's words; all else is slurmstepd's.
func slurmCommand() *cli.Command {
	return &cli.Command{
		Name:   "slurm-task",
		Hidden: true,
		Before: noArguments,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "memory"}, &cli.IntFlag{Name: "weight"}, &cli.StringFlag{Name: "percent"}, &cli.StringFlag{Name: "gpu"},
			&cli.IntFlag{Name: "pid"}, &cli.IntFlag{Name: "uid"}, &cli.StringFlag{Name: "job"}, &cli.StringFlag{Name: "name"},
			&cli.StringFlag{Name: "gres"}, &cli.StringFlag{Name: "policy", Value: slurm.DefaultFile},
		},
		Action: func(c *cli.Context) error {
			err := slurmTask(c)
			if err != nil {
				text := slurmWords.Replace(strings.ReplaceAll(err.Error(), "\n", " "))
				_ = slurmSay(slurmAnswer{kind: answerRefused, text: strings.TrimPrefix(text, "run: ")})
			}
			return err
		},
	}
}

// slurmWords turn the flags of cgpu run, in its refusals, into those of srun.
var slurmWords = strings.NewReplacer("--memory", "--gpu-mem", "--weight", "--gpu-weight", "--percent", "--gpu-percent", "--gpu ", "--gres ")

// slurmTask prepares the task and tells it how to go on.
func slurmTask(c *cli.Context) error {
	runner.CleanEnvironment()
	runner.IgnoreStops()
	hostrun.Leave()        // the guard must outlive the step, and nobody who can freeze a step's cgroup may have the node's locks wait
	if c.IsSet("policy") { // who names a file means one: without it nobody would be limited
		if _, err := os.Stat(c.String("policy")); err != nil {
			return fmt.Errorf("plugstack.conf: policy=%s: %w", c.String("policy"), errors.Unwrap(err))
		}
	}
	policy, err := slurm.Load(c.String("policy"))
	if err != nil {
		return err
	}
	runDir := device.RunDir()
	switch {
	case c.IsSet("memory") || c.IsSet("weight") || c.IsSet("percent"):
		return slurmSlice(c, policy, runDir)
	case policy.Without == slurm.Refuse:
		return errors.New("--gpu-mem: must be given on this node (slurm.toml)")
	case policy.Without == slurm.Open:
		return slurmSay(slurmAnswer{kind: answerOpen})
	}
	// A node without a driver has no table and nothing to hide, and its jobs must start all the same: /dev/nvidia* go by their names.
	var plan spec.Plan
	var nodes []device.Node
	if table, err := node.Load(runDir); err == nil {
		plan, nodes = slurmNothing(table), table.Nodes
	}
	if err := hostrun.Hide(c.Int("pid"), plan, runDir); err != nil {
		return err
	}
	return slurmSay(slurmAnswer{kind: answerHidden, majors: hostrun.Majors(nodes)})
}

// slurmNothing is a plan by which all of the node's GPUs are hidden.
func slurmNothing(table *device.Table) spec.Plan {
	p := spec.NewPlan(ledger.Record{}, table)
	p.Hidden, p.Common = append(p.Hidden, p.Common...), nil
	return p
}

// slurmSlice reserves a slice and puts the task into it.
func slurmSlice(c *cli.Context, policy slurm.Policy, runDir string) error {
	if err := slurm.CanEnd(c.Int("pid")); err != nil { // only who has a slice is moved
		return err
	}
	q, err := runQuota(c)
	if err != nil {
		return err
	}
	if policy.GPUs == slurm.ByGres {
		if c.String("gres") == "" {
			return errors.New("--gpu-mem: the step has no GPU of Slurm's: ask for one as well (--gres=gpu:1, or --gres=shard:1)")
		}
		q.Visible.IDs = strings.Split(c.String("gres"), ",")
	}
	who, err := slurmWho(c, policy)
	if err != nil {
		return err
	}
	owners, budgets, err := policy.Admit(who, q)
	if err != nil {
		return err
	}
	run := runner.Command{Quota: q, Name: c.String("name"), Refused: func(err error) error { return runRefused(c, err) },
		Run: hostrun.Run{RunDir: runDir}}
	task := runner.Task{PID: c.Int("pid"), Owners: owners, Budgets: budgets}
	return runner.Prepare(run, task, func(fence hostrun.Fence, table *device.Table) error {
		return slurmSay(slurmAnswer{kind: answerGuarded, majors: hostrun.Majors(table.Nodes), program: fence.Program, text: string(fence.State),
			limiter: fence.Limiter, conn: fence.Conn})
	})
}

// squeuePatience is how long slurmctld may take. The plugin waits 30 s for all.
const squeuePatience = 20 * time.Second

// slurmWho finds out whom limits are of, where there are any that need it.
func slurmWho(c *cli.Context, policy slurm.Policy) (slurm.Who, error) {
	who := slurm.Who{UID: c.Int("uid")}
	if len(policy.Users) > 0 {
		u, err := hostrun.Lookup(strconv.Itoa(who.UID))
		if err != nil {
			return who, fmt.Errorf("user %d: %w: slurm.toml has limits of users by name", who.UID, err)
		}
		who.User = u.Name
	}
	if len(policy.Accounts) > 0 {
		// Not SLURM_JOB_ACCOUNT: of a step that is whatever srun was called with. Nor scontrol, which prints the job's name beside it.
		ctx, cancel := context.WithTimeout(c.Context, squeuePatience)
		defer cancel()
		out, err := exec.CommandContext(ctx, "squeue", "--noheader", "--format=%A %a", "--jobs="+c.String("job")).Output()
		if err == nil {
			who.Account, err = slurm.AccountOf(string(out), c.String("job"))
		}
		if err != nil {
			return who, fmt.Errorf("squeue --jobs=%s: %w: slurm.toml has limits of accounts", c.String("job"), err)
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

// slurmAnswer is what a task is told.
type slurmAnswer struct {
	kind    uint32
	majors  []uint32 // of devices that its standard input, output and error must not be
	program []byte   // the filter
	text    string   // what goes to the guard beside the listener, or why the task is refused
	limiter string   // for LD_PRELOAD; empty: none
	conn    int      // to the guard
}

// slurmFD is the plugin's end of a socket for packets.
const slurmFD = 3

// slurmSay sends the answer as one packet: kind and four lengths, then the parts.
func slurmSay(a slurmAnswer) error {
	unix.CloseOnExec(slurmFD)
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
	if err := unix.Sendmsg(slurmFD, b.Bytes(), rights, nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("tell the task: %w", err)
	}
	return nil
}
