// SPDX-License-Identifier: Apache-2.0

package schema

import (
	"encoding/json"
	"testing"
	"time"
)

// TestNumbers: a part and a time are written as people would, and a time is read back as it was.
func TestNumbers(t *testing.T) {
	for want, v := range map[string]any{"33.3": PercentOf(333), "100": PercentOf(1000), "0.1": PercentOf(1), "0": PercentOf(0)} {
		if got, err := json.Marshal(v); err != nil || string(got) != want {
			t.Errorf("%v: %s, %v, want %s", v, got, err, want)
		}
	}
	for d, want := range map[time.Duration]string{0: "0", 5 * time.Millisecond: "0.005", 1234567890: "1.23456789", 7200 * time.Second: "7200",
		time.Microsecond: "0.000001"} {
		got, err := json.Marshal(SecondsOf(d))
		var back Seconds
		if err := json.Unmarshal(got, &back); err != nil || back.Duration() != d {
			t.Errorf("%v: %s is read as %v, %v", d, got, back.Duration(), err)
		}
		if err != nil || string(got) != want {
			t.Errorf("%v: %s, %v, want %s", d, got, err, want)
		}
	}
}
