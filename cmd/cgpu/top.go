package main

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

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/history"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal/tty"
	"github.com/opencgpu/cgpu/pkg/view"
)

func topCommand() *cli.Command {
	return &cli.Command{
		Name:  "top",
		Usage: "watch GPUs and containers, full screen",
		Description: "GPU% is the part of the GPU's time that a container got, DUE% what its share of the GPU's busy time would have been, while it\n" +
			"had work. HISTORY is what it got in the last three minutes, as far as cgpu top has been looking and there is room. Memory is in GiB,\n" +
			"as cgpu smi counts it.\n\n" +
			"Keys: q quits, arrows choose a row and the column to sort by, r turns the order around, / finds by name, ID or state, p pauses,\n" +
			"and h shows all keys. Where output or input is no terminal, and with --once, it prints what it sees in one interval, and ends.\n\n" +
			filterHelp + "\n\n" +
			"Examples:\n   sudo cgpu top\n   sudo cgpu top --gpu 0 --interval 2\n   sudo cgpu top --once",
		Flags: append(filterFlags(),
			&cli.Float64Flag{Name: "interval", Usage: "look every `SECONDS`, 0.1 to 3600", Value: 1},
			&cli.BoolFlag{Name: "once", Usage: "print what is seen in one interval, and end"},
		),
		Before: noArguments,
		Action: func(c *cli.Context) error {
			every, err := everySeconds(c.Float64("interval"))
			if err != nil {
				return usageError{fmt.Errorf("top: --interval %v: %w", c.Float64("interval"), err)}
			}
			sel, err := selectionOf(c)
			if err != nil {
				return usageError{fmt.Errorf("top: %w", err)}
			}
			t := newTop(every, lookOf(os.Getenv), func() (snapshot.View, error) {
				v, err := node.View(device.RunDir())
				if err != nil {
					return v, err
				}
				return sel.Apply(v)
			})
			// The signals that ask a program to end; the terminal must be as it was.
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
			defer stop()
			out, _ := c.App.Writer.(*os.File)
			if screen := openScreen(os.Stdin, out); screen != nil && !c.Bool("once") && os.Getenv("TERM") != "dumb" {
				err = t.run(ctx, screen)
			} else {
				_, columns, _ := tty.Size(out)
				err = t.once(ctx, c.App.Writer, columns)
			}
			if err != nil {
				return fmt.Errorf("top: %w", err)
			}
			return nil
		},
	}
}

// topLook is what a terminal can show.
type topLook struct {
	color bool
	utf8  bool // blocks for sparklines
}

func lookOf(env func(string) string) topLook {
	locale := strings.ToLower(cmp.Or(env("LC_ALL"), env("LC_CTYPE"), env("LANG")))
	return topLook{color: env("NO_COLOR") == "", utf8: strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")}
}

// top is what cgpu top knows and how it shows it.
type top struct {
	topLook
	every time.Duration
	look  func() (snapshot.View, error)

	view snapshot.View
	past *history.History
	at   time.Time
	err  error // of the last look; the view is that of one before

	sort, page      int // place in topSorts; rows of containers on the screen
	reverse         bool
	find            string
	typing          bool // find is being typed
	paused, help    bool
	chosen          topKey
	first, rowCount int // first row on the screen
}

// topKey finds a row again.
type topKey struct{ gpu, nonce string }

// topRow is a container on a GPU.
type topRow struct {
	gpu snapshot.GPU
	x   snapshot.VGPU
	history.Line
}

func (r topRow) key() topKey { return topKey{r.gpu.UUID, r.x.Nonce} }

// pastOfTop is how far back sparklines go, if they are long enough.
const pastOfTop = 3 * time.Minute

func newTop(every time.Duration, how topLook, look func() (snapshot.View, error)) *top {
	step := max(every, 2*time.Second)
	return &top{topLook: how, every: every, look: look, past: history.New(step, max(int(pastOfTop/step), 8))}
}

func (t *top) add(v snapshot.View, err error, at time.Time) {
	t.at = at
	if t.err = err; err == nil {
		t.view = v
		t.past.Add(at, v)
	}
}

// once prints a frame of two looks: one tells of no time.
func (t *top) once(ctx context.Context, w io.Writer, columns int) error {
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

func (t *top) lookOnce(found chan<- looked) {
	var l looked
	defer func() {
		if p := recover(); p != nil {
			l.panic = fmt.Sprintf("%v\n%s", p, debug.Stack())
		}
		found <- l
	}()
	l.view, l.err = t.look()
}

// run shows it until a key or ctx ends it.
func (t *top) run(ctx context.Context, s *screen) error {
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

// topSorts are the orders that there are, by key.
var topSorts = []struct {
	key     rune
	name    string
	compare func(a, b topRow) int
}{
	{'g', "GPU", func(a, b topRow) int { return cmp.Compare(a.gpu.Index, b.gpu.Index) }},
	{'n', "name", func(a, b topRow) int { return strings.Compare(calledTop(a.x), calledTop(b.x)) }},
	{'m', "memory", func(a, b topRow) int { return cmp.Compare(b.x.Used, a.x.Used) }},
	{'l', "limit", func(a, b topRow) int { return cmp.Compare(b.x.Limit, a.x.Limit) }},
	{'u', "GPU%", func(a, b topRow) int { return cmp.Compare(gotNow(b.x, b.Line), gotNow(a.x, a.Line)) }},
	{'d', "DUE%", func(a, b topRow) int { return cmp.Compare(b.Now.Entitled, a.Now.Entitled) }},
	{'w', "weight", func(a, b topRow) int { return cmp.Compare(b.x.Weight, a.x.Weight) }},
	{'s', "state", func(a, b topRow) int { return strings.Compare(a.x.ShownState(), b.x.ShownState()) }},
}

// gotNow is what a container gets: between the last two looks, or, after the first, in the second that its guard knows of.
func gotNow(x snapshot.VGPU, l history.Line) sched.Permille {
	if l.Now.Got == history.Unknown && x.Answered && x.Compute != nil && x.Compute.Exact {
		return x.Compute.Utilization
	}
	return l.Now.Got
}

// rows are the containers to show.
func (t *top) rows() (rows []topRow) {
	find := strings.ToLower(t.find)
	for _, g := range t.view.GPUs {
		for _, x := range g.VGPUs {
			if text := strings.ToLower(strings.Join([]string{x.Name, x.ID, x.Nonce, x.ShownState()}, "\n")); strings.Contains(text, find) {
				rows = append(rows, topRow{g, x, t.past.Of(g.UUID, x.Nonce)})
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b topRow) int {
		if t.reverse {
			a, b = b, a
		}
		return topSorts[t.sort].compare(a, b)
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
func (t *top) press(k rune) bool {
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
func (t *top) edit(k rune) {
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

func (t *top) command(k rune) (quit bool) {
	n := len(topSorts)
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
		t.find, t.chosen = "", topKey{}
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
		for i, s := range topSorts {
			if s.key == k {
				t.sort = i
			}
		}
	}
	return false
}

// choose goes so many rows down from the one that is chosen. Where there is none it begins with the first.
func (t *top) choose(by int) {
	rows := t.rows()
	if len(rows) == 0 {
		return
	}
	i := slices.IndexFunc(rows, func(r topRow) bool { return r.key() == t.chosen })
	if i < 0 && by == 1 {
		by = 0
	}
	t.chosen = rows[min(max(max(i, 0)+by, 0), len(rows)-1)].key()
}
