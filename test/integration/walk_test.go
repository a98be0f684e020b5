// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/walk"
)

const (
	walkEnv    = "CGPU_WALK"     // seed; else another each time
	walkForEnv = "CGPU_WALK_FOR" // how long
	walkTime   = 20 * time.Second
	walkShrink = time.Minute
	walkLimit  = 512 * quota.MiB
	// What page tables may take beyond the limit (tableSlack of pkg/guard).
	walkTables = 16 * quota.MiB
	// On a real card the driver needs some memory for itself, for each process and client.
	walkSlack = 96 * quota.MiB
)

// walker is a container in which cgpu-probe walks at random, beside a neighbour.
type walker struct {
	t     *testing.T
	id    string
	base  quota.Bytes // what the card gave out before
	slack quota.Bytes
}

// used is what the card has given out since.
func (w *walker) used() quota.Bytes {
	if lab.Driver == device.DriverSim {
		return driverUsed(w.t) - w.base
	}
	return cardUsed(w.t) - min(w.base, cardUsed(w.t))
}

// books compares what the card gave out with what is charged, until they agree: what is closed is seen to be so a moment later.
func (w *walker) books(end bool) (err error) {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		given, charged := w.used(), smiOf(w.t, w.id).Used
		switch {
		case charged > walkLimit+walkTables:
			err = fmt.Errorf("charged are %v of a limit of %v", charged, walkLimit)
		case given > charged+w.slack:
			err = fmt.Errorf("the card has given out %v, and charged are %v", given, charged)
		case end && (charged > 0 || given > w.slack):
			err = fmt.Errorf("the processes are gone, and the card has still given out %v; charged are %v", given, charged)
		default:
			return nil
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

// run starts a walk in the container and answers whenever it stops. input is what it reads first.
func (w *walker) run(input string, args ...string) (seed string, step int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", slices.Concat([]string{"exec", "-i", w.id, "cgpu-probe", "walk", "--limit", walkLimit.String()},
		args)...)
	cmd.WaitDelay = time.Second
	var diag strings.Builder
	cmd.Stderr = &diag
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", 0, err
	}
	if err := cmd.Start(); err != nil {
		return "", 0, err
	}
	fmt.Fprint(in, input)
	wrong := func() error {
		for sc := bufio.NewScanner(out); sc.Scan(); {
			words := strings.Fields(sc.Text())
			if words[0] != "sync" && words[0] != "end" {
				w.t.Log(sc.Text())
				continue
			}
			if seed, step = words[1], 1<<20; words[0] == "sync" {
				step, _ = strconv.Atoi(words[2])
			}
			if err := w.books(words[0] == "end"); err != nil {
				return err
			}
			fmt.Fprintln(in, "go")
		}
		return nil
	}()
	in.Close() // the walk ends
	_, _ = io.Copy(io.Discard, out)
	if err := cmd.Wait(); err != nil && wrong == nil {
		wrong = fmt.Errorf("%w: %s", err, diag.String())
	}
	return seed, step, wrong
}

// TestWalk: whatever a container asks of the driver, the card gives out no more than is charged, and nothing is left when its processes
// are gone. On the simulated driver a part of the calls is wrong; on a real one they are such as CUDA makes.
func TestWalk(t *testing.T) {
	noTrace(t)
	neighbour := holding(t, container{env: sizeOf("512MiB")}, "200MiB")
	w := &walker{t: t}
	kind := []string{"--malformed"}
	w.base = driverUsed(t)
	if lab.Driver != device.DriverSim {
		kind, w.slack, w.base = []string{"--real"}, walkSlack, cardUsed(t)
	}
	w.id = container{env: sizeOf(walkLimit.String()), cmd: []string{"sleep", "600"}}.start(t)
	seed, limit := strconv.FormatInt(time.Now().UnixNano(), 10), walkTime
	if s := os.Getenv(walkEnv); s != "" {
		seed = s
	}
	if d, err := time.ParseDuration(os.Getenv(walkForEnv)); err == nil {
		limit = d
	}
	at, step, err := w.run("", slices.Concat([]string{"--seed", seed, "--for", limit.String(), "--sync", "50"}, kind)...)
	if err != nil {
		t.Errorf("seed %s, step %d: %v", at, step, err)
		w.shrink(at, step, err, kind)
	}
	if got := execIn(neighbour, "cgpu-probe", "alloc", "200MiB"); got.Code != 0 {
		t.Errorf("the neighbour suffers: %s", got)
	}
}

// shrink prints the shortest list that goes wrong in the same way.
func (w *walker) shrink(seed string, step int, err error, kind []string) {
	r := execIn(w.id, slices.Concat([]string{"cgpu-probe", "walk", "--print", "--limit", walkLimit.String(), "--seed", seed}, kind)...)
	ops, perr := walk.Parse(strings.NewReader(r.Stdout))
	if perr != nil || len(ops) == 0 {
		w.t.Errorf("no list: %v: %s", perr, r)
		return
	}
	same := func(e error) string { return regexp.MustCompile(`[0-9.]+([KMGT]i)?B?`).ReplaceAllString(e.Error(), "") }
	short := walk.Shrink(walk.UpTo(ops, step), walkShrink, func(ops []walk.Op) bool {
		_, _, again := w.run(walk.Text(ops)+"\n", slices.Concat([]string{"--replay", "-", "--sync", "1"}, kind)...)
		return again != nil && same(again) == same(err)
	})
	w.t.Logf("`cgpu-probe walk --replay FILE` does it again with these %d of %d operations:\n%s", len(short), len(ops), walk.Text(short))
}
