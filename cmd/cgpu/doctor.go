package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v2"
	"kernel.org/pub/linux/libs/security/libcap/cap"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/doctor"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "say what of cgpu works on this node, and what to do about the rest",
		Description: "A line for each check that is not well: warn or fail, what was found, and behind an arrow what to do; with -v for\n" +
			"all of them, also ok and skip (does not apply, or cannot be looked at). docs/doctor.md says what each check means. Nothing is changed, and containers that run\n" +
			"notice nothing. --self-test starts small containers, whose program tries to get around its limit.\n\n" +
			"The exit status is 0 when all is well or there are only warnings, 1 when a check failed, 2 for a command line that\n" +
			"cannot be understood.\n\n" +
			"Examples:\n   sudo cgpu doctor\n   sudo cgpu doctor -v --self-test\n   cgpu doctor -o json | jq '.checks[] | select(.status == \"fail\")'\n" +
			"   cgpu doctor --engine docker=/srv/docker/daemon.json",
		ArgsUsage: " ",
		Flags: []cli.Flag{
			outputFlag(),
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "tell of every check"},
			&cli.BoolFlag{Name: "self-test", Usage: "start containers that try to escape, too"},
			&cli.StringSliceFlag{Name: "engine", Usage: "look at `NAME=FILE` (docker, containerd, crio, podman) instead of the usual files of all engines; may be repeated"},
			&cli.StringFlag{Name: "try", Hidden: true, Usage: "what doctor's own children do"},
		},
		Before: noArguments,
		Action: func(c *cli.Context) error {
			if c.IsSet("try") {
				what := c.String("try")
				if what != doctor.TryKernel && what != doctor.TryDriver {
					return usageError{fmt.Errorf("doctor: --try %q: this is for doctor's own children", what)}
				}
				return tryIt(c.App.Writer, what)
			}
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			files, err := engineFiles(c.StringSlice("engine"))
			if err != nil {
				return usageError{err}
			}
			h, err := thisHost(version, files)
			if err != nil {
				return err
			}
			checks := doctor.Checks()
			if c.Bool("self-test") {
				checks = append(checks, doctor.SelfTest())
			}
			report := doctor.Examine(h, checks)
			if inJSON {
				err = terminal.EncodeJSON(c.App.Writer, report, "  ")
			} else {
				err = printReport(c.App.Writer, report, c.Bool("verbose"))
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

// thisHost is the machine we run on.
func thisHost(version string, engines map[string]string) (*doctor.Host, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return &doctor.Host{
		Root: "/", RunDir: device.RunDir(), ConfigFile: device.ConfigFile(), Bin: filepath.Dir(self), Limiter: device.Limiter(),
		Version: version, UID: os.Geteuid(), Path: os.Getenv("PATH"), Engines: engines, DockerHost: os.Getenv("DOCKER_HOST"),
		Try: func(ctx context.Context, what string) (*exec.Cmd, error) {
			return exec.CommandContext(ctx, self, "doctor", "--try", what), nil
		},
		Containers: fare,
	}, nil
}

// fare asks the guards how their containers are.
func fare(t *device.Table, records []ledger.Record) []doctor.Container {
	var list []doctor.Container
	for i, a := range snapshot.AskAll(t, records) {
		r := records[i]
		s := snapshot.StateOf(r, a)
		list = append(list, doctor.Container{Name: view.ShortID(r.ID) + view.Label(snapshot.Named(r)), State: s, Dead: s == snapshot.StateGone,
			Bad: s == snapshot.StateGuardDead || s == snapshot.StateNoAnswer || s == snapshot.StateNoPage, Alone: alone(a)})
	}
	return list
}

// alone reports a container with contexts on a GPU that has no arbiter.
func alone(a snapshot.Answer) bool {
	return slices.ContainsFunc(a.Status.VGPUs, func(v api.VGPUStatus) bool {
		if v.Compute == nil || v.Compute.TSGs == 0 {
			return false
		}
		_, lives, err := process.Find(device.RunDir(), v.UUID)
		return err == nil && !lives
	})
}

// tryIt is what a child of doctor does.
func tryIt(w io.Writer, what string) error {
	if what == doctor.TryKernel {
		os.Exit(doctor.KernelChild(w))
	}
	trials, err := tryDriver(device.RunDir())
	report := doctor.TrialReport{Trials: trials}
	if err != nil {
		report.Err = err.Error()
	}
	return json.NewEncoder(w).Encode(report)
}

func tryDriver(runDir string) ([]gpusched.Trial, error) {
	t, err := device.Load(runDir)
	if err != nil {
		return nil, err
	}
	all := ledger.Record{ID: "doctor"} // in no ledger: what a guard of a container with every GPU would be told
	for _, g := range t.GPUs {
		all.Native = append(all.Native, g.UUID)
	}
	cfg := launch.GuardConfig(all, t, runDir)
	d, err := driver.Open(cfg)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return gpusched.TryDriver(cfg, d, likeGuard)
}

// likeGuard drops the privileges that a guard has not when it makes its calls: the driver looks at them.
func likeGuard() error {
	keep := cap.NewSet()
	if err := errors.Join(keep.SetFlag(cap.Permitted, true, cap.SYS_PTRACE), keep.SetFlag(cap.Effective, true, cap.SYS_PTRACE)); err != nil {
		return err
	}
	if err := keep.SetProc(); err != nil {
		return fmt.Errorf("keep CAP_SYS_PTRACE only, as a guard does: %w", err)
	}
	return nil
}

// printReport prints a line for each check, or for those that are not well, and one about all.
func printReport(w io.Writer, r doctor.Report, all bool) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range r.Checks {
		if !all && c.Status != doctor.Warn && c.Status != doctor.Fail {
			continue
		}
		remedy := ""
		if c.Remedy != "" {
			remedy = " → " + c.Remedy
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\n", c.Status, c.Name, terminal.Printable(c.Found+remedy))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	words := map[doctor.Status]string{doctor.OK: "ok", doctor.Warn: "warning", doctor.Fail: "failure", doctor.Skip: "skipped"}
	var counts []string
	for _, s := range []doctor.Status{doctor.OK, doctor.Warn, doctor.Fail, doctor.Skip} {
		text := fmt.Sprintf("%d %s", r.Count(s), words[s])
		if s == doctor.Warn || s == doctor.Fail {
			text = terminal.Plural(r.Count(s), words[s])
		}
		counts = append(counts, text)
	}
	_, err := fmt.Fprintf(w, "doctor: %s\n", strings.Join(counts, ", "))
	return err
}
