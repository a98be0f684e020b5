// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// Fence is what is left to do for a process after Prepare, which nobody can do for it: it takes the filter Program, and sends the
// listener over Conn, which is connected to the guard, together with State.
type Fence struct {
	Program []byte // struct sock_filter[]
	State   []byte
	Conn    int
	Limiter string // for LD_PRELOAD; empty: none
}

// Prepare does for another process, which waits and has a mount namespace of its own, what Exec does for this one before the filter.
// The user is whoever that becomes by itself.
func Prepare(pid int, r Run) (Fence, error) {
	conn, err := connect(r.Plan.Socket)
	if err != nil {
		return Fence{}, fmt.Errorf("run: connect to the guard: %w", err)
	}
	state, err := stateOf(r.Plan.ID, r.Plan.Nonce, pid, pid)
	if err != nil {
		return Fence{}, err
	}
	if err := makeCgroups(pid, r.Cgroups, forbidden(r.Plan)); err != nil {
		return Fence{}, fmt.Errorf("run: cgroup: %w", err)
	}
	var program bytes.Buffer
	if err := binary.Write(&program, binary.NativeEndian, filter(abis(runtime.GOARCH), rm.TrappedNRs[:])); err != nil {
		return Fence{}, err
	}
	if err := Hide(pid, r.Plan, r.RunDir); err != nil {
		return Fence{}, err
	}
	if err := mountLimiter(r.Plan); err != nil {
		return Fence{}, fmt.Errorf("run: limiter: %w", err)
	}
	fence := Fence{Program: program.Bytes(), State: state, Conn: conn}
	if r.Plan.Limiter != "" {
		fence.Limiter = spec.LimiterPath
	}
	return fence, nil
}

// Hide gives the mount namespace of a process a /dev that has of NVIDIA's nodes only the plan's. This thread is in that namespace then,
// and goes nowhere else.
func Hide(pid int, p spec.Plan, runDir string) error {
	runtime.LockOSThread()
	namespace := "/proc/" + strconv.Itoa(pid) + "/ns/mnt"
	fd, err := unix.Open(namespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("run: mount namespace of process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	var its, ours unix.Stat_t
	if err := unix.Fstat(fd, &its); err != nil {
		return fmt.Errorf("run: %s: %w", namespace, err)
	}
	if err := unix.Stat("/proc/self/ns/mnt", &ours); err != nil || its.Ino == ours.Ino {
		return fmt.Errorf("run: process %d has no mount namespace of its own (%v)", pid, err) // the host's /dev must not be covered
	}
	if err := ofHost(fd); err != nil {
		return fmt.Errorf("run: %s: %w", namespace, err)
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // who shares it with other threads may not enter
		return fmt.Errorf("run: unshare: %w", err)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("run: enter the mount namespace of process %d: %w", pid, err)
	}
	if err := mountDev(p, runDir); err != nil {
		return fmt.Errorf("run: /dev: %w", err)
	}
	if err := keepDeviceNodes("/dev", "/proc/driver/nvidia/params"); err != nil {
		return fmt.Errorf("run: driver parameters: %w", err)
	}
	if err := sealDev(); err != nil {
		return fmt.Errorf("run: /dev read-only: %w", err)
	}
	return nil
}

// ofHost refuses a namespace that somebody else than the machine's root may have filled: this process works in it with all that it may.
func ofHost(namespace int) error {
	owner, err := unix.IoctlRetInt(namespace, unix.NS_GET_USERNS)
	if err != nil {
		return fmt.Errorf("its user namespace: %w", err)
	}
	defer unix.Close(owner)
	var its, ours unix.Stat_t
	if err := unix.Fstat(owner, &its); err != nil {
		return fmt.Errorf("its user namespace: %w", err)
	}
	if err := unix.Stat("/proc/self/ns/user", &ours); err != nil || its.Ino != ours.Ino {
		return fmt.Errorf("it belongs to another user namespace (%v)", err)
	}
	return nil
}
