// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// What the books of a guard say (books.go) becomes a state as for a hand-over, and that a guard (restore.go).

// Revived is what the books say.
type Revived struct {
	*handover.State
	// Rooting are the processes that were making an RM client, which nobody may know. Held are handles of the guard's own on pages of
	// channels.
	Rooting []int
	Held    []uint32
}

// errBooks is of books that contradict themselves.
var errBooks = errors.New("the books of the guard that was killed do not add up")

// ReadBooks makes a state of the books' entries. Sums and counts are missing in it: Revive makes them. With an error it has what there is,
// so that it is known whose guard it was.
func ReadBooks(entries map[journal.Key][]byte) (*Revived, error) {
	r := &reader{entries: maps.Clone(entries), state: &handover.State{Version: handover.Version}, ids: map[uint8][]int{},
		places: map[uint8]map[int]int{}}
	r.prune()
	for key := range r.entries {
		r.ids[key.Kind] = append(r.ids[key.Kind], int(key.ID))
	}
	for kind, list := range r.ids {
		slices.Sort(list)
		r.places[kind] = map[int]int{}
		for i, id := range list {
			r.places[kind][id] = i + 1
		}
	}
	v := &Revived{State: r.state}
	r.process()
	r.account()
	v.Rooting = r.files()
	all(r, bookHeld, func(id int, _ bool) { v.Held = append(v.Held, uint32(id)) })
	if r.err == nil {
		r.err = r.state.Check()
	}
	if r.err != nil {
		return v, fmt.Errorf("%w: %w", errBooks, r.err)
	}
	return v, nil
}

// reader is a state while it is made of entries.
type reader struct {
	entries map[journal.Key][]byte
	ids     map[uint8][]int
	places  map[uint8]map[int]int // of an entry in its list, from 1 on
	state   *handover.State
	err     error
}

// owners are what others end with, in an order in which owners come first.
var owners = []struct{ kind, owner uint8 }{{bookClient, bookFile}, {bookObject, bookClient}, {bookDMA, bookObject}, {bookMap, bookFile},
	{bookRange, bookFile}}

// prune takes out what has lost its owner: a file that is closed is ended before what was on it.
func (r *reader) prune() {
	for _, x := range owners {
		for key, text := range r.entries {
			if key.Kind != x.kind {
				continue
			}
			var of struct{ File, Client, Mapper, Memory int }
			_ = json.Unmarshal(text, &of) // who reads all of it says what is wrong
			for _, id := range map[uint8][]int{bookFile: {of.File}, bookClient: {of.Client}, bookObject: {of.Mapper, of.Memory}}[x.owner] {
				if _, ok := r.entries[journal.Key{Kind: x.owner, ID: uint64(id)}]; !ok && id != 0 {
					delete(r.entries, key)
				}
			}
		}
	}
}

// all calls f with each entry of a kind.
func all[T any](r *reader, kind uint8, f func(id int, v T)) {
	for _, id := range r.ids[kind] {
		var v T
		if err := json.Unmarshal(r.entries[journal.Key{Kind: kind, ID: uint64(id)}], &v); err != nil && r.err == nil {
			r.err = fmt.Errorf("entry %d of kind %d: %w", id, kind, err)
		}
		f(id, v)
	}
}

// ref makes a place of the ID of an entry.
func (r *reader) ref(kind uint8, refs ...*int) {
	for _, ref := range refs {
		if *ref == 0 {
			continue
		}
		place := r.places[kind][*ref]
		if place == 0 && r.err == nil {
			r.err = fmt.Errorf("entry %d of kind %d is missing", *ref, kind)
		}
		*ref = place
	}
}

func (r *reader) missing(kind uint8) func(id int) bool {
	return func(id int) bool { return r.places[kind][id] == 0 }
}

func (r *reader) refs(kind uint8, list []int) {
	for i := range list {
		r.ref(kind, &list[i])
	}
}

func (r *reader) process() {
	s := r.state
	all(r, bookConfig, func(_ int, v Config) { s.Config = v })
	all(r, bookProcess, func(_ int, v handover.Process) { s.Process = v })
	all(r, bookRM, func(id int, v handover.RMClient) {
		if id > 0 {
			s.Process.OldRM = append(s.Process.OldRM, v)
		} else {
			s.Process.RM, s.Process.BAR1 = &v, make([]uint64, len(v.Devices))
		}
	})
	all(r, bookTask, func(_ int, v handover.TaskProcess) { s.Processes = append(s.Processes, v) })
	all(r, bookSpans, func(_ int, v []handover.Span) { s.Managed.Spans = append(s.Managed.Spans, v...) })
}

