// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/doctor"
	"github.com/opencgpu/cgpu/pkg/doctor/thishost"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "say what of cgpu works on this node, and what to do about the rest",
		Description: "A line for each check that is not well: warn or fail, what was found, and behind an arrow what to do; with -v for\n" +
			"all of them, also ok and skip (does not apply, or cannot be looked at). docs/doctor.md says what each check means. Nothing is " +
			"changed, and containers that run\n" +
			"notice nothing. --self-test starts small containers, whose program tries to get around its limit. --measure loads each GPU for five\n" +
			"seconds and says whether weights and pauses hold there.\n\n" +
			"The exit status is 0 when all is well or there are only warnings, 1 when a check failed, 2 for a command line that\n" +
			"cannot be understood.\n\n" +
			"Examples:\n   sudo cgpu doctor\n   sudo cgpu doctor -v --self-test\n   sudo cgpu doctor -v --measure\n   cgpu doctor -o json | jq " +
			"'.checks[] | select(.status == \"fail\")'\n" +
			"   cgpu doctor --engine docker=/srv/docker/daemon.json",
		ArgsUsage: " ",
		Flags: []cli.Flag{
			outputFlag(),
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "tell of every check"},
			&cli.BoolFlag{Name: "self-test", Usage: "start containers that try to escape, too"},
			&cli.BoolFlag{Name: "measure",
				Usage: "measure, too, what GPU time three containers of our own get on each GPU that nobody uses and that has room to spare"},
			&cli.BoolFlag{Name: "force", Usage: "with --measure: also on GPUs in use or without room to spare, and where Kubernetes allocates them"},
			&cli.StringSliceFlag{Name: "engine",
				Usage: "look at `NAME=FILE` (docker, containerd, crio, podman) instead of the usual files of all engines; may be repeated"},
			&cli.StringFlag{Name: "try", Hidden: true, Usage: "what doctor's own children do"},
		},
		Before: noArguments,
		Action: func(c *cli.Context) error {
			if c.IsSet("try") {
				what := c.String("try")
				if what != doctor.TryKernel && what != doctor.TryDriver {
					return usageError{fmt.Errorf("doctor: --try %q: this is for doctor's own children", what)}
				}
				return thishost.Try(c.App.Writer, what)
			}
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			files, err := engineFiles(c.StringSlice("engine"))
			if err != nil {
				return usageError{err}
			}
			h, err := thishost.Host(version, files)
			if err != nil {
				return err
			}
			if c.Bool("force") && !c.Bool("measure") {
				return usageError{errors.New("doctor: --force: goes with --measure")}
			}
			h.Force = c.Bool("force")
			if c.Bool("verbose") {
				h.Log = func(format string, args ...any) { fmt.Fprintf(c.App.ErrWriter, "doctor: "+format+"\n", args...) }
			}
			checks := doctor.Checks()
			if c.Bool("self-test") {
				checks = append(checks, doctor.SelfTest())
			}
			if c.Bool("measure") {
				checks = append(checks, doctor.Measurements()...)
			}
			report := doctor.Examine(h, checks)
			if inJSON {
				err = terminal.EncodeJSON(c.App.Writer, report, "  ")
			} else {
				err = doctor.PrintReport(c.App.Writer, report, c.Bool("verbose"))
			}
			if err == nil && report.Status == doctor.Fail {
				err = fmt.Errorf("doctor: %s failed", terminal.Plural(report.Count(doctor.Fail), "check"))
			}
			return err
		},
	}
}

// engineFiles reads --engine NAME=FILE.
func engineFiles(list []string) (map[string]string, error) {
	known := doctor.EngineNames()
	files := map[string]string{}
	for _, text := range list {
		name, file, _ := strings.Cut(text, "=")
		switch {
		case !slices.Contains(known, name):
			return nil, fmt.Errorf("doctor: --engine %q: %q is no engine: want NAME=FILE with one of %s", text, name, strings.Join(known, ", "))
		case !filepath.IsAbs(file):
			return nil, fmt.Errorf("doctor: --engine %q: want %s=FILE with an absolute path", text, name)
		case files[name] != "":
			return nil, fmt.Errorf("doctor: --engine %q: %s is given twice", text, name)
		}
		files[name] = file
	}
	return files, nil
}
