// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/view"
)

// filterHelp explains the flags of filterFlags.
const filterHelp = "What is shown can be narrowed to some GPUs (index, UUID or a unique beginning of one), to some containers (ID,\n" +
	"beginning of one, nonce or name), and by --filter: state (running, paused, starting, gone, no-answer, guard-dead, no-page),\n" +
	"priority, policy (of the GPU) or enforcement (guard, preload, driver). Of one KEY any value may fit, of different ones all must.\n" +
	"A GPU's own figures stay those of all its containers."

// filterFlags narrow what a command shows.
func filterFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "gpu", Aliases: []string{"i"},
			Usage: "only this `GPU` (index or UUID), or several with commas between them; may be repeated"},
		&cli.StringSliceFlag{Name: "container", Usage: "only this `CONTAINER` (ID, nonce or name); may be repeated"},
		&cli.StringSliceFlag{Name: "filter", Usage: "only those where `KEY=VALUE`, such as state=paused; may be repeated"},
	}
}

// selectionOf reads the flags.
func selectionOf(c *cli.Context) (view.Selection, error) {
	return view.NewSelection(c.StringSlice("gpu"), c.StringSlice("container"), c.StringSlice("filter"))
}

// containerHelp says what a command takes for a container.
const containerHelp = "CONTAINER is an ID, a unique beginning of one, or the name that cgpu smi shows; of two that have one ID, under " +
	"two\n" +
	"engines or namespaces of containerd, it is the nonce, which cgpu smi shows for them."
