// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/guard/journal"
)

// The books are what a guard that is killed leaves to the next one (docs/adr/0015-keeper.md): each client, object, charge, file and so on
// is an entry of a journal. Whoever changes one notes it, with the lock held that the change needs. What has been noted is committed before
// the call is answered that brought it about, or when the guard has done what it does by itself. Sums and numbers of references are not in
// the books, but made anew of what there is (recount): so they are right, whatever the moment is.

// Kinds of entries.
const (
	bookClient uint8 = iota + 1
	bookObject
	bookCharge
	bookWindow
	bookRetained
	bookDMA // up to here: in the account
	bookFile
	bookConfig
	bookProcess
	bookRM
	bookGPU
	bookMap
	bookRange
	bookTask
	bookSpans
	bookHeld // ID: a handle of the guard's own
)

// entry is an entity's place in the books. The books' mutex guards it.
type entry struct {
	id    uint64 // 0: it has none
	noted bool
	ended bool
}

func (e *entry) booked() *entry { return e }

// entity is what has an entry. image is called with none of the books' locks held, and takes those of the entity, but for the account's,
// which is held for what is in the account.
type entity interface {
	booked() *entry
	bookKind() uint8
	image(b *books) any
}

// books are nil where there is no keeper.
type books struct {
	journal *journal.Journal
	guard   *Guard
	account *account
	// commits is held over one, so that they are in the order in which the images were made.
	commits sync.Mutex
	mu      sync.Mutex
	last    uint64 // ID
	noted   []entity
	raw     []journal.Op
	waits   atomic.Bool // something is noted, or is being committed
	lost    func(error) // is told, once, that the books cannot be kept
	over    bool
	closing []int // descriptors of what was ended
}

// keepBooks has everything that changes from now on written down.
func (g *Guard) keepBooks(j *journal.Journal, lost func(error)) {
	g.own.guard = g
	g.books = &books{journal: j, guard: g, account: g.account, lost: lost}
	g.account.books, g.files.books, g.tasks.books, g.managed.books = g.books, g.books, g.books, g.books
	b := g.books
	b.put(bookConfig, 0, g.cfg)
	for i := range g.account.gpus {
		g.account.noteGPU(i)
	}
	g.noteOwnRM()
	b.note(&g.own)
	g.noteAll()
	b.commit(nil)
}

// noteAll notes what a guard has that goes on in another one's place.
func (g *Guard) noteAll() {
	b := g.books
	for _, p := range g.tasks.processes() {
		b.note(p)
	}
	for tgid, list := range g.managed.procs {
		b.noteSpans(tgid, list)
	}
	b.noteOrder(g.files.list)
	for _, f := range g.files.list {
		for _, list := range f.maps {
			for _, m := range list {
				b.note(m)
			}
		}
		for _, r := range f.ranges {
			b.note(r)
		}
	}
	for _, c := range g.account.clients {
		b.note(c)
		for _, o := range c.objects {
			b.note(o)
			for _, list := range o.dmaMaps {
				for _, m := range list {
					b.note(m)
				}
			}
		}
	}
	for _, w := range g.account.loose {
		b.note(w)
	}
	for _, x := range g.oldClients {
		b.put(bookRM, uint64(x.Handle()), handover.RMClient(x.State()))
	}
}

// noteGPU notes what the container may have of a GPU. The account is locked, or nobody else has it yet.
func (a *account) noteGPU(i int) {
	if a.books != nil {
		g := &a.gpus[i]
		a.books.put(bookGPU, uint64(i), handover.GPU{Limit: uint64(g.limit), Native: g.native, Spill: uint64(g.spill)})
	}
}

// noteOwnRM notes the guard's own RM client.
func (g *Guard) noteOwnRM() {
	if g.books == nil || g.rmClient == nil {
		return
	}
	g.books.put(bookRM, 0, handover.RMClient(g.rmClient.State()))
}

// close closes a descriptor that the books have named, when they do no more: until then its number must be no other file's.
func (b *books) close(fd int) {
	if b == nil {
		_ = unix.Close(fd)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closing = append(b.closing, fd)
	b.waits.Store(true)
}

// note has an entity's image committed. Who changes it holds the lock that its image takes.
func (b *books) note(x entity) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !x.booked().ended {
		b.noteLocked(x)
	}
}

