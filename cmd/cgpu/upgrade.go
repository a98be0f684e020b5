// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/upgrade"
	"github.com/opencgpu/cgpu/pkg/view"
)

const (
	upgradeParallel = 4
	maxParallel     = 64
)

func upgradeCommand() *cli.Command {
	return &cli.Command{
		Name:      "upgrade",
		Usage:     "have the guards of running containers go on as the installed version",
		ArgsUsage: "[CONTAINER]",
		Description: "A container keeps the guard that it was started with. This has it replaced while the container runs: GPU calls wait for " +
			"some\n" +
			"milliseconds meanwhile, none fails. Where the other program cannot go on with what the guard has, or something does not come to\n" +
			"rest in time, the guard stays what it is, and a line says why. It can be stopped at any moment and called again.\n" +
			containerHelp + "\n\n" +
			"Examples:\n   cgpu upgrade 3f2a\n   cgpu upgrade --all\n   cgpu upgrade --all --program /opt/cgpu-1.0/bin/cgpu-guard\n" +
			"   cgpu upgrade --all -o json | jq '.containers[] | select(.outcome == \"failed\")'",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "all", Usage: "every container that runs"},
			&cli.StringFlag{Name: "program", Usage: "go on as the cgpu-guard at `PATH`, such as one of a version before",
				DefaultText: "the one beside cgpu"},
			&cli.IntFlag{Name: "parallel", Usage: "`N`, 1 to 64: so many at a time", Value: upgradeParallel},
			outputFlag(),
		},
		Action: upgradeGuards,
	}
}

func upgradeGuards(c *cli.Context) error {
	inJSON, err := wantsJSON(c)
	if err != nil {
		return err
	}
	if c.Bool("all") == (c.NArg() > 0) || c.NArg() > 1 {
		return usageError{errors.New("upgrade: want one CONTAINER, or --all; see cgpu upgrade --help")}
	}
	parallel := c.Int("parallel")
	if parallel < 1 || parallel > maxParallel {
		return usageError{fmt.Errorf("upgrade: --parallel %d: want 1 to %d", parallel, maxParallel)}
	}
	program, err := guardProgram(c.String("program"))
	if err != nil {
		return err
	}
	records, err := toUpgrade(c)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(c.Context, os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait for guards
	report := upgradeReport{w: c.App.Writer, quiet: inJSON}
	upgrade.Guards(ctx, records, program, parallel, report.add)
	if inJSON {
		err = terminal.EncodeJSON(c.App.Writer, report.view(), "  ")
	}
	return errors.Join(err, report.err(len(records)))
}

// guardProgram is the path of the program, from the root.
func guardProgram(path string) (string, error) {
	if path == "" {
		return device.Program("cgpu-guard")
	}
	absolute, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("upgrade: --program %q: %w", path, err)
	}
	if info, err := os.Stat(absolute); err != nil || !info.Mode().IsRegular() {
		return "", fmt.Errorf("upgrade: --program %q: want the path of a cgpu-guard (%w)", path, cmp.Or(err, errors.New("it is no file")))
	}
	return absolute, nil
}

func toUpgrade(c *cli.Context) ([]ledger.Record, error) {
	book := ledger.Open(device.RunDir())
	if !c.Bool("all") {
		r, err := node.FindContainer(book, c.Args().First())
		return []ledger.Record{r}, err
	}
	return book.List()
}

// upgradeReport says what came of each container.
type upgradeReport struct {
	w       io.Writer
	quiet   bool
	results []upgrade.Result
}

func (u *upgradeReport) add(r upgrade.Result) {
	u.results = append(u.results, r)
	if u.quiet {
		return
	}
	text := map[upgrade.Outcome]string{
		upgrade.Done:    fmt.Sprintf("upgraded; its GPU calls waited for %s", shortTime(r.Stall)),
		upgrade.Already: "is of that version already",
		upgrade.Gone:    "has ended",
		upgrade.Preload: "has no guard (enforcement = \"preload\"): its next start has the new library",
		upgrade.Skipped: "not upgraded: stopped",
		upgrade.Failed:  fmt.Sprintf("not upgraded: %v", r.Err),
	}[r.Outcome]
	fmt.Fprintf(u.w, "%s%s: %s\n", view.ShortID(r.ID), view.Label(r.Record), terminal.Printable(text))
}

// shortTime is a time in milliseconds.
func shortTime(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1e3) }

// err says that some are not what was wanted.
func (u *upgradeReport) err(of int) error {
	n := 0
	for _, r := range u.results {
		if r.Outcome == upgrade.Failed || r.Outcome == upgrade.Skipped {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("upgrade: %d of %s not upgraded; their guards go on as they are, and cgpu upgrade can be called again", n,
		terminal.Plural(of, "container"))
}

func (u *upgradeReport) view() schema.Upgrade {
	v := schema.Upgrade{Containers: []schema.UpgradedContainer{}}
	for _, r := range u.results {
		x := schema.UpgradedContainer{ID: r.ID, Outcome: string(r.Outcome), Stall: schema.SecondsOf(r.Stall), Tries: r.Tries}
		if r.Err != nil {
			x.Error = r.Err.Error()
		}
		v.Containers = append(v.Containers, x)
	}
	slices.SortFunc(v.Containers, func(a, b schema.UpgradedContainer) int { return cmp.Compare(a.ID, b.ID) })
	return v
}
