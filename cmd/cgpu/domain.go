// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/domain/server"
	"github.com/opencgpu/cgpu/pkg/ledger"
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

func domainOf(c *cli.Context) server.Domain {
	return server.Domain{RunDir: device.RunDir(), UUID: c.Args().Get(0), Name: c.Args().Get(1)}
}