// end has an entity's entry taken away, for good. Those that name it are noted or ended first: a commit may fall between any two notes.
func (b *books) end(x entity) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	e := x.booked()
	if e.ended = true; e.id > 0 {
		b.noteLocked(x)
	}
}

// noteOrder gives files new numbers by which they are in that order, in one commit: whoever makes one has the images of all, or of none.
func (b *books) noteOrder(list []*file) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, f := range list {
		f.order.Store(lastOrder / uint64(len(list)+1) * uint64(i+1))
		if !f.booked().ended {
			b.noteLocked(f)
		}
	}
}

func (b *books) noteLocked(x entity) {
	e := x.booked()
	if e.id == 0 {
		b.last++
		e.id = b.last
	}
	if !e.noted {
		e.noted = true
		b.noted = append(b.noted, x)
		b.waits.Store(true)
	}
}

// put has an entry that is nobody's set, or with nil taken away.
func (b *books) put(kind uint8, id uint64, v any) {
	if b == nil {
		return
	}
	op := journal.Op{Key: journal.Key{Kind: kind, ID: id}}
	if v != nil {
		op.Value = encoded(v)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.raw = append(b.raw, op)
	b.waits.Store(true)
}

// encoded is an image as text. The types are handover's, which are made for that.
func encoded(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("an entry of the books: %v", err))
	}
	return text
}

// bookRef is how an image names another entity, which has an entry from then on; 0: there is none. One that has ended stays out of the
// books: then what refers to it has ended, too, since it was noted, and the same commit takes it away.
func bookRef[T any, P interface {
	*T
	entity
}](b *books, x P) int {
	if x == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := x.booked(); e.id == 0 && !e.ended {
		b.noteLocked(x)
	}
	return int(x.booked().id)
}

// commit writes down what was noted. before is told the number of the commit, also where nothing was noted and there is none: 0.
func (b *books) commit(before func(number uint64)) {
	if b == nil {
		return
	}
	if !b.waits.Load() {
		if before != nil {
			before(0)
		}
		return
	}
	b.commits.Lock()
	defer b.commits.Unlock()
	b.mu.Lock()
	closing := b.closing
	b.closing = nil
	b.mu.Unlock()
	ops := b.images()
	switch {
	case b.over:
	case len(ops) == 0: // whoever was at it before has written this caller's, too
		if before != nil {
			before(0)
		}
	default:
		if err := b.journal.Commit(ops, before); err != nil {
			b.over = true
			b.lost(err)
		}
	}
	b.mu.Lock()
	if len(b.noted)+len(b.raw)+len(b.closing) == 0 {
		b.waits.Store(false)
	}
	b.mu.Unlock()
	for _, fd := range closing {
		_ = unix.Close(fd)
	}
}

// images takes those of all that is noted, and of what they name.
func (b *books) images() (ops []journal.Op) {
	for {
		b.mu.Lock()
		list, raw := b.noted, b.raw
		b.noted, b.raw = nil, nil
		gone := make([]bool, len(list))
		for i, x := range list {
			x.booked().noted = false
			gone[i] = x.booked().ended
		}
		b.mu.Unlock()
		ops = append(ops, raw...)
		if len(list)+len(raw) == 0 {
			return ops
		}
		for i, x := range list {
			if !inAccount(x) {
				ops = append(ops, b.op(x, gone[i]))
			}
		}
		b.account.mu.Lock()
		for i, x := range list {
			if inAccount(x) {
				ops = append(ops, b.op(x, gone[i]))
			}
		}
		b.account.mu.Unlock()
	}
}

func (b *books) op(x entity, gone bool) journal.Op {
	op := journal.Op{Key: journal.Key{Kind: x.bookKind(), ID: x.booked().id}}
	if !gone {
		op.Value = encoded(x.image(b))
	}
	return op
}

func inAccount(x entity) bool { return x.bookKind() <= bookDMA }

func (c *client) image(b *books) any {
	v := c.plainState()
	v.File = bookRef(b, c.file)
	return v
}

func (o *object) image(b *books) any {
	v := o.plainState()
	v.Client, v.Retained = bookRef(b, o.owner), bookRef(b, o.retained)
	v.Charge, v.SecondCharge = bookRef(b, o.charge), bookRef(b, o.secondCharge)
	for channel := range o.notifies {
		v.Notifies = append(v.Notifies, bookRef(b, channel))
	}
	for _, w := range o.windows {
		v.Windows = append(v.Windows, bookRef(b, w))
	}
	for _, w := range o.keptWindows {
		v.KeptWindows = append(v.KeptWindows, bookRef(b, w))
	}
	return v
}

