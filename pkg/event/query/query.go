// SPDX-License-Identifier: Apache-2.0

// Package query picks events of the node by what somebody asks for, and prints them for people.
package query

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

// Query is which events are shown.
type Query struct {
	Since      time.Time
	Tail       int      // -1: all
	GPUs       []string // UUIDs
	Containers []string
	Kinds      []string
	Name       func(event.Event) string // of the container, for people
}

// Pick leaves the events that are asked for.
func (q Query) Pick(list []event.Event) []event.Event {
	return slices.DeleteFunc(list, func(e event.Event) bool {
		return e.Time.Before(q.Since) || len(q.Kinds) > 0 && !slices.Contains(q.Kinds, string(e.Kind)) ||
			len(q.GPUs) > 0 && (e.GPU == nil || !slices.Contains(q.GPUs, e.GPU.UUID)) ||
			len(q.Containers) > 0 && !slices.ContainsFunc(q.Containers, func(typed string) bool {
				return view.IsContainer(typed, e.Container, e.Nonce, q.Name(e))
			})
	})
}

// Last leaves the last ones.
func (q Query) Last(list []event.Event) []event.Event {
	if q.Tail < 0 || len(list) <= q.Tail {
		return list
	}
	return list[len(list)-q.Tail:]
}

// Known refuses a container that neither an event nor the ledger has: it is a misspelling, and nothing would be printed.
func (q Query) Known(past []event.Event, book *ledger.Ledger) error {
	for _, name := range q.Containers {
		one := Query{Containers: []string{name}, Name: q.Name}
		if len(one.Pick(slices.Clone(past))) > 0 {
			continue
		}
		if _, err := node.FindContainer(book, name); errors.Is(err, ledger.ErrNotFound) {
			return fmt.Errorf("--container %q: no event and no container that runs has this ID or name; cgpu smi lists those that run", name)
		}
	}
	return nil
}

// NamesOf names the containers of events: as the event says, or another one of the same start, else as a container that still runs is
// called. The ledger is looked at again when there is a container that it did not have.
func NamesOf(book *ledger.Ledger, past []event.Event) func(event.Event) string {
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

// Print prints a line. Columns have widths of their own, since what follows is not known yet.
func Print(w io.Writer, e event.Event, name string) error {
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
	_, err := fmt.Fprintf(w, "%s  %-9s  %-12s  %s\n", e.Time.Format("2006-01-02T15:04:05-07:00"), terminal.Printable(string(e.Kind)),
		container, about)
	return err
}
