// SPDX-License-Identifier: Apache-2.0

package nvmlclient

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Limit has NVIDIA's driver limit the memory of a container's cgroup (Record.LimitedCgroup), as its record says. The limits end with the
// cgroup.
func Limit(book *ledger.Ledger, nonce string) error {
	l := here()
	l.record = func() (ledger.Record, error) { return book.Get(nonce) }
	return l.limit()
}

// Tighten has the driver limit a container to at most so much, on those of its GPUs. What is lower already stays.
func Tighten(r ledger.Record, of func(uuid string) bool, limit quota.Bytes) error {
	return here().tighten(r, of, limit)
}

// Cgroup is the cgroup of a container whose first process was just made, and has not begun.
func Cgroup(pid int) (string, error) { return here().cgroup(pid) }

type limiter struct {
	proc, root string // where processes and cgroups are
	start      func(pid int) (uint64, error)
	run        func(args []string) error // cgpu-refresh
	patience   time.Duration             // for that
	record     func() (ledger.Record, error)
}

// here is one for this machine.
func here() limiter {
	return limiter{proc: "/proc", root: CgroupRoot, start: ledger.ProcStart, run: runRefresh, patience: limitPatience + killPatience}
}

// limit sets what the record says, and looks whether it still says so. Whoever changes a limit does that in the ledger first, and the
// driver takes seconds: the older limit of two may be set last. Who sets it then sees the newer one.
func (l limiter) limit() error {
	const rounds = 4
	r, err := l.record()
	for range rounds {
		if err != nil {
			return err
		}
		set := limitsOf(r)
		if len(set) == 0 {
			return nil // whole GPUs
		}
		if err := l.set(r, set); err != nil {
			return err
		}
		if r, err = l.record(); err == nil && slices.Equal(set, limitsOf(r)) {
			return nil
		}
	}
	return errors.Join(errors.New("the driver's memory limits: the container's were changed again each time that they were set"), err)
}

func (l limiter) tighten(r ledger.Record, of func(uuid string) bool, limit quota.Bytes) error {
	var set []string
	for _, v := range r.VGPUs {
		if of(v.UUID) && limit < v.Limit {
			set = append(set, limitOf(v.UUID, limit))
		}
	}
	if len(set) == 0 {
		return nil
	}
	return l.set(r, set)
}

// limitsOf are a record's limits as cgpu-refresh takes them.
func limitsOf(r ledger.Record) (list []string) {
	for _, v := range r.VGPUs {
		list = append(list, limitOf(v.UUID, v.Limit))
	}
	return list
}

func limitOf(uuid string, limit quota.Bytes) string {
	return uuid + "=" + strconv.FormatUint(uint64(limit), 10)
}

func (l limiter) set(r ledger.Record, limits []string) error {
	if err := l.inside(r); err != nil {
		return err
	}
	// After the look, so that it was this process': a number may belong to another one meanwhile.
	if start, err := l.start(r.InitPID); err != nil || start != r.InitStart {
		return errors.Join(fmt.Errorf("the container's first process, %d, is gone", r.InitPID), err)
	}
	ended := make(chan error, 1)
	go func() { ended <- l.run(append([]string{"-limit", filepath.Join(l.root, r.LimitedCgroup)}, limits...)) }()
	select {
	case err := <-ended:
		return err
	case <-time.After(l.patience): // one that hangs in the driver's kernel part does not even end when it is killed
		return errors.New("the driver's memory limits: cgpu-refresh does not end: the NVIDIA driver does not answer: see nvidia-smi and dmesg")
	}
}

// inside refuses a container whose first process is elsewhere than in the cgroup that was limited. Below it a program may have moved
// itself, as systemd does: a limit there would not be one of the other processes.
func (l limiter) inside(r ledger.Record) error {
	if r.LimitedCgroup == "" {
		return errors.New("the ledger does not say which cgroup is the container's")
	}
	path, err := l.path(strconv.Itoa(r.InitPID))
	if err == nil && path != r.LimitedCgroup && !strings.HasPrefix(path, r.LimitedCgroup+"/") {
		err = fmt.Errorf("the container's first process, %d, is in cgroup %q, and not in %q, which is limited", r.InitPID, path, r.LimitedCgroup)
	}
	return err
}

// runRefresh returns what cgpu-refresh says when it fails.
func runRefresh(args []string) error {
	helper, err := device.Program("cgpu-refresh")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), limitPatience)
	defer cancel()
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, helper, args...)
	cmd.Stderr, cmd.WaitDelay = &said, moment
	if err = cmd.Run(); err == nil {
		return nil
	}
	if text := strings.TrimSpace(strings.TrimPrefix(said.String(), "cgpu-refresh:")); text != "" {
		err = errors.New(text)
	}
	return fmt.Errorf("the driver's memory limits: %w", err)
}

// limitPatience is above what NVML needs for eight GPUs that nobody uses, seconds for each.
const limitPatience = time.Minute

// killPatience is for the end of one that was killed.
const killPatience = time.Second

// CgroupRoot is where cgroup v2 is. NVML takes no other place for it.
const CgroupRoot = "/sys/fs/cgroup"

// Unified refuses a machine whose cgroups are not those of v2 alone.
func Unified(root string) error {
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
		return fmt.Errorf("the driver limits cgroups of v2 only, and %s is not of that kind (%w)", root, err)
	}
	return nil
}

// cgroup is that of a process, which must be of the container's own: a limit on this process' would be on the engine.
func (l limiter) cgroup(pid int) (string, error) {
	if err := Unified(l.root); err != nil {
		return "", err
	}
	path, err := l.path(strconv.Itoa(pid))
	if err != nil {
		return "", err
	}
	own, err := l.path("self")
	if err != nil {
		return "", err
	}
	// "/../x" is what a process sees that is outside of its own cgroup namespace.
	if path == own || path == "/" || strings.HasPrefix(path, "/..") {
		return "", fmt.Errorf("process %d has no cgroup of its own (%q), so the driver cannot limit it", pid, path)
	}
	return path, nil
}

// path is that of a process' cgroup below the root.
func (l limiter) path(process string) (string, error) {
	text, err := os.ReadFile(filepath.Join(l.proc, process, "cgroup"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			return path, nil
		}
	}
	return "", errors.New("process " + process + " is in no cgroup of v2")
}
