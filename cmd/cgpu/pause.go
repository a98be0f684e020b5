// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/control"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
)

func pauseCommand() *cli.Command {
	return &cli.Command{
		Name:      "pause",
		Usage:     "stop all GPU work of a container until cgpu resume",
		ArgsUsage: "CONTAINER",
		Description: "Its programs go on and keep their GPU memory; they wait when they need a result. In JSON it prints the container as\n" +
			"cgpu smi -o json does.\n" +
			containerHelp + "\n\n" +
			"Example:\n   cgpu pause 3f2a",
		Flags:  []cli.Flag{outputFlag()},
		Action: func(c *cli.Context) error { return pause(c, true) },
	}
}

func resumeCommand() *cli.Command {
	return &cli.Command{
		Name:      "resume",
		Usage:     "let a paused container use the GPU again",
		ArgsUsage: "CONTAINER",
		Description: "Takes back cgpu pause. It also continues what a guard that was killed has left paused; new GPU calls of such a\n" +
			"container fail until it is restarted. In JSON it prints the container as cgpu smi -o json does.\n\n" +
			"Example:\n   cgpu resume 3f2a",
		Flags:  []cli.Flag{outputFlag()},
		Action: func(c *cli.Context) error { return pause(c, false) },
	}
}

func pause(c *cli.Context, paused bool) error {
	if c.NArg() != 1 {
		return usageError{fmt.Errorf("%s: want one CONTAINER; see cgpu %[1]s --help", c.Command.Name)}
	}
	inJSON, err := wantsJSON(c)
	if err != nil {
		return err
	}
	runDir := device.RunDir()
	r, err := node.FindContainer(ledger.Open(runDir), c.Args().First())
	if err != nil {
		return err
	}
	text, err := control.Pause(runDir, r, paused)
	if err != nil {
		return err
	}
	if inJSON {
		return printContainer(c.App.Writer, runDir, r.Nonce)
	}
	_, err = io.WriteString(c.App.Writer, text)
	return err
}
