// SPDX-License-Identifier: Apache-2.0

package top

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/terminal/cells"
	"github.com/opencgpu/cgpu/pkg/terminal/terminaltest"
)

// busyTop has looked at a busy node for a minute and a half, every second.
func busyTop(t *testing.T, how Look) *Top {
	t.Helper()
	v := nodetest.Busy(t)
	p := New(time.Second, how, func() (snapshot.View, error) { return v, nil })
	at := time.Date(2026, 11, 21, 2, 0, 0, 0, time.UTC)
	for i := range 90 {
		for j := range v.GPUs[0].VGPUs {
			if c := v.GPUs[0].VGPUs[j].Compute; c != nil {
				c.GPUTime += time.Duration((i+20*j)%100) * 5 * time.Millisecond
				c.Granted += 400 * time.Millisecond
			}
		}
		p.add(v, nil, at.Add(time.Duration(i)*time.Second))
	}
	return p
}

// shown is what a terminal of that size shows.
func shown(t *testing.T, p *Top, columns, rows int) *terminaltest.Model {
	t.Helper()
	m := terminaltest.New(rows, columns)
	for r := range m.Cells { // something of before
		m.Cells[r] = []rune(strings.Repeat("~", columns))
	}
	m.Write(string(paint(p.draw(columns, rows), p.color)))
	if m.Unknown != nil {
		t.Errorf("%dx%d: wrote %s", columns, rows, strings.Join(m.Unknown, ", "))
	}
	return m
}

func TestTopGolden(t *testing.T) {
	t.Setenv("TZ", "UTC")
	p := busyTop(t, Look{color: true, utf8: true})
	for _, size := range [][2]int{{80, 24}, {150, 30}, {50, 14}, {24, 8}} {
		golden.Compare(t, fmt.Sprintf("top-%dx%d.txt", size[0], size[1]), []byte(shown(t, p, size[0], size[1]).Text()))
	}
	golden.Compare(t, "top-once.txt", []byte(plainLines(p.draw(100, 0))))
	p.utf8, p.help = false, true
	golden.Compare(t, "top-help.txt", []byte(shown(t, p, 80, 24).Text()))
	p.help = false
	golden.Compare(t, "top-ascii.txt", []byte(shown(t, p, 80, 24).Text()))
}

// TestTopHostile: nothing that a tenant chooses moves anything or reaches the terminal, at any size.
func TestTopHostile(t *testing.T) {
	evil := []string{"\x1b[2J\x1b[31mred", "a\nb\rc", strings.Repeat("模型", 64), "\u202egnp.exe", "שלום", strings.Repeat("a\u0301", 128),
		"\u009b2J",
		"\xff\xfe", "", strings.Repeat("x", 256), "👩‍👩‍👧", "\u2028"}
	v := nodetest.Busy(t)
	v.DriverVersion = evil[0]
	v.GPUs[0].Name = evil[2]
	for i, name := range evil {
		v.GPUs[1].VGPUs = append(v.GPUs[1].VGPUs, snapshot.VGPU{ID: name, Nonce: fmt.Sprint(i), Name: name, SharedID: i%2 == 0,
			State: snapshot.StateRunning, Answered: true, Used: 1 << 60})
	}
	p := New(time.Second, Look{color: true, utf8: true}, nil)
	p.add(v, nil, time.Now())
	for columns := 1; columns < 200; columns += 7 {
		for _, rows := range []int{1, 2, 5, 9, 24} {
			shown(t, p, columns, rows)
			p.press(keyDown)
		}
	}
	for _, p.find = range evil {
		p.typing = !p.typing
		shown(t, p, 80, 24)
	}
	p.add(snapshot.View{}, errors.New(strings.Join(evil, " ")), time.Now())
	shown(t, p, 80, 24)
	for line := range strings.Lines(plainLines(p.draw(100, 0))) {
		if line = strings.TrimSuffix(line, "\n"); strings.ContainsFunc(line, terminal.Acts) || cells.Width(line) > 100 {
			t.Errorf("printed %q", line)
		}
	}
	// Nor does what somebody types.
	const keys = "\x1b[OAB~5/qhpr\r\x7fx\xff<>"
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		text := make([]byte, random.IntN(6))
		for i := range text {
			text[i] = keys[random.IntN(len(keys))]
		}
		for _, k := range keysOf(string(text)) {
			p.press(k)
		}
		shown(t, p, 60, 12)
	}
}

