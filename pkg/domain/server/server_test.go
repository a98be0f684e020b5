// SPDX-License-Identifier: Apache-2.0

package server

import (
	"os"
	"strings"
	"testing"
	"time"
)

// asHung has this program stand for cgpu domain-run, which hangs before it has reserved.
const asHung = "CGPU_TEST_HUNG"

func TestMain(m *testing.M) {
	if os.Getenv(asHung) != "" {
		time.Sleep(time.Minute)
	}
	os.Exit(m.Run())
}

// TestStartAbandons: a server that has reserved nothing in time is not left behind.
func TestStartAbandons(t *testing.T) {
	t.Setenv(asHung, "1")
	d := Domain{t.TempDir(), "GPU-1", "a"}
	p, err := d.start()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.abandon(p); err != nil {
		t.Fatal(err)
	}
	if ended, err := p.ended(); ended {
		t.Logf("it has ended already: %v", err)
		return
	}
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		t.Error("it lives")
	}
}

// TestStartTimesOut says so.
func TestStartTimesOut(t *testing.T) {
	t.Setenv(asHung, "1")
	err := Domain{t.TempDir(), "GPU-1", "a"}.Start(100 * time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "does not answer after 100ms") {
		t.Error(err)
	}
}
