// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/km/kmfs"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func kmCommand() *cli.Command {
	return &cli.Command{
		Name:      "km",
		Usage:     "show the tree of /proc/cgpu_km, for scripts written for Alibaba's cGPU",
		ArgsUsage: "[MOUNTPOINT]",
		Description: "It is mounted on MOUNTPOINT, the folder km of the run dir (" + device.DefaultRunDir + "/km) without one, as long as\n" +
			"this command runs: SIGTERM, SIGHUP or Ctrl-C takes it away. The files are made when they are read. Who writes to one changes\n" +
			"the ledger, as with cgpu set and cgpu policy; what does not fit fails with \"invalid argument\" in the script, and the\n" +
			"reason comes out here. docs/km.md says what is mapped and what is not. Only root gets in, as files have cGPU's\n" +
			"modes, by which everybody may write.\n\n" +
			"Examples:\n   sudo cgpu km\n   sudo cgpu km /srv/cgpu_km --allow-other\n   cgpu km --once | grep /weight:",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "once", Usage: "mount nothing; print every line of every file behind the file's path"},
			&cli.BoolFlag{Name: "allow-other", Usage: "let everybody read, and only root write"},
			&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "with --once, `FORMAT`: table or json", Value: "table"},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() > 1 {
				return usageError{fmt.Errorf("km: %q: want one MOUNTPOINT; see cgpu km --help", c.Args().Get(1))}
			}
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			source := &kmfs.Source{RunDir: device.RunDir(), Version: version, Log: c.App.ErrWriter}
			if c.Bool("once") {
				if c.NArg() > 0 || c.Bool("allow-other") {
					return usageError{errors.New("km: --once mounts nothing: want no MOUNTPOINT and no --allow-other")}
				}
				if !inJSON {
					return source.Print(c.App.Writer)
				}
				files, err := source.Files()
				if err != nil {
					return err
				}
				return terminal.EncodeJSON(c.App.Writer, files, "  ")
			}
			if inJSON {
				return usageError{errors.New("km: -o json: only with --once: who mounts the tree reads its files")}
			}
			dir := c.Args().First()
			if dir == "" {
				dir = filepath.Join(device.RunDir(), "km")
			}
			if !filepath.IsAbs(dir) {
				return usageError{fmt.Errorf("km: %q: want an absolute path as MOUNTPOINT", dir)}
			}
			ctx, stop := kmUntil(c.Context)
			defer stop()
			return kmfs.Serve(ctx, c.App.Writer, source, filepath.Clean(dir), c.Bool("allow-other"))
		},
	}
}

// kmUntil ends with the signals that end cgpu km. A terminal that is closed sends SIGHUP, which would leave a dead mount behind;
// under nohup it is ignored, and stays so.
func kmUntil(ctx context.Context) (context.Context, context.CancelFunc) {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signal.NotifyContext(ctx, signals...)
}
