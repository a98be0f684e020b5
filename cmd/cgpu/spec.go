// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/dryrun"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func specCommand() *cli.Command {
	return &cli.Command{
		Name:  "spec",
		Usage: "show what cgpu-runtime would do with a container (dry run)",
		Description: "Reads a config.json, prints the edited one to standard output and the reasons to standard error. Nothing\n" +
			"is reserved, started or written. The answer holds for what is reserved now; with --table, for that node\n" +
			"with nothing reserved.\n\n" +
			"Examples:\n" +
			"   cgpu spec --bundle /run/containerd/io.containerd.runtime.v2.task/moby/ID >edited.json\n" +
			"   cgpu spec --config config.json -e ALIYUN_COM_GPU_MEM_CONTAINER=6 -e ALIYUN_COM_GPU_MEM_DEV=15 --explain",
		Before: noArguments,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "bundle", Usage: "the bundle's `FOLDER`, with config.json in it"},
			&cli.StringFlag{Name: "config", Usage: "a config.json `FILE`; - is standard input"},
			&cli.StringSliceFlag{Name: "e", Aliases: []string{"env"}, Usage: "set `VAR=VALUE` in the container first; may be repeated"},
			&cli.StringFlag{Name: "table", Usage: "a node.json `FILE` to judge by instead of this node's"},
			&cli.BoolFlag{Name: "explain", Usage: "print the reasons to standard output, and no config.json"},
		},
		Action: func(c *cli.Context) error {
			path := c.String("config")
			switch {
			case (c.String("bundle") == "") == (path == ""):
				return usageError{errors.New("spec: want either --bundle FOLDER or --config FILE")}
			case path == "":
				path = filepath.Join(c.String("bundle"), "config.json")
			}
			for _, e := range c.StringSlice("e") {
				if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
					return usageError{fmt.Errorf("spec: -e %q: want VAR=VALUE", e)}
				}
			}
			raw, err := dryrun.Read(path)
			if err != nil {
				return err
			}
			hook, err := device.Program("cgpu-hook")
			if err != nil {
				return err
			}
			d := dryrun.DryRun{RunDir: device.RunDir(), Version: version, Table: c.String("table"), Hook: hook, ID: dryrun.IDOf(path),
				Folder: filepath.Dir(path)}
			edited, reasons, err := d.Edit(raw, c.StringSlice("e"))
			if err != nil {
				return err
			}
			if c.Bool("explain") {
				_, err = io.WriteString(c.App.Writer, reasons)
				return err
			}
			fmt.Fprint(c.App.ErrWriter, reasons)
			_, err = io.WriteString(c.App.Writer, terminal.EscapeJSON(string(edited)))
			return err
		},
	}
}
