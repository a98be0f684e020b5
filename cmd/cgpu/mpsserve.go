// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/domain/server"
	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/page"
)

// mpsCommand is a domain's server: what its run has as its command.
func mpsCommand() *cli.Command {
	return &cli.Command{
		Name:      server.ServeName,
		Hidden:    true,
		ArgsUsage: "-- DAEMON ARGUMENT…",
		Flags:     []cli.Flag{&cli.StringFlag{Name: "members", Required: true, Usage: "`FOLDER` that members of the domain get"}},
		Action: func(c *cli.Context) error {
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			if !c.Args().Present() {
				return usageError{errors.New(server.ServeName + ": want the control daemon's command line")}
			}
			if err := mps.Bound(); err != nil {
				return err
			}
			members := c.String("members")
			pipes := filepath.Dir(filepath.Clean(members))
			ended := filepath.Join(pipes, page.Ended) // for the event of its guard's, who knows no more than that it ended
			_ = os.Truncate(ended, 0)
			err := mps.Server{Members: members, Parts: filepath.Join(pipes, page.Parts), Own: filepath.Join(pipes, page.Daemon),
				Command: c.Args().Slice()}.Run(ctx)
			if err != nil {
				_ = os.WriteFile(ended, []byte(err.Error()), 0o600)
			}
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				return cli.Exit(err, max(exit.ExitCode(), 1))
			}
			return err
		},
	}
}
