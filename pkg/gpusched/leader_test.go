// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"bufio"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const leaderEnv = "CGPU_TEST_LEADER" // the run dir

// leaderMain is an arbiter that, when it is told to, says that it leads, writes a row that holds for ever, as of a GPU at rest, and waits.
func leaderMain(runDir string) {
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		os.Exit(1)
	}
	p, err := peerpage.Open(runDir, "GPU-0")
	if err == nil {
		err = p.Lead()
	}
	if err != nil {
		os.Exit(1)
	}
	for _, g := range p.Guests(nil) {
		p.Put(g, &sched.Verdict{Row: sched.Row{Slice: 7 * time.Millisecond}, At: Monotonic(), Until: 1<<63 - 1, Adopted: g.Adopted}, true)
	}
	_, _ = os.Stdout.WriteString("leads\n")
	select {}
}

// readyLeader starts such an arbiter. It leads when lead is called, which takes no process's start, so that it can be the successor of
// another.
func readyLeader(t *testing.T, runDir string) (cmd *exec.Cmd, lead func()) {
	t.Helper()
	cmd = exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), leaderEnv+"="+runDir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, func() {
		t.Helper()
		if _, err := in.Write([]byte{'\n'}); err != nil {
			t.Fatal(err)
		}
		if s, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			t.Fatal(s, err)
		}
	}
}

// TestLeaderEnds: a row of a GPU at rest does not outlive who wrote it, or his successor; then the guard has another started, whether it
// has work or not. Who decides is not looked for while there is one.
func TestLeaderEnds(t *testing.T) {
	for _, reaped := range []bool{true, false} {
		c := newFakeContainer(t, 1)
		c.set(func(p *sched.Plan) {
			p.Cap, p.Slot = 300, sched.Slot{On: 30 * time.Millisecond, Cycle: 100 * time.Millisecond}
		})
		var asked atomic.Int32
		c.StartArbiter = func(string, string, []byte) error { asked.Add(1); return nil }
		x := c.gpu()
		end := func(cmd *exec.Cmd) {
			_ = cmd.Process.Kill()
			if reaped {
				_ = cmd.Wait()
			}
		}
		capped := func() bool {
			x.mu.Lock()
			defer x.mu.Unlock()
			_, until := x.local.Off(c.Now(), true)
			return until > 0
		}
		ruled := func() bool { return c.Status(0).Ruled }
		c.Begin()
		c.Made(0)
		eventually(t, "it asks for one", func() bool { return asked.Load() == 1 })
		first, lead := readyLeader(t, c.Config.RunDir)
		lead()
		second, succeed := readyLeader(t, c.Config.RunDir)
		eventually(t, "the first decides", func() bool { return ruled() && !capped() })
		end(first)
		succeed()
		time.Sleep(successorTime + successorTime/2)
		if !ruled() || asked.Load() != 1 {
			t.Errorf("the second decides: ruled %v, %d were asked for", ruled(), asked.Load())
		}
		x.mu.Lock()
		x.ask = 0 // ten seconds later
		x.mu.Unlock()
		end(second)
		eventually(t, "nobody decides", func() bool { return !ruled() && capped() && asked.Load() == 2 })
		_, lead = readyLeader(t, c.Config.RunDir)
		lead()
		eventually(t, "the third decides", func() bool { return ruled() && !capped() })
	}
}
