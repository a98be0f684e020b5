// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/view"
)

// outputFlag is -o of a command that prints text or JSON.
func outputFlag() cli.Flag {
	return &cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table or json", Value: "table"}
}

// wantsJSON reads -o.
func wantsJSON(c *cli.Context) (bool, error) {
	format := c.String("o")
	if format != "table" && format != "json" {
		return false, usageError{fmt.Errorf("%s: -o %q: want table or json", c.Command.Name, format)}
	}
	return format == "json", nil
}

// inFormat is an Action that is told what -o asks for.
func inFormat(do func(c *cli.Context, inJSON bool) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		inJSON, err := wantsJSON(c)
		if err != nil {
			return err
		}
		return do(c, inJSON)
	}
}

// printContainer prints what cgpu smi would of a container, for scripts that have changed it.
func printContainer(w io.Writer, runDir, nonce string) error {
	only, err := view.NewSelection(nil, []string{nonce}, nil)
	if err != nil {
		return err
	}
	v, err := node.View(runDir)
	if err == nil {
		v, err = only.Apply(v)
	}
	if err != nil {
		return err
	}
	return view.PrintJSON(w, v)
}
