// SPDX-License-Identifier: Apache-2.0

// Package top is cgpu top: GPUs and containers on a whole terminal, drawn anew with each look and each key.
package top

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/opencgpu/cgpu/pkg/history"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/view"
)

// Look is what a terminal can show.
type Look struct {
	color bool
	utf8  bool // blocks for sparklines
}

func LookOf(env func(string) string) Look {
	locale := strings.ToLower(cmp.Or(env("LC_ALL"), env("LC_CTYPE"), env("LANG")))
	return Look{color: env("NO_COLOR") == "", utf8: strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")}
}

// Top is what cgpu top knows and how it shows it.
type Top struct {
	Look
	every time.Duration
	look  func() (snapshot.View, error)

	view snapshot.View
	past *history.History
	at   time.Time
	err  error // of the last look; the view is that of one before

	sort, page      int // place in sorts; rows of containers on the screen
	reverse         bool
	find            string
	typing          bool // find is being typed
	paused, help    bool
	chosen          key
	first, rowCount int // first row on the screen
}

// key finds a row again.
type key struct{ gpu, nonce string }

// row is a container on a GPU.
type row struct {
	gpu snapshot.GPU
	x   snapshot.VGPU
	history.Line
}

func (r row) key() key { return key{r.gpu.UUID, r.x.Nonce} }

// pastShown is how far back sparklines go, if they are long enough.
const pastShown = 3 * time.Minute

func New(every time.Duration, how Look, look func() (snapshot.View, error)) *Top {
	step := max(every, 2*time.Second)
	return &Top{Look: how, every: every, look: look, past: history.New(step, max(int(pastShown/step), 8))}
}

func (t *Top) add(v snapshot.View, err error, at time.Time) {
	t.at = at
	if t.err = err; err == nil {
		t.view = v
		t.past.Add(at, v)
	}
}

// Once prints a frame of two looks: one tells of no time.
func (t *Top) Once(ctx context.Context, w io.Writer, columns int) error {
	for i := range 2 {
		v, err := t.look()
		if err != nil {
			return err
		}
		t.add(v, nil, time.Now())
		if i == 0 {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(t.every):
			}
		}
	}
	if columns == 0 {
		columns = view.TableWidth
	}
	_, err := io.WriteString(w, plainLines(t.draw(columns, 0)))
	return err
}

// looked is what a look found. Who looks must not end the program, whose terminal would stay as it is.
type looked struct {
	view  snapshot.View
	err   error
	panic any
}

func (t *Top) lookOnce(found chan<- looked) {
	var l looked
	defer func() {
		if p := recover(); p != nil {
			l.panic = fmt.Sprintf("%v\n%s", p, debug.Stack())
		}
		found <- l
	}()
	l.view, l.err = t.look()
}

// Run shows it until a key or ctx ends it.
func (t *Top) Run(ctx context.Context, s *screen) error {
	v, err := t.look()
	if err != nil {
		return err
	}
	t.add(v, nil, time.Now())
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	resized, stopped := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	signal.Notify(stopped, syscall.SIGTSTP)
	defer signal.Stop(resized)
	defer signal.Stop(stopped)
	typed, found := s.input(), make(chan looked, 1)
	tick := time.NewTicker(t.every)
	defer tick.Stop()
	looking := false
	for {
		rows, columns := s.size()
		if err := s.write(paint(t.draw(columns, rows), t.color)); err != nil {
			return nil // the terminal has gone
		}
		select {
		case <-ctx.Done():
			return nil
		case <-resized:
		case <-stopped:
			s.suspend()
		case text, ok := <-typed:
			if !ok {
				return nil
			}
			for _, k := range keysOf(text) {
				switch {
				case k == keySuspend:
					s.suspend()
				case t.press(k):
					return nil
				}
			}
		case <-tick.C:
			if !looking && !t.paused {
				looking = true
				go t.lookOnce(found)
			}
		case l := <-found:
			if looking = false; l.panic != nil {
				panic(l.panic)
			}
			t.add(l.view, l.err, time.Now())
		}
	}
}

