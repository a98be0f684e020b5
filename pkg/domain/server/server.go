// SPDX-License-Identifier: Apache-2.0

// Package server starts the MPS server of a trust domain: NVIDIA's control daemon, in a run of its own (package hostrun) as a user of its
// own.
//
// Whoever needs one and finds none starts one. The ledger admits one for each domain and GPU, so of several that are started at once one
// stays. It ends when its guard finds that nobody names the domain any more (Ledger.Retire). What is killed on the way leaves a record
// without a guard, which whoever comes next clears away.
package server

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/hostrun/runner"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Commands of cgpu's: the first becomes the second in a run of its own, which starts the third.
const (
	RunName    = "domain-run"
	ServeName  = "mps-serve"
	DaemonName = "mps-daemon"
)

// ExitTwice is the exit status of the first where the domain has a server.
const ExitTwice = 75

// Memory is the server's limit: what it takes for its group and for 60 clients is some 210 MiB on an H200. hostMemory bounds what members
// can make it take of the host's.
const (
	Memory     = 512 * quota.MiB
	hostMemory = 4 * quota.GiB
)

// Domain is a trust domain on a GPU.
type Domain struct{ RunDir, UUID, Name string }

// Start returns when the domain's server serves.
func (d Domain) Start(within time.Duration) error {
	deadline := time.Now().Add(within)
	var child *process
	for pause := time.Millisecond; time.Now().Before(deadline); pause = min(2*pause, 20*time.Millisecond) {
		r, ok, err := domain.Server(d.RunDir, d.UUID, d.Name)
		switch {
		case err != nil:
			return err
		case ok && domain.Ready(d.RunDir, d.UUID, d.Name):
			return nil
		case ok && !r.GuardLives():
			if err := d.clear(r, deadline); err != nil {
				return err
			}
		case ok: // it begins, or ends
		case child == nil:
			if child, err = d.start(); err != nil {
				return err
			}
		}
		if ended, err := child.ended(); ended {
			if child = nil; err != nil {
				return err
			}
		}
		time.Sleep(pause)
	}
	if err := d.abandon(child); err != nil {
		return err
	}
	why := fmt.Sprintf("it does not answer after %v", within)
	if r, ok, _ := domain.Server(d.RunDir, d.UUID, d.Name); ok {
		why += ": see " + launch.LogFile(d.RunDir, r)
	}
	return errors.New(why)
}

// process is a server that is being started.
type process struct {
	cmd  *exec.Cmd
	said *os.File
	done chan error
}

