// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/domain/server"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
)

// domainStartCommand is what a member's guard starts, to have the domain's MPS server run.
func domainStartCommand() *cli.Command {
	return &cli.Command{
		Name:      domain.StartName,
		Hidden:    true,
		ArgsUsage: "GPU DOMAIN",
		Flags:     []cli.Flag{&cli.DurationFlag{Name: "within", Usage: "`TIME` until it must serve", Value: 10 * time.Second}},
		Action:    func(c *cli.Context) error { return domainOf(c).Start(c.Duration("within")) },
	}
}

// domainRunCommand is what becomes the server.
func domainRunCommand() *cli.Command {
	return &cli.Command{
		Name:      server.RunName,
		Hidden:    true,
		ArgsUsage: "GPU DOMAIN",
		Action: func(c *cli.Context) error {
			err := domainOf(c).Become(inherited(c.App))
			if r, ok := errors.AsType[*ledger.Refusal](err); ok && r.Domain {
				return cli.Exit(err, server.ExitTwice)
			}
			return err
		},
	}
}

// endTime is for a domain's server to end the work of a member, whose kill waits for it.
const endTime = 2 * time.Second

// domainEndCommand is what the runtime becomes for a SIGKILL of a member, before it becomes the low-level runtime.
func domainEndCommand() *cli.Command {
	return &cli.Command{
		Name:      domain.EndName,
		Hidden:    true,
		ArgsUsage: "CONTAINER [PROGRAM ARGUMENT…]",
		Action: func(c *cli.Context) error {
			runDir, args := device.RunDir(), c.Args().Slice()
			if len(args) == 0 {
				return usageError{errors.New(domain.EndName + ": want CONTAINER")}
			}
			r, err := node.FindContainer(ledger.Open(runDir), args[0])
			if err == nil {
				err = domain.End(runDir, r, endTime)
			}
			if len(args) == 1 {
				return err
			}
			if err != nil {
				_ = event.Append(runDir, event.Event{Kind: event.Warning, Container: r.ID, Nonce: r.Nonce, Name: r.Name, Text: fmt.Sprintf("its work "+
					"is not ended before it is killed (%v): if a kernel of it runs, the other members of domain %s lose their contexts", err, r.Domain)})
			}
			return fmt.Errorf("execute %s: %w", args[1], syscall.Exec(args[1], args[1:], os.Environ()))
		},
	}
}

func domainOf(c *cli.Context) server.Domain {
	return server.Domain{RunDir: device.RunDir(), UUID: c.Args().Get(0), Name: c.Args().Get(1)}
}
