package event

import (
	"sync"
	"time"
)

// Every is how often a kind of event that a tenant can cause is written for a container. What comes in between is counted.
const Every = 10 * time.Second

// Writer writes the events of one container. It never waits for the file where a tenant's call waits for it, and never fails: an
// event is news, and no more. A nil one writes nothing.
type Writer struct {
	runDir string
	every  time.Duration

	mu     sync.Mutex
	about  Event // ID, nonce and name, which all have in common
	limits map[Kind]*limit
	closed bool
	busy   sync.WaitGroup // lines under way
}

// limit is what is known of a kind that is written now and then.
type limit struct {
	next    Event // the latest that was not written, if its Count is not 0
	waiting bool  // a line was written less than Every ago
}

// NewWriter makes the writer of a container.
func NewWriter(runDir, container, nonce string) *Writer {
	return &Writer{runDir: runDir, every: Every, about: Event{Container: container, Nonce: nonce}, limits: map[Kind]*limit{}}
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

// Begin has a first event written by a goroutine, which finds out what people call the container, for all that come later. Close
// waits for it.
func (w *Writer) Begin(e Event, name func() string) {
	if w == nil {
		return
	}
	e.Time = time.Now().UTC()
	w.busy.Go(func() {
		called := name()
		w.mu.Lock()
		w.about.Name = called
		at := e.Time
		e = w.filled(e)
		e.Time = at
		w.mu.Unlock()
		_ = Append(w.runDir, e)
	})
}

// Note has an event written soon, and not more than one of its kind every ten seconds: the latest, with a count of those that it
// stands for. It may be called with locks held.
func (w *Writer) Note(e Event) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	l := w.limits[e.Kind]
	if l == nil {
		l = &limit{}
		w.limits[e.Kind] = l
	}
	count := l.next.Count + 1
	l.next = w.filled(e)
	l.next.Count = count
	if !l.waiting {
		w.put(l)
	}
}

// put has what a limit holds written by a goroutine, and looks again when the next line may be. The caller holds mu.
func (w *Writer) put(l *limit) {
	e := l.next
	l.next, l.waiting = Event{}, true
	w.busy.Go(func() { _ = Append(w.runDir, e) })
	time.AfterFunc(w.every, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if l.waiting = false; l.next.Count > 0 && !w.closed {
			w.put(l)
		}
	})
}

// Close writes what is still counted. Notes that come later are lost.
func (w *Writer) Close() {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.closed = true
	var rest []Event
	for _, kind := range Kinds() {
		if l := w.limits[kind]; l != nil && l.next.Count > 0 {
			rest = append(rest, l.next)
			l.next = Event{}
		}
	}
	w.mu.Unlock()
	w.busy.Wait()
	for _, e := range rest {
		_ = Append(w.runDir, e)
	}
}

// filled adds what all of the container's events have in common, and the time.
func (w *Writer) filled(e Event) Event {
	e.Container, e.Nonce, e.Name, e.Time = w.about.Container, w.about.Nonce, w.about.Name, time.Now().UTC()
	return e
}
