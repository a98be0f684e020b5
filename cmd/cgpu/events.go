// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/event/query"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// followTail is how many events of the past --follow shows first.
const followTail = 10

func eventsCommand() *cli.Command {
	var kinds []string
	for _, k := range event.Kinds() {
		kinds = append(kinds, string(k))
	}
	return &cli.Command{
		Name:  "events",
		Usage: "show what happened: starts, denials, kills, changes",
		Description: "The node keeps the last 4 to 8 MiB of events, until the next boot. What a container's programs can cause (denied,\n" +
			"killed, freed, held, let, warning) is written at most once in 10 s for each kind, GPU and container; the line then says how\n" +
			"often it happened. Of refusals the node tells 40 a minute, 10 of one namespace, and then how many there were beyond. In preload mode " +
			"nobody is there\n" +
			"to tell of starts, ends and denials. What Docker calls a container, and others that tell a runtime no name, is told by its event\n" +
			"\"deleted\", when the engine has let go of it.\n" +
			"KIND is one of " + strings.Join(kinds[:len(kinds)/2], ", ") + ",\n" + strings.Join(kinds[len(kinds)/2:], ", ") + ".\n\n" +
			"Examples:\n   cgpu events\n   cgpu events --follow\n   cgpu events --kind denied --kind killed --since 1h\n   cgpu events " +
			"--container web -o json | jq .text",
		ArgsUsage: " ",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on with what happens, until Ctrl-C"},
			&cli.IntFlag{Name: "tail", Usage: "only the last `N` of the past", DefaultText: fmt.Sprintf("all; %d with --follow", followTail)},
			&cli.StringFlag{Name: "since", Usage: "only since `WHEN`: a time such as 2026-11-21T10:00:00Z, or as long ago as 90s, 10m or 24h"},
			&cli.StringSliceFlag{Name: "container", Usage: "only of this `CONTAINER` (ID, beginning of one, nonce or name); may be repeated"},
			&cli.StringSliceFlag{Name: "gpu", Aliases: []string{"i"},
				Usage: "only those about this `GPU` (index or UUID), or several with commas between them; may be repeated"},
			&cli.StringSliceFlag{Name: "kind", Usage: "only of this `KIND`; may be repeated"},
			&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table, or json (a line for each)", Value: "table"},
		},
		Before: noArguments,
		Action: func(c *cli.Context) error {
			q, err := eventQuery(c, time.Now())
			if err != nil {
				return usageError{fmt.Errorf("events: %w", err)}
			}
			runDir := device.RunDir()
			print := query.Print
			if c.String("o") == "json" {
				print = func(w io.Writer, e event.Event, _ string) error { return terminal.EncodeJSON(w, e, "") }
			}
			show := func(list []event.Event) error {
				for _, e := range list {
					e.Time, e.Name = e.Time.Local(), q.Name(e)
					if err := print(c.App.Writer, e, e.Name); err != nil {
						return err
					}
				}
				return nil
			}
			if names := c.StringSlice("gpu"); len(names) > 0 {
				t, err := node.Load(runDir)
				if err != nil {
					return err
				}
				if q.GPUs, err = node.UUIDs(t, strings.Join(names, ",")); err != nil {
					return fmt.Errorf("events: --gpu: %w", err)
				}
			}
			_ = event.TellRefused(runDir) // root may; others cannot read either
			past, err := event.Read(runDir)
			if err != nil {
				return eventsError(err)
			}
			book := ledger.Open(runDir)
			q.Name = query.NamesOf(book, past)
			if err := q.Known(past, book); err != nil && !c.Bool("follow") { // it may be started yet
				return fmt.Errorf("events: %w", err)
			}
			if !c.Bool("follow") {
				return eventsError(show(q.Last(q.Pick(past))))
			}
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			go func() {
				for range time.Tick(time.Minute) {
					_ = event.TellRefused(runDir)
				}
			}()
			first := true
			return eventsError(event.Follow(ctx, runDir, func(list []event.Event) error {
				if list = q.Pick(list); first {
					first, list = false, q.Last(list)
				}
				return show(list)
			}))
		},
	}
}

// eventsError says what to do about an error. Who stops reading (cgpu events | head) has seen enough: that is none.
func eventsError(err error) error {
	switch {
	case errors.Is(err, syscall.EPIPE):
		return nil
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("events: %w: only root may read them", err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("events: %w: cgpu refresh makes the run directory", err)
	}
	return err
}

func eventQuery(c *cli.Context, now time.Time) (query.Query, error) {
	q := query.Query{Tail: -1, Containers: c.StringSlice("container"), Kinds: c.StringSlice("kind")}
	if text := c.String("since"); text != "" {
		if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
			q.Since = now.Add(-ago)
		} else if q.Since, err = time.Parse(time.RFC3339, text); err != nil {
			return q, fmt.Errorf("--since %q: want a time such as 2026-11-21T10:00:00Z, or a duration such as 10m", text)
		}
	}
	if c.Bool("follow") && !c.IsSet("since") {
		q.Tail = followTail
	}
	if c.IsSet("tail") {
		if q.Tail = c.Int("tail"); q.Tail < 0 {
			return q, fmt.Errorf("--tail %d: want 0 or more", q.Tail)
		}
	}
	for _, k := range q.Kinds {
		if !slices.Contains(event.Kinds(), event.Kind(k)) {
			return q, fmt.Errorf("--kind %q: no such kind; cgpu events --help lists them", k)
		}
	}
	for _, name := range q.Containers {
		if name == "" {
			return q, fmt.Errorf(`--container "": want an ID or a name`)
		}
	}
	if format := c.String("o"); format != "table" && format != "json" {
		return q, fmt.Errorf("-o %q: want table or json", format)
	}
	return q, nil
}
