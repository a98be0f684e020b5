// SPDX-License-Identifier: Apache-2.0

// Package gc gives back what containers hold that are gone, and lets run what their guards have left paused.
package gc

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/opencgpu/cgpu/pkg/domain/server"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

// Done is what cgpu gc has done.
type Done struct {
	Removed   []Removed  `json:"removed"` // containers whose shares were given back
	Paused    []Leftover `json:"paused"`  // what guards that are gone had left paused
	Sockets   int        `json:"sockets"` // files of containers that are gone
	Pages     int        `json:"pages"`
	Bundles   int        `json:"bundles"`
	Logs      int        `json:"logs"`
	Cgroups   int        `json:"cgroups"`   // of cgpu run
	Processes int        `json:"processes"` // of MPS servers that no record names, which were ended
	failed    bool
}

type Removed struct {
	ID     string `json:"id"`
	Nonce  string `json:"nonce"`
	Name   string `json:"name,omitempty"`
	Shares string `json:"shares"` // for people
}

type Leftover struct {
	ID       string `json:"id,omitempty"` // absent where the container is gone, too
	Name     string `json:"name,omitempty"`
	Channels int    `json:"channels"` // that run again; 0: only the note of them was left, and is removed
}

// Collect gives back what it can; what it could not is the error.
func Collect(runDir string) (done Done, err error) {
	done = Done{Removed: []Removed{}, Paused: []Leftover{}}
	book := ledger.Open(runDir)
	removed, err := book.GC()
	for _, r := range removed {
		_ = event.Append(runDir, event.Event{Kind: event.Removed, Container: r.ID, Nonce: r.Nonce, Name: r.Name, Text: view.Shares(r)})
		done.Removed = append(done.Removed, Removed{r.ID, r.Nonce, snapshot.Named(r).Name, view.Shares(r)})
	}
	var evictErr error
	done.Processes, evictErr = server.Evict(runDir)
	cgroups := hostrun.Cgroups() // before the records: who makes one has a record by then
	var records []ledger.Record
	if err == nil {
		records, err = book.List()
	}
	if err != nil {
		done.failed = true
		return done, err
	}
	var swept ledger.Swept
	done.Paused, err = collectLeftovers(records, filepath.Join(runDir, "g")) // the guards' sockets (pkg/admit)
	done.Cgroups = removeCgroups(runDir, cgroups, records)                   // by their logs, so before these are swept
	swept, sweepErr := book.Sweep()
	done.Sockets, done.Pages, done.Bundles, done.Logs = swept.Sockets, swept.Pages, swept.Bundles, swept.Logs
	err = errors.Join(err, evictErr, sweepErr)
	done.failed = err != nil
	return done, err
}

func (done Done) Print(w io.Writer) error {
	var text strings.Builder
	for _, r := range done.Removed {
		fmt.Fprintf(&text, "removed %s%s: %s\n", view.ShortID(r.ID), view.Label(ledger.Record{Name: r.Name}), r.Shares)
	}
	for _, p := range done.Paused {
		what := "a container that is gone"
		if p.ID != "" {
			what = view.ShortID(p.ID) + view.Label(ledger.Record{Name: p.Name})
		}
		if p.Channels > 0 {
			fmt.Fprintf(&text, "resumed %s, which a guard that is gone had paused: %s\n", terminal.Plural(p.Channels, "channel"), what)
		} else {
			fmt.Fprintf(&text, "removed the note of what was paused of %s\n", what)
		}
	}
	if done.Processes > 0 {
		fmt.Fprintf(&text, "ended processes of MPS servers that are gone: %d\n", done.Processes)
	}
	var files []string
	for _, kind := range []struct {
		n    int
		name string
	}{{done.Sockets, "socket"}, {done.Pages, "page"}, {done.Bundles, "bundle"}, {done.Logs, "log"}, {done.Cgroups, "cgroup"}} {
		if kind.n > 0 {
			files = append(files, terminal.Plural(kind.n, kind.name))
		}
	}
	if len(files) > 0 {
		fmt.Fprintf(&text, "removed of containers that are gone: %s\n", strings.Join(files, ", "))
	}
	if text.Len() == 0 && !done.failed {
		text.WriteString("nothing to remove\n")
	}
	_, err := io.WriteString(w, text.String())
	return err
}
