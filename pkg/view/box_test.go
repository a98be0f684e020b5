// SPDX-License-Identifier: Apache-2.0

package view

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal/terminaltest"
)

func TestBox(t *testing.T) {
	v := nodetest.Busy(t)
	for name, columns := range map[string]int{"smi-box.txt": 120, "smi-box-narrow.txt": 90, "smi-box-60.txt": 60} {
		text, ok := boxed(v, columns, columns > 100, columns < 80)
		if !ok {
			t.Errorf("%d columns: does not fit", columns)
		}
		golden.Compare(t, name, []byte(text))
	}
	// Every table is as wide as the others and fits, or there is none.
	drawn := 0
	for columns := range 280 {
		text, ok := boxed(v, columns/2, columns%4 == 0, columns%2 == 1)
		if !ok {
			continue
		}
		drawn++
		widths := map[int]bool{}
		for line := range strings.Lines(text) {
			if line = strings.TrimSuffix(line, "\n"); line != "" {
				widths[utf8.RuneCountInString(line)] = true
			}
		}
		for w := range widths {
			if len(widths) != 1 || w > columns/2 {
				t.Fatalf("%d columns: widths %v\n%s", columns, widths, text)
			}
		}
	}
	if _, ok := boxed(v, 80, false, false); ok || drawn < 60 {
		t.Errorf("drawn %d times; with 80 columns %v", drawn, ok)
	}
	v.GPUs[0].VGPUs = v.GPUs[0].VGPUs[:2] // an ordinary node fits
	if text, ok := boxed(v, 80, false, false); !ok {
		t.Errorf("not in 80 columns:\n%s", text)
	}
	empty, ok := boxed(snapshot.Arrange(nodetest.Table(t), nil, nil, nil), 80, true, false)
	if !ok {
		t.Error("an empty node does not fit in 80 columns")
	}
	golden.Compare(t, "smi-box-empty.txt", []byte(empty))
}

// Lines are for terminals that are wide enough; what is piped has columns that do not change.
func TestTableFor(t *testing.T) {
	v := nodetest.Busy(t)
	_, terminal := terminaltest.Open(t)
	for columns, lines := range map[uint16]bool{120: true, 60: true, 40: false, 0: true} {
		if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := TableFor(terminal)(&b, v); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(b.String(), "+--") != lines {
			t.Errorf("%d columns:\n%s", columns, b.String())
		}
	}
	var plain, piped bytes.Buffer
	if err := PrintTable(&plain, v); err != nil {
		t.Fatal(err)
	}
	if err := TableFor(&piped)(&piped, v); err != nil || piped.String() != plain.String() {
		t.Errorf("%v: piped\n%s", err, piped.String())
	}
}
