package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
)

// TestStop: a guard that is not needed after all leaves nothing on the node, but for the log of one that has not answered.
func TestStop(t *testing.T) {
	for name, silent := range map[string]bool{"refused": false, "silent": true} {
		dir := t.TempDir()
		c := guardcfg.Config{Socket: filepath.Join(dir, "a.sock"), Control: filepath.Join(dir, "a.ctl"), Log: filepath.Join(dir, "a.log")}
		g, err := start(func(files []int) (int, error) {
			return spawn("/bin/sh", []string{"sh", "-c", "cat; echo ok >&3; exec sleep 60"}, nil, files)
		})
		if err != nil {
			t.Fatal(err)
		}
		if !silent {
			if err := g.Tell(c); err != nil {
				t.Fatal(err)
			}
			if err := g.Wait(time.Minute); err != nil {
				t.Fatal(err)
			}
		} else {
			g.config = c // it is not told, and so says nothing
			if err := g.Wait(time.Millisecond); err == nil || !strings.Contains(err.Error(), "see "+c.Log) {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, path := range []string{c.Socket, c.Control, c.Log} {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		g.Stop()
		if err := unix.Kill(g.PID, 0); err == nil {
			t.Errorf("%s: process %d lives", name, g.PID)
		}
		left, _ := filepath.Glob(filepath.Join(dir, "*"))
		if silent != (len(left) == 1 && left[0] == c.Log) || !silent && len(left) > 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
}
