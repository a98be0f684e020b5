// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestTryDriverHangs: a child that does not end when it is killed, as in the driver, does not hold doctor up.
func TestTryDriverHangs(t *testing.T) {
	var cmd *exec.Cmd
	h := &Host{Try: func(context.Context, string) (*exec.Cmd, error) {
		cmd = exec.Command("sleep", "20") // no context kills it
		return cmd, nil
	}}
	start := time.Now()
	got := tryDriver(h, 100*time.Millisecond)
	defer cmd.Process.Kill() //nolint:errcheck // it is a test's own child
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	if got.Status != Fail || !strings.Contains(got.Found, "process ") {
		t.Errorf("got %+v", got)
	}
}
