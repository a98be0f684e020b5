// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestMain lets this test binary be the process that is killed.
func TestMain(m *testing.M) {
	if dir := os.Getenv("LEDGER_TEST_DIR"); dir != "" {
		rounds, _ := strconv.Atoi(os.Getenv("LEDGER_TEST_ROUNDS"))
		if err := churn(Open(dir), rounds); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// maxSpill is less than what the processes of a test ask for together.
const maxSpill = 6 * gib

// mostHolders may hold an allocation of churn at the same time.
const mostHolders = 2

// churn reserves, changes and releases rounds times (for ever when 0).
func churn(l *Ledger, rounds int) error {
	start, err := ProcStart(os.Getpid())
	if err != nil {
		return err
	}
	for i := 0; rounds == 0 || i < rounds; i++ {
		req := request(fmt.Sprintf("%d-%d", os.Getpid(), i%5), fmt.Sprintf("%d-%d", os.Getpid(), i), quota.Bytes(1+rand.IntN(8))*gib)
		req.Record.LauncherPID, req.Record.LauncherStart = os.Getpid(), start
		req.Record.VGPUs[0].Spill, req.MaxSpill = quota.Bytes(rand.IntN(5))*gib, maxSpill
		if i%2 == 0 {
			req.Record.Allocated = []Allocation{{ID: fmt.Sprint("claim/", i%3), UUID: "GPU-a", Containers: mostHolders}}
		}
		_, err := l.Reserve(req)
		var refusal *Refusal
		if err != nil && !errors.As(err, &refusal) {
			return err
		}
		if err == nil && i == 0 {
			fmt.Println("reserved") // wakes the killer
		}
		if err == nil {
			change := ChangeRequest{GPUs: req.GPUs, Card: req.Card, MaxSpill: maxSpill,
				Settings: Settings{Spill: new(quota.Bytes(rand.IntN(5)) * gib), Limit: new(quota.Bytes(1+rand.IntN(8)) * gib),
					Percent: new(rand.IntN(100))}, Paused: new(i%2 == 0)}
			if _, err := l.Change(req.Record.Nonce, change); err != nil && !errors.As(err, &refusal) {
				return err
			}
		}
		_, err = l.SetCard(req.GPUs[1], req.Card, func(c *sched.Card) error { c.MaxInst = 1 + i%sched.MaxMaxInst; return nil })
		if err != nil && !errors.As(err, &refusal) {
			return err
		}
		if rounds == 0 && i%3 != 0 {
			continue // leaves it to be replaced, or to be dropped when we are dead
		}
		if err := l.Release(req.Record.Nonce); err != nil {
			return err
		}
	}
	return nil
}

func start(t *testing.T, dir string, rounds int) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "LEDGER_TEST_DIR="+dir, "LEDGER_TEST_ROUNDS="+strconv.Itoa(rounds))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	must(t, cmd.Start())
	return cmd, &out
}

// withCard is a ledger with a card of GPU-a, which churn does not touch and so must be there for ever.
func withCard(t *testing.T) *Ledger {
	t.Helper()
	l := Open(t.TempDir())
	_, err := l.SetCard(twoGPUs[0], preempt, func(*sched.Card) error { return nil })
	must(t, err)
	return l
}

// checkSums holds the ledger to its promise.
func checkSums(t *testing.T, l *Ledger) int {
	t.Helper()
	records, cards, err := l.State()
	must(t, err)
	if cards["GPU-a"] != preempt {
		t.Fatalf("cards %v", cards)
	}
	sum, spill, part, seen := quota.Bytes(0), quota.Bytes(0), 0, map[string]bool{}
	holders := map[string]int{}
	for _, r := range records {
		if seen[r.ID] {
			t.Fatalf("%s twice", r.ID)
		}
		for _, a := range r.Allocated {
			if holders[a.ID]++; holders[a.ID] > mostHolders {
				t.Fatalf("%d hold %s", holders[a.ID], a.ID)
			}
		}
		seen[r.ID] = true
		sum += r.VGPUs[0].Limit
		spill += r.VGPUs[0].Spill
		part += r.VGPUs[0].Percent
	}
	if sum > twoGPUs[0].Memory || part > 100 {
		t.Fatalf("%s of %s and %d %% reserved", sum, twoGPUs[0].Memory, part)
	}
	if spill > maxSpill {
		t.Fatalf("%s of spill reserved, the most is %s", spill, maxSpill)
	}
	return len(records)
}

func TestKillAtAnyTime(t *testing.T) {
	kills := 200
	if testing.Short() {
		kills = 20
	}
	l := withCard(t)
	inWrite := 0
	for range kills {
		cmd, out := start(t, l.dir, 0)
		// The program takes some milliseconds to start; the rest is spread over many reservations.
		time.Sleep(4*time.Millisecond + time.Duration(rand.IntN(int(8*time.Millisecond))))
		must(t, cmd.Process.Kill())
		if err := cmd.Wait(); err == nil || cmd.ProcessState.Exited() {
			t.Fatalf("ended by itself: %s", out)
		}
		if _, err := os.Stat(l.path(fileName) + atomicfile.TempSuffix); err == nil {
			inWrite++
		}
		checkSums(t, l)
		// The lock is free, and the room of the dead can be had at once.
		reserve(t, l, request("whole", "n", 16*gib))
		must(t, l.Release("n"))
		if left := checkSums(t, l); left != 0 {
			t.Fatalf("%d records left of a dead process", left)
		}
	}
	t.Logf("%d kills, %d of them between the temporary file and its rename", kills, inWrite)
}

func TestManyProcesses(t *testing.T) {
	l := withCard(t)
	var cmds []*exec.Cmd
	var outs []*bytes.Buffer
	for range 4 {
		cmd, out := start(t, l.dir, 200)
		cmds, outs = append(cmds, cmd), append(outs, out)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i, cmd := range cmds {
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v: %s", err, outs[i])
			}
		}
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
			checkSums(t, l)
		}
	}
	if left := checkSums(t, l); left != 0 {
		t.Errorf("%d records left", left)
	}
}

// BenchmarkReserve is one reservation (a restart of the same container) beside 200 containers. A process that does it
// once pays the cold start of encoding/json too: see BenchmarkColdProcess.
func BenchmarkReserve(b *testing.B) {
	l := open(b)
	fill(b, l, 200)
	for b.Loop() {
		reserve(b, l, request("new", "n", quota.MiB))
	}
}

// BenchmarkColdProcess starts a process that reserves and releases once; compare with BenchmarkNothingProcess.
func BenchmarkColdProcess(b *testing.B)    { benchProcess(b, "1") }
func BenchmarkNothingProcess(b *testing.B) { benchProcess(b, "-1") }

func benchProcess(b *testing.B, rounds string) {
	l := open(b)
	fill(b, l, 200)
	for b.Loop() {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "LEDGER_TEST_DIR="+l.dir, "LEDGER_TEST_ROUNDS="+rounds)
		must(b, cmd.Run())
	}
}

func fill(b *testing.B, l *Ledger, n int) {
	for i := range n {
		req := request(fmt.Sprintf("%064d", i), fmt.Sprintf("%016x", i), quota.MiB)
		req.Record.Bundle = "/run/containerd/io.containerd.runtime.v2.task/moby/" + req.Record.ID
		req.Record.Socket, req.Record.Control = "/run/cgpu/g/"+req.Record.Nonce+".sock", "/run/cgpu/g/"+req.Record.Nonce+".ctl"
		req.Record.VGPUs = slice("GPU-b", 100*quota.MiB)
		reserve(b, l, req)
	}
}
