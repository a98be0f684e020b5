//go:build integration

package integration

import (
	"testing"
	"time"
)

// TestHostile: everything cgpu-probe knows to try against its guard, while a neighbour holds memory and keeps it.
func TestHostile(t *testing.T) {
	ways := []struct {
		name string
		opts []string
	}{
		{"default", nil},
		{"unconfined", []string{"--security-opt", "seccomp=unconfined"}},
		{"unprivileged user", []string{"--user", "1000", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"}},
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			noTrace(t)
			neighbour := holding(t, container{env: sizeOf("512MiB")}, "200MiB")
			before := driverUsed(t)
			c := container{env: sizeOf("256MiB"), opts: way.opts, cmd: []string{"cgpu-probe", "hostile", "all"}}
			r := c.try(t)
			if r.Code != 0 {
				t.Error(r)
			} else {
				t.Log(r)
			}
			if got := execIn(neighbour, "cgpu-probe", "meminfo"); got.Code != 0 {
				t.Errorf("the neighbour suffers: %s", got)
			}
			eventually(t, 2*time.Second, func() string {
				if after := driverUsed(t); after != before {
					return "the driver holds more than the neighbour's memory"
				}
				return ""
			})
		})
	}
}
