// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
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
		Action: func(c *cli.Context) error {
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			if !c.Args().Present() {
				return usageError{errors.New(server.ServeName + ": want the control daemon's command line")}
			}
			if err := mps.Bound(); err != nil {
				return err
			}
			parts, sockets, err := mps.Receive(0)
			if err != nil {
				return fmt.Errorf("%s: standard input: %w", server.ServeName, err)
			}
			own := filepath.Join(page.PipesPath, page.Daemon)
			err = mps.Server{Parts: parts, Sockets: sockets, Own: own, Command: c.Args().Slice(),
				Confine: []string{"/proc/self/exe", server.DaemonName, "--"}, Narrow: mps.Narrow}.Run(ctx)
			if err != nil {
				mps.Leave(own, err)
			}
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				return cli.Exit(err, max(exit.ExitCode(), 1))
			}
			return err
		},
	}
}

// mpsDaemonCommand becomes NVIDIA's control daemon, in the namespaces that mps-serve makes for it.
func mpsDaemonCommand() *cli.Command {
	return &cli.Command{
		Name:      server.DaemonName,
		Hidden:    true,
		ArgsUsage: "-- DAEMON ARGUMENT…",
		Action: func(c *cli.Context) error {
			if !c.Args().Present() {
				return usageError{errors.New(server.DaemonName + ": want the control daemon's command line")}
			}
			return mps.Confine(c.Args().Slice())
		},
	}
}