// sorts are the orders that there are, by key.
var sorts = []struct {
	key     rune
	name    string
	compare func(a, b row) int
}{
	{'g', "GPU", func(a, b row) int { return cmp.Compare(a.gpu.Index, b.gpu.Index) }},
	{'n', "name", func(a, b row) int { return strings.Compare(called(a.x), called(b.x)) }},
	{'m', "memory", func(a, b row) int { return cmp.Compare(b.x.Used, a.x.Used) }},
	{'l', "limit", func(a, b row) int { return cmp.Compare(b.x.Limit, a.x.Limit) }},
	{'u', "GPU%", func(a, b row) int { return cmp.Compare(gotNow(b.x, b.Line), gotNow(a.x, a.Line)) }},
	{'d', "DUE%", func(a, b row) int { return cmp.Compare(b.Now.Entitled, a.Now.Entitled) }},
	{'w', "weight", func(a, b row) int { return cmp.Compare(b.x.Weight, a.x.Weight) }},
	{'s', "state", func(a, b row) int { return strings.Compare(a.x.ShownState(), b.x.ShownState()) }},
}

// gotNow is what a container gets: between the last two looks, or, after the first, in the second that its guard knows of.
func gotNow(x snapshot.VGPU, l history.Line) sched.Permille {
	if l.Now.Got == history.Unknown && x.Answered && x.Compute != nil && x.Compute.Exact {
		return x.Compute.Utilization
	}
	return l.Now.Got
}

// rows are the containers to show.
func (t *Top) rows() (rows []row) {
	find := strings.ToLower(t.find)
	for _, g := range t.view.GPUs {
		for _, x := range g.VGPUs {
			if text := strings.ToLower(strings.Join([]string{x.Name, x.ID, x.Nonce, x.ShownState()}, "\n")); strings.Contains(text, find) {
				rows = append(rows, row{g, x, t.past.Of(g.UUID, x.Nonce)})
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int {
		if t.reverse {
			a, b = b, a
		}
		return sorts[t.sort].compare(a, b)
	})
	return rows
}

// Keys that are no character.
const (
	keyUp rune = -1 - iota
	keyDown
	keyLeft
	keyRight
	keyPageUp
	keyPageDown
	keyHome
	keyEnd
	keyEscape
	keyEnter
	keyErase
	keyInterrupt
	keySuspend
	keyNone
)

// press does what a key says. True: it ends the program.
func (t *Top) press(k rune) bool {
	switch {
	case k == keyInterrupt:
		return true
	case t.typing:
		t.edit(k)
	case t.help:
		t.help = false
		return k == 'q'
	default:
		return t.command(k)
	}
	return false
}

// maxFind bounds what is looked for.
const maxFind = 64

// edit changes what is looked for.
func (t *Top) edit(k rune) {
	switch {
	case k == keyEnter:
		t.typing = false
	case k == keyEscape:
		t.typing, t.find = false, ""
	case k == keyErase:
		if r := []rune(t.find); len(r) > 0 {
			t.find = string(r[:len(r)-1])
		}
	case k > 0 && unicode.IsPrint(k) && len(t.find) < maxFind:
		t.find += string(k)
	}
}

func (t *Top) command(k rune) (quit bool) {
	n := len(sorts)
	switch k {
	case 'q', 'Q':
		return true
	case 'h', '?':
		t.help = true
	case 'p', ' ':
		t.paused = !t.paused
	case '/':
		t.typing, t.find = true, ""
	case keyEscape:
		t.find, t.chosen = "", key{}
	case 'r':
		t.reverse = !t.reverse
	case keyLeft:
		t.sort = (t.sort + n - 1) % n
	case keyRight:
		t.sort = (t.sort + 1) % n
	case keyUp, 'k':
		t.choose(-1)
	case keyDown, 'j':
		t.choose(1)
	case keyPageUp:
		t.choose(-max(t.page, 1))
	case keyPageDown:
		t.choose(max(t.page, 1))
	case keyHome:
		t.choose(-t.rowCount)
	case keyEnd:
		t.choose(t.rowCount)
	default:
		for i, s := range sorts {
			if s.key == k {
				t.sort = i
			}
		}
	}
	return false
}

// choose goes so many rows down from the one that is chosen. Where there is none it begins with the first.
func (t *Top) choose(by int) {
	rows := t.rows()
	if len(rows) == 0 {
		return
	}
	i := slices.IndexFunc(rows, func(r row) bool { return r.key() == t.chosen })
	if i < 0 && by == 1 {
		by = 0
	}
	t.chosen = rows[min(max(max(i, 0)+by, 0), len(rows)-1)].key()
}
