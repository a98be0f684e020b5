// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// TestLogOnce: a container that has a thousand different controls denied does not keep other lines out, nor make the guard remember
// all of them.
func TestLogOnce(t *testing.T) {
	var out bytes.Buffer
	g := &Guard{log: slog.New(slog.NewTextHandler(&out, nil)), logged: map[string]map[string]bool{}}
	for i := range 5000 {
		for range 2 {
			g.logOnce(fmt.Sprint("control", i), "denied a control", "control", i)
		}
	}
	if n := len(g.logged["denied a control"]); n != maxLogged {
		t.Errorf("%d keys are remembered, want %d", n, maxLogged)
	}
	if strings.Count(out.String(), "control=7\n") != 1 {
		t.Error("the eighth control is not told once")
	}
	g.logOnce("await", "memory is still held")
	g.logOnce("await", "memory is still held")
	if strings.Count(out.String(), "still held") != 1 {
		t.Errorf("another line was told %d times", strings.Count(out.String(), "still held"))
	}
}
