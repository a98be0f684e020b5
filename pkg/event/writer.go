// SPDX-License-Identifier: Apache-2.0

package event

import (
	"slices"
	"sync"
	"time"
)

// Every is how often a kind of event that a tenant can cause is written for a container and a GPU. What comes in between is counted.
const Every = 10 * time.Second

// Writer writes the events of one container. It never waits for the file where a tenant's call waits for it, and never fails: an
// event is news, and no more. A nil one writes nothing.
type Writer struct {
	runDir string
	every  time.Duration

	mu     sync.Mutex
	about  Event // ID, nonce and name, which all have in common
	limits map[subject]*limit
	closed bool
	busy   sync.WaitGroup // lines under way
}

// subject is what has lines of its own: a GPU's news do not hide another's.
type subject struct {
	kind Kind
	gpu  string // UUID; empty for what is about no GPU
}

func subjectOf(e Event) subject {
	s := subject{kind: e.Kind}
	if e.GPU != nil {
		s.gpu = e.GPU.UUID
	}
	return s
}

// limit is what is known of a subject that is written now and then.
type limit struct {
	next    news // the latest that was not written, if its Count is not 0
	waiting bool // a line was written less than Every ago
}

// news is an event whose text is made when it is written.
type news struct {
	Event
	text func() string // nil: it has its text
}

// write appends the event to the file.
func (n news) write(runDir string) {
	if n.text != nil {
		n.Text = n.text()
	}
	_ = Append(runDir, n.Event)
}

// NewWriter makes the writer of a container.
func NewWriter(runDir, container, nonce string) *Writer {
	return &Writer{runDir: runDir, every: Every, about: Event{Container: container, Nonce: nonce}, limits: map[subject]*limit{}}
}

// Write writes an event at once. It is for what a tenant cannot cause.
func (w *Writer) Write(e Event) {
	if w == nil {
		return
	}
	w.mu.Lock()
	e = w.filled(e)
	w.mu.Unlock()
	_ = Append(w.runDir, e)
}

// Begin has a first event written by a goroutine, for which Close waits. The event's name is that of all that come later: it is what
// the ledger knows. No file is looked into for it, since a tenant may have named that (a FUSE mount that answers nothing).
func (w *Writer) Begin(e Event) {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.about.Name = e.Name
	e = w.filled(e)
	w.mu.Unlock()
	w.busy.Go(func() { _ = Append(w.runDir, e) })
}

// GoOn has the events named as those before, of a writer that another program of the container's had.
func (w *Writer) GoOn(name string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.about.Name = name
}

// Note has an event written soon, and not more than one of its kind and GPU every ten seconds: the latest, with a count of those that it
// stands for. It may be called with locks held.
func (w *Writer) Note(e Event) { w.NoteLater(e, nil) }

// NoteLater is Note of an event whose text is made only if it is written: of a million, few are. text is called by another
// goroutine, and must not need what may change meanwhile.
func (w *Writer) NoteLater(e Event, text func() string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	about := subjectOf(e)
	l := w.limits[about]
	if l == nil {
		l = &limit{}
		w.limits[about] = l
	}
	count := l.next.Count + 1
	l.next = news{w.filled(e), text}
	l.next.Count = count
	if !l.waiting {
		w.put(l)
	}
}

// put has what a limit holds written by a goroutine, and looks again when the next line may be. The caller holds mu.
func (w *Writer) put(l *limit) {
	n := l.next
	l.next, l.waiting = news{}, true
	w.busy.Go(func() { n.write(w.runDir) })
	time.AfterFunc(w.every, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if l.waiting = false; l.next.Count > 0 && !w.closed {
			w.put(l)
		}
	})
}

// closeWait bounds how long Close waits for lines under way.
const closeWait = time.Second

// Close writes what is still counted. Notes that come later are lost. Lines under way it awaits for a second: a guard that ends has
// more to do than tell.
func (w *Writer) Close() {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.closed = true
	var rest []news
	for _, l := range w.limits {
		if l.next.Count > 0 {
			rest = append(rest, l.next)
			l.next = news{}
		}
	}
	slices.SortFunc(rest, func(a, b news) int { return a.Time.Compare(b.Time) })
	w.mu.Unlock()
	w.await(closeWait)
	for _, n := range rest {
		n.write(w.runDir)
	}
}

// await waits for the lines under way, but not longer than most.
func (w *Writer) await(most time.Duration) {
	written := make(chan struct{})
	go func() {
		w.busy.Wait()
		close(written)
	}()
	select {
	case <-written:
	case <-time.After(most):
	}
}

// filled adds what all of the container's events have in common, and the time.
func (w *Writer) filled(e Event) Event {
	e.Container, e.Nonce, e.Name, e.Time = w.about.Container, w.about.Nonce, w.about.Name, time.Now().UTC()
	return e
}
