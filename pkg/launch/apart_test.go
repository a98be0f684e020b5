package launch

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSettle starts this program again with low limits and a low priority, where settle has to raise them. The test leaves hard
// limits alone: root of a container may not raise those.
func TestSettle(t *testing.T) {
	if os.Getenv("SETTLE") != "" {
		settle()
		for _, l := range guardLimits {
			var got syscall.Rlimit
			if err := syscall.Getrlimit(l.resource, &got); err != nil || got.Cur != min(l.limit, got.Max) || got.Cur == 64 {
				t.Errorf("limit %d: %+v, %v, want %d", l.resource, got, err, l.limit)
			}
		}
		attr, err := unix.SchedGetAttr(0, 0)
		if err != nil || attr.Policy != unix.SCHED_NORMAL || attr.Nice != 0 {
			t.Errorf("%+v, %v", attr, err)
		}
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("takes root")
	}
	cmd := exec.Command("sh", "-c", `ulimit -S -n 64; ulimit -S -f 8; ulimit -S -t 60; exec nice -n 19 "$0" -test.run '^TestSettle$'`, os.Args[0])
	cmd.Env = append(os.Environ(), "SETTLE=1")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v: %s", err, out)
	}
}
