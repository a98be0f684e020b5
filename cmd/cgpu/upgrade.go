// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/upgrade"
)

const (
	upgradeParallel = 4
	maxParallel     = 64
)

func upgradeCommand() *cli.Command {
	return &cli.Command{
		Name:      "upgrade",
		Usage:     "have the guards of running containers go on as the installed version",
		ArgsUsage: "[CONTAINER]",
		Description: "A container keeps the guard that it was started with. This has it replaced while the container runs: GPU calls wait for " +
			"some\n" +
			"milliseconds meanwhile, none fails. Where the other program cannot go on with what the guard has, or something does not come to\n" +
			"rest in time, the guard stays what it is, and a line says why. It can be stopped at any moment and called again.\n" +
			containerHelp + "\n\n" +
			"Examples:\n   cgpu upgrade 3f2a\n   cgpu upgrade --all\n   cgpu upgrade --all --program /opt/cgpu-1.0/bin/cgpu-guard\n" +
			"   cgpu upgrade --all -o json | jq '.containers[] | select(.outcome == \"failed\")'",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "all", Usage: "every container that runs"},
			&cli.StringFlag{Name: "program", Usage: "go on as the cgpu-guard at `PATH`, such as one of a version before",
				DefaultText: "the one beside cgpu"},
			&cli.IntFlag{Name: "parallel", Usage: "`N`, 1 to 64: so many at a time", Value: upgradeParallel},
			outputFlag(),
		},
		Action: upgradeGuards,
	}
}

func upgradeGuards(c *cli.Context) error {
	inJSON, err := wantsJSON(c)
	if err != nil {
		return err
	}
	if c.Bool("all") == (c.NArg() > 0) || c.NArg() > 1 {
		return usageError{errors.New("upgrade: want one CONTAINER, or --all; see cgpu upgrade --help")}
	}
	parallel := c.Int("parallel")
	if parallel < 1 || parallel > maxParallel {
		return usageError{fmt.Errorf("upgrade: --parallel %d: want 1 to %d", parallel, maxParallel)}
	}
	program, err := upgrade.Program(c.String("program"))
	if err != nil {
		return err
	}
	records, err := toUpgrade(c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait for guards
	report := upgrade.Report{}
	if !inJSON {
		report.Lines = c.App.Writer
	}
	upgrade.Guards(ctx, records, program, parallel, report.Add)
	if inJSON {
		err = terminal.EncodeJSON(c.App.Writer, report.View(), "  ")
	}
	return errors.Join(err, report.Err(len(records)))
}

func toUpgrade(c *cli.Context) ([]ledger.Record, error) {
	book := ledger.Open(device.RunDir())
	if !c.Bool("all") {
		r, err := node.FindContainer(book, c.Args().First())
		return []ledger.Record{r}, err
	}
	return book.List()
}