func (ch *charge) image(*books) any { return ch.state() }

func (w *window) image(b *books) any {
	v := w.plainState()
	v.Charge = bookRef(b, w.charge)
	v.Own = b.guard.oldOwner(w)
	return v
}

func (r *retained) image(b *books) any {
	v := r.plainState()
	v.Context, v.Channel = bookRef(b, r.context), bookRef(b, r.channel)
	return v
}

func (m *dmaMap) image(b *books) any {
	v := m.plainState()
	v.Mapper, v.Memory = bookRef(b, m.mapper), bookRef(b, m.memory)
	return v
}

// bookedFile is a file without what is mapped in it.
type bookedFile struct {
	handover.File
	Order   uint64 `json:"order"`             // among the files that are followed
	Pending int    `json:"pending,omitempty"` // the process that makes an RM client on it
}

func (f *file) image(b *books) any {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := bookedFile{File: f.plainState(), Order: f.order.Load()}
	if f.pending != nil {
		v.Pending = f.pending.task.proc.tgid
	}
	for _, e := range f.exports {
		v.Exports = append(v.Exports, handover.Export{There: e.there, Charge: bookRef(b, e.charge), Fabric: e.fabric, Size: uint64(e.size)})
	}
	for name, ch := range f.channels {
		v.Channels = append(v.Channels, handover.UVMChannel{Client: name.client, Handle: name.handle, GPU: handover.UUID(ch.gpu),
			Kept: bookRef(b, ch.kept)})
	}
	return v
}

// bookedMap and bookedRange are what is mapped in a file.
type bookedMap struct {
	handover.UVMMap
	File int `json:"file"`
}

type bookedRange struct {
	handover.UVMRange
	File int `json:"file"`
}

func (m *uvmMap) image(b *books) any {
	m.on.mu.Lock() // see noteMaps
	defer m.on.mu.Unlock()
	return bookedMap{handover.UVMMap{Base: m.base, End: m.end, GPU: handover.UUID(m.gpu), Charge: bookRef(b, m.charge),
		Tables: bookRef(b, m.tables)}, bookRef(b, m.on)}
}

func (r *uvmRange) image(b *books) any {
	r.on.mu.Lock()
	defer r.on.mu.Unlock()
	v := bookedRange{r.plainState(), bookRef(b, r.on)}
	for _, t := range r.tables {
		v.Tables = append(v.Tables, bookRef(b, t))
	}
	return v
}

func (p *process) image(*books) any {
	return handover.TaskProcess{PID: p.tgid, NSPID: p.nspid, Name: p.name, PidFD: p.pidfd}
}

// ownProcess is the guard's own part.
type ownProcess struct {
	entry
	guard   *Guard
	sockets handover.Process // nothing but those, and the connection to a simulated driver
}

func (x *ownProcess) image(*books) any {
	g, p := x.guard, x.sockets
	g.mu.Lock()
	defer g.mu.Unlock()
	g.processState(&p)
	for l := range g.filters {
		p.Listeners = append(p.Listeners, l.fd)
	}
	return p
}

// bookedSpans are managed memory of a process.
func (b *books) noteSpans(tgid int, list []span) {
	if b == nil {
		return
	}
	if len(list) == 0 {
		b.put(bookSpans, uint64(tgid), nil)
		return
	}
	b.put(bookSpans, uint64(tgid), spansState(tgid, list))
}

func (*client) bookKind() uint8 { return bookClient }

func (*object) bookKind() uint8 { return bookObject }

func (*charge) bookKind() uint8 { return bookCharge }

func (*window) bookKind() uint8 { return bookWindow }

func (*retained) bookKind() uint8 { return bookRetained }

func (*dmaMap) bookKind() uint8 { return bookDMA }

func (*file) bookKind() uint8 { return bookFile }

func (*uvmMap) bookKind() uint8 { return bookMap }

func (*uvmRange) bookKind() uint8 { return bookRange }

func (*process) bookKind() uint8 { return bookTask }

func (*ownProcess) bookKind() uint8 { return bookProcess }
