// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/hostrun/runner"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/slurm"
	"github.com/opencgpu/cgpu/pkg/slurm/task"
)

// slurmCommand is what slurm/cgpu_spank.c starts as root for each task of a step. Flags have the user's words; all else is slurmstepd's.
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
			t := task.Task{PID: c.Int("pid"), UID: c.Int("uid"), Job: c.String("job"), Name: c.String("name"), Gres: c.String("gres"),
				Policy: c.String("policy"), PolicyNamed: c.IsSet("policy")}
			t.Asks = c.IsSet("memory") || c.IsSet("weight") || c.IsSet("percent")
			t.Quota = func() (*quota.Quota, error) { return runQuota(c) }
			t.Refused = func(err error) error { return runner.Refusal(err, typed(c)) }
			return t.Start()
		},
	}
}
