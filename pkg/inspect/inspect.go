// SPDX-License-Identifier: Apache-2.0

// Package inspect gathers all that is known of a container: reservation, guard, page, log, events.
package inspect

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// Dossier is all of a container. Its form in JSON is under the version of package schema, but for the record, which is the ledger's.
type Dossier struct {
	ID     string        `json:"id"`
	Name   string        `json:"name,omitempty"`
	State  string        `json:"state"`  // as in cgpu smi
	Record ledger.Record `json:"record"` // the ledger's: for people, and not under the version
	// Guard is what the guard says; in preload mode, what the page does. GuardError is why there is nothing.
	Guard      *schema.Guard `json:"guard,omitempty"`
	GuardError string        `json:"guard_error,omitempty"`
	// Page is what is on the vGPU page, where the container has one. PageError is why it cannot be read.
	Page      *schema.Page  `json:"page,omitempty"`
	PageError string        `json:"page_error,omitempty"`
	Log       schema.Log    `json:"log"`
	Events    []event.Event `json:"events"` // as cgpu events prints them
	// EventsError is why there are none.
	EventsError string `json:"events_error,omitempty"`
}

// Gather gathers what can be had. What cannot be read is told in its place.
func Gather(t *device.Table, runDir string, r ledger.Record, lines int) Dossier {
	d := Dossier{ID: r.ID, Name: r.Name, Record: r, Events: []event.Event{}}
	a := snapshot.AskAll(t, []ledger.Record{r})[0]
	if d.State = snapshot.StateOf(r, a); d.State == snapshot.StateRunning && r.Paused && len(r.VGPUs) > 0 {
		d.State = snapshot.StatePaused
	}
	if a.Err == nil {
		d.Guard = snapshot.GuardJSON(a.Status)
	} else {
		d.GuardError = a.Err.Error()
	}
	if r.Page != "" {
		p, err := viewPage(r.Page)
		if err != nil {
			d.PageError = err.Error()
		}
		d.Page = p
	}
	d.Log = viewLog(launch.LogFile(runDir, r), lines)
	list, err := event.Read(runDir)
	if err != nil {
		d.EventsError = err.Error()
	}
	for _, e := range list {
		if e.Nonce == r.Nonce || e.Nonce == "" && e.Container == r.ID {
			d.Events = append(d.Events, e)
		}
	}
	return d
}

func viewPage(path string) (*schema.Page, error) {
	p, err := page.Read(path)
	if err != nil {
		return nil, err
	}
	h := p.Header()
	v := &schema.Page{Path: path, Flags: []string{}, Change: h.Change, VGPUs: []schema.PageVGPU{}}
	for _, f := range []struct {
		flag uint32
		name string
	}{{page.FlagGuard, "guard"}, {page.FlagPreload, "preload"}, {page.FlagManagedLimit, "managed-limit"},
		{page.FlagManagedDeny, "managed-deny"}, {page.FlagNoHMM, "no-hmm"}} {
		if h.Flags&f.flag != 0 {
			v.Flags = append(v.Flags, f.name)
		}
	}
	for i := range int(h.VGPUs) {
		g := p.VGPU(i)
		x := schema.PageVGPU{Minor: g.Minor, Native: g.Flags&page.VGPUNative != 0, Weight: g.Weight, Limit: quota.Bytes(g.Limit),
			Used: quota.Bytes(g.Used), Managed: quota.Bytes(g.Managed), Spill: quota.Bytes(g.Spill), Spilled: quota.Bytes(g.Spilled),
			Timeslice: schema.SecondsOf(time.Duration(g.TimesliceMicros) * time.Microsecond)}
		if h.Flags&page.FlagPreload != 0 {
			used, managed, n := p.SlotUse(i)
			x.Used, x.Managed, x.Processes = quota.Bytes(used), quota.Bytes(managed), n
		}
		v.VGPUs = append(v.VGPUs, x)
	}
	return v, nil
}

// maxLogRead bounds what is read of a log; a guard's own bound is 1 MiB.
const maxLogRead = 1 << 20

// viewLog reads the end of a guard's log. It is made when there is something to tell: none is no error.
func viewLog(path string, lines int) schema.Log {
	v := schema.Log{Path: path, Lines: []string{}}
	if lines == 0 {
		return v
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return v
	}
	if err != nil {
		v.Error = err.Error()
		return v
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > maxLogRead {
		_, _ = f.Seek(-maxLogRead, io.SeekEnd)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxLogRead))
	if err != nil {
		v.Error = err.Error()
	}
	for line := range strings.Lines(string(text)) {
		v.Lines = append(v.Lines, strings.TrimSuffix(line, "\n"))
	}
	v.Lines = v.Lines[max(0, len(v.Lines)-lines):]
	return v
}