func (r *reader) account() {
	x := &r.state.Account
	all(r, bookGPU, func(_ int, v handover.GPU) { x.GPUs = append(x.GPUs, v) })
	all(r, bookCharge, func(_ int, v handover.Charge) {
		v.Handles, v.References, v.Windows, v.Fabrics = 0, 0, 0, 0
		x.Charges = append(x.Charges, v)
	})
	all(r, bookWindow, func(_ int, v handover.Window) {
		r.ref(bookCharge, &v.Charge)
		x.Windows = append(x.Windows, v)
	})
	all(r, bookRetained, func(_ int, v handover.Retained) {
		r.ref(bookCharge, &v.Context)
		if r.missing(bookObject)(v.Channel) {
			v.Channel = 0
		}
		r.ref(bookObject, &v.Channel)
		x.Retained = append(x.Retained, v)
	})
	all(r, bookClient, func(_ int, v handover.Client) {
		r.ref(bookFile, &v.File)
		x.Clients = append(x.Clients, v)
	})
	owned := map[int]bool{}
	all(r, bookObject, func(_ int, v handover.Object) {
		r.ref(bookClient, &v.Client)
		r.ref(bookCharge, &v.Charge, &v.SecondCharge)
		r.ref(bookRetained, &v.Retained)
		v.Notifies = slices.DeleteFunc(v.Notifies, r.missing(bookObject))
		r.refs(bookObject, v.Notifies)
		r.refs(bookWindow, v.Windows)
		r.refs(bookWindow, v.KeptWindows)
		for _, w := range slices.Concat(v.Windows, v.KeptWindows) {
			owned[w] = true
		}
		x.Objects = append(x.Objects, v)
	})
	for i := range x.Windows {
		if !owned[i+1] {
			x.Loose = append(x.Loose, i+1)
		}
	}
	all(r, bookDMA, func(_ int, v handover.DMA) {
		r.ref(bookObject, &v.Mapper, &v.Memory)
		x.DMA = append(x.DMA, v)
	})
}

// files are in the order in which a guard searches them.
func (r *reader) files() (rooting []int) {
	type ordered struct {
		handover.File
		order uint64
		place int
	}
	var list []ordered
	all(r, bookFile, func(id int, v bookedFile) {
		for i := range v.Exports {
			r.ref(bookCharge, &v.Exports[i].Charge)
		}
		for i := range v.Channels {
			r.ref(bookRetained, &v.Channels[i].Kept)
		}
		if v.Pending > 0 {
			rooting = append(rooting, v.Pending)
		}
		list = append(list, ordered{v.File, v.Order, r.places[bookFile][id]})
	})
	at := func(id int) *handover.File {
		r.ref(bookFile, &id)
		if id < 1 || id > len(list) {
			return &handover.File{}
		}
		return &list[id-1].File
	}
	all(r, bookMap, func(_ int, v bookedMap) {
		r.ref(bookCharge, &v.Charge, &v.Tables)
		f := at(v.File)
		f.Maps = append(f.Maps, v.UVMMap)
	})
	all(r, bookRange, func(_ int, v bookedRange) {
		r.refs(bookCharge, v.Tables)
		f := at(v.File)
		f.Ranges = append(f.Ranges, v.UVMRange)
	})
	slices.SortStableFunc(list, func(a, b ordered) int { return cmp.Compare(a.order, b.order) })
	moved := map[int]int{}
	for i, f := range list {
		moved[f.place] = i + 1
		slices.SortFunc(f.Maps, func(a, b handover.UVMMap) int {
			return cmp.Or(slices.Compare(a.GPU[:], b.GPU[:]), cmp.Compare(a.Base, b.Base))
		})
		r.state.Files = append(r.state.Files, f.File)
	}
	for i := range r.state.Account.Clients {
		c := &r.state.Account.Clients[i]
		c.File = moved[c.File]
	}
	return rooting
}

// newHandles is how many handles of its own a guard may have made up for calls that are under way.
const newHandles = 4 * keeper.MaxFlights

// recount makes the sums and numbers of references that the books do not have, of what there is.
func (r *restorer) recount() {
	a := r.guard.account
	for i := range a.gpus {
		g := &a.gpus[i]
		*g = gpuAccount{limit: g.limit, native: g.native, spill: g.spill, show: g.show}
	}
	a.hostUsed, a.zombies, a.windows = 0, 0, len(r.windows)
	a.runlists = map[runlist]int{}
	for _, o := range r.objects {
		for ch := range o.charges {
			ch.handles++
		}
		o.countFabric(1)
		a.countObject(o, 1)
		if o.kind == rm.ClassChannel {
			a.countChannel(o.runlist, 1)
		}
	}
	r.recountRetained()
	for _, x := range r.retained {
		refer(x.context)
		if x.channel == nil {
			a.countKept(x.countsOn, 1)
			a.countChannel(x.runlist, 1)
		}
	}
	for _, w := range r.windows {
		a.gpus[w.gpu].windows += w.size
		if refer(w.charge); w.charge != nil {
			w.charge.windows++
		}
	}
	for _, f := range r.files {
		r.recountFile(f)
	}
	r.sum()
}