// TestTopColor: without color nothing is told by color alone, and nothing is colored.
func TestTopColor(t *testing.T) {
	p := busyTop(t, LookOf(func(name string) string { return map[string]string{"NO_COLOR": "1", "LANG": "C"}[name] }))
	m := shown(t, p, 120, 24)
	for _, line := range m.Styles {
		for _, s := range line {
			if s != "" && s != "0" && s != "1" && s != "2" && s != "7" {
				t.Fatalf("style %s", s)
			}
		}
	}
	if strings.ContainsAny(m.Text(), "▁█") {
		t.Errorf("blocks for a terminal that has none:\n%s", m.Text())
	}
	p.color = true
	if !slices.ContainsFunc(shown(t, p, 120, 24).Styles, func(line []string) bool { return slices.Contains(line, "36") }) {
		t.Error("no color where there may be some")
	}
	if l := LookOf(func(name string) string { return map[string]string{"LC_ALL": "de_DE.UTF-8", "LANG": "C"}[name] }); !l.utf8 || !l.color {
		t.Errorf("%+v", l)
	}
}

func TestTopKeys(t *testing.T) {
	p := busyTop(t, Look{})
	type list = []string
	names := func() (all list) {
		for _, r := range p.rows() {
			all = append(all, r.x.ID[:1]+fmt.Sprint(r.gpu.Index))
		}
		return all
	}
	unsorted := names()
	for _, x := range []struct {
		typed string
		want  list
	}{
		{"m", list{"a1", "a0", "e1"}},
		{"r", nil},
		{"rl", list{"a1", "a0"}},
		{"u", list{"a0", "e0"}},
		{"w", list{"a1"}},
		{"s", list{"00", "c0"}},
		{"g", unsorted},
		{"\x1b[D", list{"00"}},
		{"\x1b[C\x1bOC", nil},
		{"g/PAUS\r", list{"e0"}},
		{"/zzz", nil},
		{"\x7f\x7f\x7ftrain", list{"a0", "a1"}},
		{"\x1b", unsorted},
		{"/a\x1b", unsorted},
	} {
		for _, k := range keysOf(x.typed) {
			if p.press(k) {
				t.Errorf("%q ends it", x.typed)
			}
		}
		if got := names(); len(got) < len(x.want) || !slices.Equal(got[:len(x.want)], x.want) {
			t.Errorf("%q: %v, want %v", x.typed, got, x.want)
		}
	}
	for _, end := range []string{"q", "\x03", "/abc\x03", "hq", "h\x03"} {
		p, ended := New(time.Second, Look{}, nil), false
		for _, k := range keysOf(end) {
			ended = p.press(k)
		}
		if !ended {
			t.Errorf("%q does not end it", end)
		}
	}
}

// TestTopScroll: the row that is chosen stays on the screen, and is the same container when the order changes.
func TestTopScroll(t *testing.T) {
	var v snapshot.View
	v.GPUs = []snapshot.GPU{{UUID: nodetest.T4}}
	for i := range 64 {
		v.GPUs[0].VGPUs = append(v.GPUs[0].VGPUs, snapshot.VGPU{ID: fmt.Sprintf("c%02d", i), Nonce: fmt.Sprint(i), Answered: true,
			Used: quota.Bytes(i)})
	}
	p := New(time.Second, Look{}, nil)
	p.add(v, nil, time.Now())
	for _, x := range []struct{ typed, want string }{
		{"", ""}, {"j", "c00"}, {"jj", "c02"}, {"\x1b[6~", "c15"}, {"\x1b[F", "c63"}, {"k", "c62"}, {"m", "c62"}, {"r", "c62"},
		{"\x1b[H", "c00"}, {"k", "c00"}, {"g\x1b[6~", "c13"}, {"\x1b", ""},
	} {
		for _, k := range keysOf(x.typed) {
			p.press(k)
		}
		m := shown(t, p, 80, 20)
		got := ""
		for i, line := range m.Styles {
			if line[0] == "7" {
				got += strings.Fields(string(m.Cells[i]))[0]
			}
		}
		if got != x.want {
			t.Errorf("%q: chose %q, want %q\n%s", x.typed, got, x.want, m.Text())
		}
	}
}
