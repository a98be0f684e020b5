// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
)

// Server is a front end that runs: pkg/dra's Driver, pkg/deviceplugin's Plugin.
type Server interface {
	Update(ctx context.Context, table *device.Table) error
	Healthy() error
	Stop()
}

// FrontEnd is a way by which pods are allocated GPUs.
type FrontEnd struct {
	Name string
	// Mine says which GPUs it may advertise; nil: all. Others says which it has to leave because another front end was
	// given them too: no GPU is advertised twice, so such a one is advertised by nobody.
	Mine, Others func(device.GPU) bool
	Start        func(ctx context.Context, table *device.Table, gpus func(device.GPU) bool) (Server, error)
}

// has says whether the front end advertises a GPU.
func (f FrontEnd) has(g device.GPU) bool {
	return (f.Mine == nil || f.Mine(g)) && (f.Others == nil || !f.Others(g))
}

// front is a front end in the course of time.
type front struct {
	FrontEnd
	server  Server
	err     error     // nil: it serves
	failing bool      // its last start or update failed
	tries   int       // starts and updates that failed since the last that did not
	next    time.Time // when it may be tried again
	behind  bool      // it was not told of the present table
	began   time.Time // when it was started
	deaths  int       // how often it ended for good, each soon after its start
}

// retry is how long after the n-th failure the next try is made.
func retry(n int) time.Duration {
	return min(time.Second<<min(n, 10), time.Minute)
}

// failer is a Server that tells when it has ended for good, as one whose socket is lost. Nothing but another start mends that.
type failer interface{ Failed() error }

// limited is what pods do not get from a front end that serves them.
func (f *front) limited() string {
	if s, ok := f.server.(interface{ Limited() string }); ok {
		return s.Limited()
	}
	return ""
}

// lived is after what time an end counts as the first.
const lived = 10 * time.Minute

// restart stops a front end that has ended for good, so that it is started again.
func (f *front) restart(log *slog.Logger) {
	m, ok := f.server.(failer)
	if !ok {
		return
	}
	err := m.Failed()
	if err == nil {
		return
	}
	log.Error("front end ended; it is started again", "frontend", f.Name, "err", err)
	f.stop(log)
	if time.Since(f.began) >= lived {
		f.deaths = 0
	}
	f.server, f.behind, f.failing, f.err = nil, true, true, err
	f.next = time.Now().Add(retry(f.deaths))
	f.deaths++
}

// follow brings the front end to the table: starts it, updates it, asks how it is. Without a table one that runs has no GPUs
// to offer, and is told so: pods would be sent here otherwise, and fail. While it is not known whose the table's GPUs are, which
// undivided says, it is left as it is.
func (f *front) follow(ctx context.Context, table *device.Table, changed bool, undivided error, log *slog.Logger) {
	f.restart(log)
	f.behind = f.behind || changed
	if f.server == nil && table == nil {
		f.err = errors.New("waits for the node table")
		return
	}
	if undivided != nil {
		f.next, f.err = time.Time{}, undivided
		return
	}
	if f.behind && (changed || !time.Now().Before(f.next)) {
		f.bring(ctx, table, log)
	}
	if f.server != nil && !f.failing {
		f.err = f.server.Healthy()
	}
}

func (f *front) bring(ctx context.Context, table *device.Table, log *slog.Logger) {
	var err error
	if f.server == nil {
		var s Server
		if s, err = f.Start(ctx, table, f.has); err == nil {
			f.server, f.began = s, time.Now()
			log.Info("front end started", "frontend", f.Name)
		}
	} else {
		if table == nil {
			table = &device.Table{Version: device.TableVersion}
		}
		err = f.server.Update(ctx, table)
	}
	if f.failing = err != nil; f.failing {
		if f.err == nil || f.err.Error() != err.Error() { // once for each thing that is wrong
			log.Error("front end failed", "frontend", f.Name, "err", err)
		}
		f.next, f.err = time.Now().Add(retry(f.tries)), err
		f.tries++
		return
	}
	f.behind, f.tries, f.err = false, 0, nil
}

// stop ends the front end. One that waits for ever does not hold up the others.
func (f *front) stop(log *slog.Logger) {
	if f.server == nil {
		return
	}
	done := make(chan struct{})
	go func() {
		f.server.Stop()
		close(done)
	}()
	select {
	case <-done:
		log.Info("front end stopped", "frontend", f.Name)
	case <-time.After(10 * time.Second):
		log.Error("front end does not stop", "frontend", f.Name)
	}
}

// shared are the GPUs that this front end would have, but another was given too.
func (f *front) shared(table *device.Table) (list []int) {
	if table == nil || f.Others == nil {
		return nil
	}
	for _, g := range table.GPUs {
		if f.Others(g) && (f.Mine == nil || f.Mine(g)) {
			list = append(list, g.Index)
		}
	}
	return list
}

// Selection is a list of GPUs, as a flag has it: indices and UUIDs.
type Selection struct {
	indices []int
	uuids   []string
}

// ParseSelection reads such a list.
func ParseSelection(list []string) (Selection, error) {
	var s Selection
	for _, one := range list {
		switch n, err := strconv.Atoi(one); {
		case err == nil && n >= 0 && n < 1024:
			s.indices = append(s.indices, n)
		case strings.HasPrefix(one, "GPU-") && len(one) > len("GPU-"):
			s.uuids = append(s.uuids, one)
		default:
			return Selection{}, fmt.Errorf("%q: want indices or whole UUIDs of GPUs, such as 0,1 or GPU-…: cgpu smi shows them", one)
		}
	}
	return s, nil
}

// Has says whether a GPU is in the list.
func (s Selection) Has(g device.GPU) bool {
	return slices.Contains(s.indices, g.Index) || slices.Contains(s.uuids, g.UUID)
}

// Meets returns what both lists name in the same words.
func (s Selection) Meets(other Selection) (names []string) {
	for _, n := range s.indices {
		if slices.Contains(other.indices, n) {
			names = append(names, strconv.Itoa(n))
		}
	}
	for _, uuid := range s.uuids {
		if slices.Contains(other.uuids, uuid) {
			names = append(names, uuid)
		}
	}
	return names
}
