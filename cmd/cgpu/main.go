// SPDX-License-Identifier: Apache-2.0

// Cgpu is the command line for people: what runs on this node's GPUs (smi), changes while it runs (set, policy, pause,
// resume), what the runtime would do with a container (spec), and upkeep (gc, refresh).
//
// It asks no daemon. The ledger says who holds what, each container's guard says what is used, node.json knows the GPUs.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

var version = "unknown" // set by the linker

func main() {
	a := app()
	if os.Getuid() != os.Geteuid() {
		fmt.Fprintln(os.Stderr, "cgpu: has the set-user-ID bit, with which any user would be root: take it away (chmod u-s), and use sudo")
		os.Exit(1)
	}
	if os.Geteuid() == 0 { // it may take the node's locks
		a.Metadata = map[string]any{inheritedKey: hostrun.ResetInherited()}
	}
	if err := run(a, os.Args); err != nil {
		fmt.Fprintln(os.Stderr, complaint(err, os.Args, os.Geteuid()))
		if _, usage := errors.AsType[usageError](err); usage {
			os.Exit(2)
		}
		if e, ok := errors.AsType[cli.ExitCoder](err); ok {
			os.Exit(e.ExitCode())
		}
		os.Exit(1)
	}
}

// complaint is the line for an error. What root alone may do is said first to whoever is not root.
func complaint(err error, args []string, uid int) string {
	text := terminal.Printable(strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", " ")) // tenants' names may be in it
	text = strings.TrimPrefix(text, "cgpu: ")
	if uid != 0 && errors.Is(err, fs.ErrPermission) {
		command := "cgpu"
		if len(args) > 1 {
			command += " " + terminal.Printable(args[1])
		}
		return fmt.Sprintf("cgpu: needs root: sudo %s (%s)", command, text)
	}
	return "cgpu: " + text
}

// usageError is a command line that cannot be understood; exit status 2.
type usageError struct{ error }

func app() *cli.App {
	a := &cli.App{
		Name:            "cgpu",
		Usage:           "virtual GPUs for containers",
		Version:         version,
		HideVersion:     true,
		HideHelpCommand: true,
		Description: "The state of the node is below " + device.DefaultRunDir + " (CGPU_RUN_DIR names another folder), its\n" +
			"configuration in " + device.DefaultConfigFile + " (CGPU_CONFIG). Nearly all commands need root.\n\n" +
			"cgpu help COMMAND, or cgpu COMMAND --help, tells of a command; cgpu --version prints the version.",
		OnUsageError: badFlag("", nil),
		// -e A=0,1 is one variable.
		DisableSliceFlagSeparator: true,
		ExitErrHandler:            func(*cli.Context, error) {}, // main prints and exits
		Commands: []*cli.Command{smiCommand(), topCommand(), psCommand(), eventsCommand(), inspectCommand(), setCommand(), policyCommand(),
			pauseCommand(), resumeCommand(), runCommand(), runGuardCommand(), domainStartCommand(), domainRunCommand(), domainEndCommand(),
			mpsCommand(), mpsDaemonCommand(), slurmCommand(), specCommand(), doctorCommand(), configCommand(), kmCommand(), exporterCommand(),
			webCommand(), healthCommand(), installCommand(), uninstallCommand(), upgradeCommand(), gcCommand(), refreshCommand(),
			completionCommand(), manCommand(), versionCommand()},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usageError{noCommand(c.App, c.Args().First())}
			}
			return cli.ShowAppHelp(c)
		},
	}
	for _, c := range a.Commands {
		c.OnUsageError = badFlag(c.Name, c.Flags)
	}
	return a
}

// noArguments refuses what a command would otherwise overlook.
func noArguments(c *cli.Context) error {
	if c.Args().Present() {
		return usageError{fmt.Errorf("%s: %q: want no arguments; see cgpu %[1]s --help", c.Command.Name, c.Args().First())}
	}
	return nil
}

func refreshCommand() *cli.Command {
	return &cli.Command{
		Name:  "refresh",
		Usage: "look for GPUs and driver files again and read cgpu.toml again",
		Description: "The runtime does this by itself after a boot and when the driver or the configuration changed.\n" +
			"Here it is done in any case, and what was found is printed; in JSON, what cgpu smi -o json prints.\n\n" +
			"Examples:\n   cgpu refresh\n   cgpu refresh -o json | jq '.gpus[].uuid'",
		Flags:  []cli.Flag{outputFlag()},
		Before: noArguments,
		Action: inFormat(func(c *cli.Context, inJSON bool) error {
			helper, err := device.Program("cgpu-refresh")
			if err != nil {
				return err
			}
			if inJSON {
				if out, err := exec.Command(helper, "-force").CombinedOutput(); err != nil {
					return fmt.Errorf("%s: %w: %s", helper, err, out)
				}
				v, err := node.View(device.RunDir())
				if err != nil {
					return err
				}
				return view.PrintJSON(c.App.Writer, v)
			}
			return fmt.Errorf("%s: %w", helper, syscall.Exec(helper, []string{helper, "-v", "-force"}, os.Environ()))
		}),
	}
}

// versionView is what cgpu version -o json prints.
type versionView struct {
	Version  string `json:"version"`
	Go       string `json:"go"`
	Platform string `json:"platform"` // such as linux/amd64
	Schema   int    `json:"schema"`   // of the JSON of all commands
}

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:  "version",
		Usage: "print the version",
		Description: "Bug reports want it, and the driver's, which cgpu smi prints first. In JSON it also has the version of what " +
			"docs/json.md\n" +
			"describes (schema).\n\nExamples:\n   cgpu version\n   cgpu version -o json | jq .schema",
		Flags:  []cli.Flag{outputFlag()},
		Before: noArguments,
		Action: inFormat(func(c *cli.Context, inJSON bool) error {
			if inJSON {
				return terminal.EncodeJSON(c.App.Writer, versionView{version, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, schema.Version},
					"  ")
			}
			fmt.Fprintf(c.App.Writer, "cgpu %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return nil
		}),
	}
}
