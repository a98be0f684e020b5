// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/hostrun/runner"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/quota"
)

const runName = "run"

func runCommand() *cli.Command {
	return &cli.Command{
		Name:      runName,
		Usage:     "run a command on a slice of a GPU, without a container",
		ArgsUsage: "[--] COMMAND [ARGUMENT…]",
		Description: "The command sees one GPU of the size asked for (with --gpu 0,1 two, each of that size), and neither it nor its\n" +
			"children get more, as in a container. In all else it is a process of this machine: same files, same network, same\n" +
			"terminal. cgpu run becomes the command, so its exit status and signals are the command's. Memory is given back\n" +
			"when its last process ends. It takes root to set up; the command runs as the user who called sudo.\n\n" +
			"Exit status: the command's; 127 if it was not found, 126 if it could not be started, 125 if there was no GPU for\n" +
			"it, 2 for a command line that cannot be understood.\n\n" +
			"Examples:\n   sudo cgpu run --memory 6GiB -- python3 train.py\n   sudo cgpu run --memory 6GiB --spill 4GiB --weight 2 --name web -- " +
			"./serve --port 8000\n" +
			"   sudo cgpu run --memory 20GiB --gpu 1 --percent 40 -- bash -l",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "memory", Usage: "`SIZE` of the memory limit, such as 6GiB; on each GPU"},
			&cli.StringFlag{Name: "spill", Usage: "`SIZE` of host memory beyond the limit, such as 4GiB"},
			&cli.IntFlag{Name: "weight", Usage: "`N`, 1 to 64: share of the GPU's time beside others", DefaultText: "1"},
			&cli.StringFlag{Name: "percent", Usage: "`N`, 1 to 100: share of the GPU's time"},
			&cli.StringFlag{Name: "priority", Usage: "`LEVEL`: best-effort, default or high", DefaultText: "default"},
			&cli.StringFlag{Name: "gpu", Aliases: []string{"i"}, Usage: "`GPU`: index, UUID, several with commas between them, or all",
				DefaultText: "the node chooses"},
			&cli.StringFlag{Name: "name", Usage: "`NAME` for cgpu smi and cgpu set", DefaultText: "the command's"},
			&cli.StringFlag{Name: "user", Usage: "run the command as `USER` (a name, a number, or UID:GID)", DefaultText: "who called sudo"},
			&cli.StringFlag{Name: "domain", Usage: "trust domain `NAME` that it computes side by side in, through an MPS server"},
			&cli.StringFlag{Name: "threads", Usage: "`N`, 1 to 100: part of the multiprocessors in its domain", DefaultText: "all"},
			&cli.BoolFlag{Name: "no-limiter", Usage: "do without the preload library; the guard alone holds the limits"},
		},
		Action: func(c *cli.Context) error {
			if !c.Args().Present() {
				return usageError{errors.New("run: want a COMMAND; see cgpu run --help")}
			}
			q, err := runQuota(c)
			if err != nil {
				return usageError{fmt.Errorf("run: %w", err)}
			}
			err = runOn(c, q)
			if _, ok := errors.AsType[cli.ExitCoder](err); ok {
				return err
			}
			return cli.Exit(err, exitNoGPU)
		},
	}
}

// exitNoGPU is the exit status when the command was not even tried, as with env, nohup and docker run.
const exitNoGPU = 125

// runGuardCommand starts the guard (runner.GuardName).
func runGuardCommand() *cli.Command {
	return &cli.Command{
		Name:   runner.GuardName,
		Hidden: true,
		Before: noArguments,
		Action: func(*cli.Context) error { return launch.Apart(hostrun.Leave) },
	}
}

// runQuota reads the flags.
func runQuota(c *cli.Context) (*quota.Quota, error) {
	if !c.IsSet("memory") {
		return nil, errors.New("want --memory SIZE, such as --memory 6GiB")
	}
	req, err := changeOf(c)
	if err != nil {
		return nil, err
	}
	q := &quota.Quota{Memory: quota.Memory{Fixed: *req.Limit}, NoLimiter: c.Bool("no-limiter")}
	q.Priority = quota.PriorityDefault
	if req.Spill != nil {
		q.Spill = *req.Spill
	}
	if req.Weight != nil {
		q.Weight = *req.Weight
	}
	if req.Percent != nil {
		q.Percent = *req.Percent
	}
	if req.Priority != nil {
		q.Priority = *req.Priority
	}
	if q.Domain = c.String("domain"); c.IsSet("domain") {
		if reason := quota.CheckDomain(q.Domain); reason != "" {
			return nil, fmt.Errorf("--domain %q: %s", q.Domain, reason)
		}
	}
	if text := c.String("threads"); c.IsSet("threads") {
		if q.Threads, err = strconv.Atoi(text); err != nil || q.Threads < 1 || q.Threads > quota.MaxPercent {
			return nil, fmt.Errorf("--threads %q: want 1 to %d", text, quota.MaxPercent)
		}
		if q.Domain == "" {
			return nil, fmt.Errorf("--threads %q: counts in a trust domain only; name one with --domain", text)
		}
	}
	switch gpu := c.String("gpu"); {
	case gpu == "all":
		q.Visible.All = true
	case c.IsSet("gpu"):
		for _, id := range strings.Split(gpu, ",") {
			if id = strings.TrimSpace(id); id == "" {
				return nil, fmt.Errorf("--gpu %q: want indices or UUIDs with commas between them, or all", gpu)
			}
			q.Visible.IDs = append(q.Visible.IDs, id)
		}
	}
	q.Asked = runner.Asked(typed(c))
	return q, nil
}

// runOn becomes the command on a slice as asked in q.
func runOn(c *cli.Context, q *quota.Quota) error {
	env := os.Environ()
	runner.CleanEnvironment()
	runner.IgnoreStops()
	user, err := runner.User(c.String("user"))
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	name, err := runner.Name(c.String("name"), c.Args().Slice())
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return runner.Become(runner.Command{Quota: q, Name: name, Guard: []string{self, runner.GuardName},
		Refused: func(err error) error { return runner.Refusal(err, typed(c)) },
		Run:     hostrun.Run{RunDir: device.RunDir(), User: user, Args: c.Args().Slice(), Env: env, Caller: inherited(c.App)}})
}

// inheritedKey is where main keeps in the App what it has settled of this process, for the command to have it again.
const inheritedKey = "inherited"

func inherited(a *cli.App) hostrun.Inherited {
	in, _ := a.Metadata[inheritedKey].(hostrun.Inherited) // none, unless main made the App
	return in
}
