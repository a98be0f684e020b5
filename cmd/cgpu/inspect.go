package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// logTail is how many lines of a guard's log inspect shows.
const logTail = 50

func inspectCommand() *cli.Command {
	return &cli.Command{
		Name:      "inspect",
		Usage:     "show everything that is known of a container, as JSON",
		ArgsUsage: "CONTAINER",
		Description: "Its reservation (record), what its guard says (guard), its vGPU page as its programs see it (page), the end of the\n" +
			"guard's log, and its events. " + containerHelp + "\n" +
			"Of a container that is gone, cgpu events --container still tells.\n\n" +
			"Examples:\n   cgpu inspect web\n   cgpu inspect 3f2a | jq .guard.calls\n   cgpu inspect web --log-lines 0",
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "log-lines", Usage: "the last `N` lines of the guard's log", Value: logTail},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return usageError{errors.New("inspect: want one CONTAINER; see cgpu inspect --help")}
			}
			lines := c.Int("log-lines")
			if lines < 0 {
				return usageError{fmt.Errorf("inspect: --log-lines %d: want 0 or more", lines)}
			}
			runDir := device.RunDir()
			r, err := node.FindContainer(ledger.Open(runDir), c.Args().First())
			if err != nil {
				return err
			}
			t, err := device.Load(runDir)
			if t == nil {
				return err
			}
			return terminal.EncodeJSON(c.App.Writer, inspect(t, runDir, r, lines), "  ")
		},
	}
}

// dossier is all of a container. Its JSON form is an interface: fields may be added, none renamed.
type dossier struct {
	ID     string        `json:"id"`
	Name   string        `json:"name,omitempty"`
	State  string        `json:"state"`
	Record ledger.Record `json:"record"`
	// Guard is what the guard says; in preload mode, what the page does. GuardError is why there is nothing.
	Guard      *api.Status   `json:"guard,omitempty"`
	GuardError string        `json:"guardError,omitempty"`
	Page       *pageView     `json:"page,omitempty"`
	PageError  string        `json:"pageError,omitempty"`
	Log        logView       `json:"log"`
	Events     []event.Event `json:"events"`
	// EventsError is why there are none.
	EventsError string `json:"eventsError,omitempty"`
}

type pageView struct {
	Path   string         `json:"path"`
	Flags  []string       `json:"flags"`
	Change uint32         `json:"change"`
	VGPUs  []pageVGPUView `json:"vgpus"`
}

type pageVGPUView struct {
	Minor           uint32      `json:"minor"`
	Native          bool        `json:"native,omitempty"`
	Weight          uint32      `json:"weight"`
	Limit           quota.Bytes `json:"limit"`
	Used            quota.Bytes `json:"used"`
	Managed         quota.Bytes `json:"managed"`
	Spill           quota.Bytes `json:"spill"`
	Spilled         quota.Bytes `json:"spilled"`
	TimesliceMicros uint64      `json:"timesliceMicros,omitempty"`
	Processes       int         `json:"processes,omitempty"` // with a slot, in preload mode
}

type logView struct {
	Path  string   `json:"path"`
	Lines []string `json:"lines"`
	Error string   `json:"error,omitempty"`
}

// inspect gathers what can be had. What cannot be read is told in its place.
func inspect(t *device.Table, runDir string, r ledger.Record, lines int) dossier {
	d := dossier{ID: r.ID, Name: r.Name, Record: r, Events: []event.Event{}}
	a := snapshot.AskAll(t, []ledger.Record{r})[0]
	if d.State = snapshot.StateOf(r, a); d.State == snapshot.StateRunning && r.Paused && len(r.VGPUs) > 0 {
		d.State = snapshot.StatePaused
	}
	if a.Err == nil {
		d.Guard = &a.Status
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

func viewPage(path string) (*pageView, error) {
	p, err := page.Read(path)
	if err != nil {
		return nil, err
	}
	h := p.Header()
	v := &pageView{Path: path, Flags: []string{}, Change: h.Change, VGPUs: []pageVGPUView{}}
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
		x := pageVGPUView{Minor: g.Minor, Native: g.Flags&page.VGPUNative != 0, Weight: g.Weight, Limit: quota.Bytes(g.Limit),
			Used: quota.Bytes(g.Used), Managed: quota.Bytes(g.Managed), Spill: quota.Bytes(g.Spill), Spilled: quota.Bytes(g.Spilled),
			TimesliceMicros: g.TimesliceMicros}
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
func viewLog(path string, lines int) logView {
	v := logView{Path: path, Lines: []string{}}
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
