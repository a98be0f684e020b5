// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/gc"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func gcCommand() *cli.Command {
	return &cli.Command{
		Name:  "gc",
		Usage: "give back what dead containers still hold in the ledger",
		Description: "A container's share is given back when the container is deleted and when its guard ends. This is for\n" +
			"the case that both were killed. It also lets run what such a guard has left paused of a container that\n" +
			"lives, and removes sockets, pages and all but the newest 64 logs and bundles of containers that are gone, and cgroups\n" +
			"of such runs of cgpu run. Containers that live, or may live, are not touched otherwise.\n\n" +
			"Examples:\n   cgpu gc\n   cgpu gc -o json | jq '.removed[].id'",
		Flags:  []cli.Flag{outputFlag()},
		Before: noArguments,
		Action: inFormat(func(c *cli.Context, inJSON bool) error {
			done, err := gc.Collect(device.RunDir())
			print := done.Print
			if inJSON {
				print = func(w io.Writer) error { return terminal.EncodeJSON(w, done, "  ") }
			}
			return errors.Join(print(c.App.Writer), err)
		}),
	}
}