// recountRetained counts by which files channels are kept. One that is kept by none was about to be registered, or has just been let go of.
func (r *restorer) recountRetained() {
	for _, x := range r.retained {
		x.calls = 0
	}
	for _, f := range r.files {
		for _, ch := range f.channels {
			ch.kept.calls++
		}
	}
	r.retained = slices.DeleteFunc(r.retained, func(x *retained) bool {
		if x.calls == 0 && x.channel != nil {
			x.channel.retained = nil
		}
		return x.calls == 0
	})
}

func refer(charges ...*charge) {
	for _, ch := range charges {
		if ch != nil {
			ch.references++
		}
	}
}

func (r *restorer) recountFile(f *file) {
	g := r.guard
	f.clients = 0
	for _, c := range r.clients {
		if c.file == f {
			f.clients++
		}
	}
	for _, e := range f.exports {
		if refer(e.charge); e.there {
			g.exportedObjects.Add(1)
		}
	}
	for _, m := range slices.Concat(slices.Collect(maps.Values(f.maps))...) {
		refer(m.charge, m.tables)
		g.uvmMaps.Add(1)
	}
	for _, x := range f.ranges {
		refer(x.tables...)
		g.uvmHost.used += x.host
	}
	g.uvmHost.used += quota.Bytes(len(f.groups)) * groupHost
}

// sum adds up what the charges come to.
func (r *restorer) sum() {
	g, a := r.guard, r.guard.account
	g.uvmHost.taken = (g.uvmHost.used + hostPiece - 1) / hostPiece * hostPiece
	a.hostUsed = g.uvmHost.taken
	for _, ch := range r.charges {
		if ch.zombie() {
			a.zombies++
		}
		switch {
		case ch.handles+ch.references == 0: // it was about to be given back
		case ch.host:
			a.hostUsed += ch.size
		default:
			a.gpus[ch.gpu].charge(ch.size, ch.spilled)
			a.gpus[ch.gpu].flexible += ch.flexible
		}
	}
	for _, m := range r.state.Account.DMA {
		a.gpus[m.GPU].addUsed(quota.Bytes(m.Tables))
	}
	for _, list := range g.managed.procs {
		a.addManaged(totalSize(list))
	}
	r.charges = slices.DeleteFunc(r.charges, func(ch *charge) bool { return ch.handles+ch.references == 0 })
}

// freeUnknownHandles frees what the guard that was killed had in its own RM client, and nobody knows: of calls that were under way, and
// pages of channels.
func (g *Guard) freeUnknownHandles(f *Fallen) {
	if f.Process.RM == nil {
		return
	}
	own, last := g.oldClients[0], f.Memory.Handle().Load()
	known := map[uint32]bool{own.Handle(): true}
	for i, device := range f.Process.RM.Devices {
		known[device], known[f.Process.RM.Subdevices[i]] = true, true
	}
	g.account.eachWindow(func(w *window) { known[w.handle] = true })
	for _, h := range f.Held {
		_, _ = own.Free(h)
	}
	for h := max(rmclient.FirstHandle, last-min(last, newHandles)); h <= last; h++ {
		if !known[h] {
			_, _ = own.Free(h)
		}
	}
}

// endOldClients ends RM clients of guards that were killed whose windows are over.
func (g *Guard) endOldClients() {
	g.account.mu.Lock()
	none := len(g.oldClients) == 0
	g.account.mu.Unlock()
	if none { // as mostly, and this is asked at each free
		return
	}
	used := map[*rmclient.Client]bool{}
	g.account.eachWindow(func(w *window) { used[w.own] = true })
	var ends []*rmclient.Client
	g.account.mu.Lock()
	g.oldClients = slices.DeleteFunc(g.oldClients, func(c *rmclient.Client) bool {
		if !used[c] {
			ends = append(ends, c)
		}
		return !used[c]
	})
	g.account.mu.Unlock()
	for _, c := range ends {
		s := c.State()
		g.books.put(bookRM, uint64(s.Handle), nil)
		if g.driver.CloseFile(s.File); s.FD > 0 {
			g.books.close(s.FD)
		}
	}
}

func (a *account) eachWindow(f func(*window)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.clients {
		for _, o := range c.objects {
			for _, w := range slices.Concat(o.windows, o.keptWindows) {
				f(w)
			}
		}
	}
	for _, w := range a.loose {
		f(w)
	}
}
