// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/control"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/gc"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
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

// pauseWait is how long a guard has to carry it out: milliseconds are enough, but for a machine that has no processor for it.
const pauseWait = 10 * time.Second

func pause(c *cli.Context, paused bool) error {
	command, done, already := "resume", "goes on", "was not paused"
	if paused {
		command, done, already = "pause", "paused", "was paused already"
	}
	if c.NArg() != 1 {
		return usageError{fmt.Errorf("%s: want one CONTAINER; see cgpu %[1]s --help", command)}
	}
	inJSON, err := wantsJSON(c)
	if err != nil {
		return err
	}
	book := ledger.Open(device.RunDir())
	old, err := node.FindContainer(book, c.Args().First())
	if err != nil {
		return err
	}
	if err := control.RefusePreload(old, command, "", "stop its GPU work"); err != nil {
		return err
	}
	r, err := book.Change(old.Nonce, ledger.ChangeRequest{Paused: &paused})
	if err != nil {
		return err
	}
	if old.Paused == paused {
		done = already
	}
	what, text := view.ShortID(r.ID)+view.Label(old), ""
	switch outcome, err := control.WaitPaused(r, paused, time.Now().Add(pauseWait)); outcome {
	case control.CarriedOut:
		text = fmt.Sprintf("%s: %s\n", what, done)
	case control.NotStarted:
		text = fmt.Sprintf("%s: %s; it has not started yet\n", what, done)
	case control.GuardGone:
		if paused {
			return fmt.Errorf("pause: container %s: its guard is gone, so nobody stops what runs on the GPU (new GPU calls fail); stop the "+
				"container, then cgpu gc gives back what it held", what)
		}
		n, err := gc.ResumeLeftovers(gpusched.LeftoversFile(r.Socket))
		if err != nil {
			return fmt.Errorf("resume: container %s: its guard is gone, and what it had paused stays paused (%w); stop the container, then cgpu "+
				"gc gives back what it held", what, err)
		}
		if n == 0 {
			return fmt.Errorf("resume: container %s: its guard is gone, so its GPU calls fail for good; nothing of it is paused; stop the "+
				"container, then cgpu gc gives back what it held", what)
		}
		text = fmt.Sprintf("%s: resumed %s; its guard is gone, so new GPU calls fail: restart the container\n", what,
			terminal.Plural(n, "channel"))
	default:
		return fmt.Errorf("%s: container %s: noted, but its guard has not done it after %v (%w); see its log in %s/log, and cgpu smi", command,
			what, pauseWait, err, device.RunDir())
	}
	if inJSON {
		return printContainer(c.App.Writer, device.RunDir(), r.Nonce)
	}
	_, err = io.WriteString(c.App.Writer, text)
	return err
}
