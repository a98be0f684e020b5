package main

import (
	"cmp"
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
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
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
			"often it happened. Of refusals the node tells 40 a minute, 10 of one namespace, and then how many there were beyond. In preload mode nobody is there\n" +
			"to tell of starts, ends and denials. What Docker calls a container, and others that tell a runtime no name, is told by its event\n" +
			"\"deleted\", when the engine has let go of it.\n" +
			"KIND is one of " + strings.Join(kinds[:len(kinds)/2], ", ") + ",\n" + strings.Join(kinds[len(kinds)/2:], ", ") + ".\n\n" +
			"Examples:\n   cgpu events\n   cgpu events --follow\n   cgpu events --kind denied --kind killed --since 1h\n   cgpu events --container web -o json | jq .text",
		ArgsUsage: " ",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on with what happens, until Ctrl-C"},
			&cli.IntFlag{Name: "tail", Usage: "only the last `N` of the past", DefaultText: fmt.Sprintf("all; %d with --follow", followTail)},
			&cli.StringFlag{Name: "since", Usage: "only since `WHEN`: a time such as 2026-11-21T10:00:00Z, or as long ago as 90s, 10m or 24h"},
			&cli.StringSliceFlag{Name: "container", Usage: "only of this `CONTAINER` (ID, beginning of one, nonce or name); may be repeated"},
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
			print := printEvent
			if q.json {
				print = func(w io.Writer, e event.Event, _ string) error { return terminal.EncodeJSON(w, e, "") }
			}
			show := func(list []event.Event) error {
				for _, e := range list {
					e.Time, e.Name = e.Time.Local(), q.name(e)
					if err := print(c.App.Writer, e, e.Name); err != nil {
						return err
					}
				}
				return nil
			}
			_ = event.TellRefused(runDir) // root may; others cannot read either
			past, err := event.Read(runDir)
			if err != nil {
				return eventsError(err)
			}
			q.name = namesOf(ledger.Open(runDir), past)
			if !c.Bool("follow") {
				return eventsError(show(q.last(q.pick(past))))
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
				if list = q.pick(list); first {
					first, list = false, q.last(list)
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

// eventsQuery is which events are shown.
type eventsQuery struct {
	since      time.Time
	tail       int // -1: all
	containers []string
	kinds      []string
	json       bool
	name       func(event.Event) string // of the container, for people
}

func eventQuery(c *cli.Context, now time.Time) (eventsQuery, error) {
	q := eventsQuery{tail: -1, containers: c.StringSlice("container"), kinds: c.StringSlice("kind")}
	if text := c.String("since"); text != "" {
		if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
			q.since = now.Add(-ago)
		} else if q.since, err = time.Parse(time.RFC3339, text); err != nil {
			return q, fmt.Errorf("--since %q: want a time such as 2026-11-21T10:00:00Z, or a duration such as 10m", text)
		}
	}
	if c.Bool("follow") && !c.IsSet("since") {
		q.tail = followTail
	}
	if c.IsSet("tail") {
		if q.tail = c.Int("tail"); q.tail < 0 {
			return q, fmt.Errorf("--tail %d: want 0 or more", q.tail)
		}
	}
	for _, k := range q.kinds {
		if !slices.Contains(event.Kinds(), event.Kind(k)) {
			return q, fmt.Errorf("--kind %q: no such kind; cgpu events --help lists them", k)
		}
	}
	for _, name := range q.containers {
		if name == "" {
			return q, fmt.Errorf(`--container "": want an ID or a name`)
		}
	}
	switch format := c.String("o"); format {
	case "table":
	case "json":
		q.json = true
	default:
		return q, fmt.Errorf("-o %q: want table or json", format)
	}
	return q, nil
}

// pick leaves the events that are asked for.
func (q eventsQuery) pick(list []event.Event) []event.Event {
	return slices.DeleteFunc(list, func(e event.Event) bool {
		return e.Time.Before(q.since) || len(q.kinds) > 0 && !slices.Contains(q.kinds, string(e.Kind)) ||
			len(q.containers) > 0 && !slices.ContainsFunc(q.containers, func(typed string) bool { return view.IsContainer(typed, e.Container, e.Nonce, q.name(e)) })
	})
}

// last leaves the last ones.
func (q eventsQuery) last(list []event.Event) []event.Event {
	if q.tail < 0 || len(list) <= q.tail {
		return list
	}
	return list[len(list)-q.tail:]
}

// namesOf names the containers of events: as the event says, or another one of the same start, else as a container that still runs is
// called. The ledger is looked at again when there is a container that it did not have.
func namesOf(book *ledger.Ledger, past []event.Event) func(event.Event) string {
	known := map[string]string{}
	for _, e := range past {
		if e.Name != "" && e.Nonce != "" {
			known[e.Nonce] = e.Name
		}
	}
	return func(e event.Event) string {
		key := cmp.Or(e.Nonce, e.Container)
		if e.Name != "" || key == "" {
			return e.Name
		}
		if _, ok := known[key]; !ok {
			known[key] = ""
			records, _ := book.List()
			for _, r := range records {
				name := snapshot.Named(r).Name
				known[r.Nonce], known[r.ID] = name, name
			}
		}
		return cmp.Or(known[e.Nonce], known[e.Container]) // an earlier start of the container may have told nothing
	}
}

// printEvent prints a line. Columns have widths of their own, since what follows is not known yet.
func printEvent(w io.Writer, e event.Event, name string) error {
	container, about := "-", ""
	if e.Container != "" {
		container = view.ShortID(e.Container)
	}
	if name != "" {
		about = terminal.Printable(name) + ": "
	}
	if e.GPU != nil {
		about += fmt.Sprintf("GPU %d: ", e.GPU.Index)
	}
	if e.PID != 0 {
		about += fmt.Sprintf("pid %d: ", e.PID)
	}
	about += terminal.Printable(e.Text)
	if e.Count > 1 {
		about += fmt.Sprintf(" (%d times)", e.Count)
	}
	_, err := fmt.Fprintf(w, "%s  %-9s  %-12s  %s\n", e.Time.Format("2006-01-02T15:04:05-07:00"), terminal.Printable(string(e.Kind)), container, about)
	return err
}