// start makes the server's process, which is nobody's child when this one has ended.
func (d Domain) start() (*process, error) {
	fd, err := unix.MemfdCreate(RunName, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	p := &process{said: os.NewFile(uintptr(fd), "output"), done: make(chan error, 1)}
	p.cmd = exec.Command("/proc/self/exe", RunName, d.UUID, d.Name)
	p.cmd.Dir = "/"
	p.cmd.Stdout, p.cmd.Stderr = p.said, p.said
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { p.done <- p.cmd.Wait() }()
	return p, nil
}

// ended says whether it has, and why, unless another one has been there before it.
func (p *process) ended() (bool, error) {
	if p == nil {
		return false, nil
	}
	select {
	case err := <-p.done:
		if p.cmd.ProcessState.ExitCode() == ExitTwice {
			return true, nil
		}
		text := make([]byte, 4096)
		n, _ := p.said.ReadAt(text, 0)
		said := strings.TrimPrefix(string(bytes.TrimSpace(text[:n])), "cgpu: ")
		if said == "" {
			said = fmt.Sprintf("it ended at once: %v", err)
		}
		return true, errors.New(said)
	default:
		return false, nil
	}
}

// abandon ends one that has reserved nothing, in the driver say: no guard knows of it, and whoever is refused tries again.
func (d Domain) abandon(p *process) error {
	if p == nil {
		return nil
	}
	records, err := ledger.Open(d.RunDir).List()
	if err != nil || slices.ContainsFunc(records, func(r ledger.Record) bool { return r.LauncherPID == p.cmd.Process.Pid }) {
		return err
	}
	_ = p.cmd.Process.Kill()
	return nil
}

// clear ends what is left of a server whose guard is gone, without which none of its calls is served, and gives back what was reserved.
func (d Domain) clear(r ledger.Record, deadline time.Time) error {
	for {
		if killRun(r.Nonce) == 0 && !r.ContainerLives() {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("its guard was killed, and process %d does not end: see what holds it, or restart the machine", r.InitPID)
		}
		time.Sleep(5 * time.Millisecond)
	}
	_ = event.Append(d.RunDir, event.Event{Kind: event.Removed, Container: r.ID, Nonce: r.Nonce, Name: r.Name,
		Text: fmt.Sprintf("the MPS server of domain %s, whose guard was killed; its members' CUDA contexts are gone", d.Name)})
	return ledger.Open(d.RunDir).Release(r.Nonce)
}

// killRun kills the processes of a run and counts them.
func killRun(nonce string) (n int) {
	for dir, of := range hostrun.Cgroups() {
		if of != nonce {
			continue
		}
		for _, pid := range processesIn(dir) {
			n++
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return n
}

// Become makes this process the server.
func (d Domain) Become(inherited hostrun.Inherited) error {
	hostrun.Leave() // it is nobody's, so it ends with nobody's session or service
	// The guard by which it is started is spared where memory runs out. What members can make grow goes first.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0); err != nil {
		return err
	}
	table, err := node.Load(d.RunDir)
	if err != nil {
		return err
	}
	control, err := ControlProgram(table)
	if err != nil {
		return err
	}
	user, err := d.folder()
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	kept, err := d.kept()
	if err != nil {
		return err
	}
	q := d.quota(table, kept)
	// By that path whoever may execute the file can, whatever the folders above it allow.
	const serve = "/proc/self/exe"
	return runner.Become(runner.Command{Quota: q, Name: d.label(table), Paused: kept.Paused, Guard: []string{self, runner.GuardName},
		Refused: func(err error) error { return err },
		Run: hostrun.Run{RunDir: d.RunDir, HostMemory: hostMemory, Caller: inherited,
			Root:  hostrun.Root{Folders: folders(table, control)},
			Input: func() (int, error) { return sockets(page.Pipes(d.RunDir, d.UUID, d.Name)) },
			User:  hostrun.User{UID: user, GID: user, Groups: []int{user}},
			Args:  []string{serve, ServeName, "--", control, "-f", "-multiuser-server"},
			Env:   environment(table, control)}})
}

// label is what people call the server: each GPU has another.
func (d Domain) label(table *device.Table) string {
	i := slices.IndexFunc(table.GPUs, func(g device.GPU) bool { return g.UUID == d.UUID })
	if i < 0 {
		return "mps-" + d.Name
	}
	return fmt.Sprintf("mps-%s-%d", d.Name, table.GPUs[i].Index)
}

// quota is the server's: the domain's share of the GPU's time as cgpu.toml has it, or as an administrator has set it since.
func (d Domain) quota(table *device.Table, kept Kept) *quota.Quota {
	q := &quota.Quota{Memory: quota.Memory{Fixed: Memory}, NoLimiter: true, Domain: d.Name, DomainServer: true}
	q.Priority = quota.PriorityDefault
	if of := table.Config.Domain(d.Name); of != nil {
		q.Weight, q.Percent = of.Weight, of.Percent
	}
	if kept.Limit != nil {
		q.Memory.Fixed = *kept.Limit
	}
	if kept.Weight != nil {
		q.Weight = *kept.Weight
	}
	if kept.Percent != nil {
		q.Percent = *kept.Percent
	}
	q.Visible.IDs = []string{d.UUID}
	return q
}

// control is the program of NVIDIA's that starts the server proper, which lies beside it.
const control = "nvidia-cuda-mps-control"

// ControlProgram is that of the node's driver, of our own folder, or of PATH.
func ControlProgram(table *device.Table) (string, error) {
	for _, m := range table.Mounts {
		if filepath.Base(m.Host) == control {
			return m.Host, nil
		}
	}
	if path, err := device.Program(control); err == nil {
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	path, err := exec.LookPath(control)
	if err != nil {
		return "", fmt.Errorf("%s is not there: install the driver's MPS programs (in Ubuntu's package nvidia-compute-utils, in RHEL's "+
			"nvidia-driver-cuda), or leave the domain out", control)
	}
	return path, nil
}

// environment lets the programs find each other and the driver's library.
func environment(table *device.Table, control string) []string {
	env := []string{"PATH=" + filepath.Dir(control) + ":" + strings.Join(launch.Folders, ":")}
	if lib := libcuda(table); lib != "" {
		env = append(env, "LD_LIBRARY_PATH="+filepath.Dir(lib))
	}
	return env
}

// libcuda is the driver's library on the host; empty: the node does not tell.
func libcuda(table *device.Table) string {
	for _, m := range table.Mounts {
		if strings.HasPrefix(filepath.Base(m.Host), "libcuda.so.") {
			return m.Host
		}
	}
	return ""
}

// folders are what NVIDIA's programs need to see, wherever the driver is installed.
func folders(table *device.Table, control string) (list []string) {
	for _, file := range []string{control, libcuda(table)} {
		if file == "" {
			continue
		}
		list = append(list, filepath.Dir(file))
		if real, err := filepath.EvalSymlinks(file); err == nil {
			list = append(list, filepath.Dir(real))
		}
	}
	return list
}
