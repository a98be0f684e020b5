// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"
)

// dropPrivileges keeps CAP_SYS_PTRACE, for pidfd_getfd and process_vm_readv, and nothing else.
//
// Above all CAP_SYS_ADMIN must go: RM takes the privilege of a call from the thread that makes it, and turns every channel
// that an administrator allocates into a privileged one, which can address all of the GPU's memory
// (kchannelConstruct_IMPL, src/nvidia/src/kernel/gpu/fifo/kernel_channel.c).
func dropPrivileges() error {
	want := cap.NewSet()
	if err := want.SetFlag(cap.Permitted, true, cap.SYS_PTRACE); err != nil {
		return err
	}
	if err := want.SetFlag(cap.Effective, true, cap.SYS_PTRACE); err != nil {
		return err
	}
	if err := want.SetProc(); err != nil {
		return fmt.Errorf("keep CAP_SYS_PTRACE only: %w; the container engine must run as root", err)
	}
	return assertPrivileges()
}

// assertPrivileges looks at every thread, since RM will. It asks the kernel rather than to read each thread's status in
// /proc, which takes ten times as long, and a container waits. The ambient set needs no look: what is in it is in the
// inheritable set too (capabilities(7)).
func assertPrivileges() error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil || len(tasks) == 0 {
		return fmt.Errorf("cannot list the threads of this process: %v", err)
	}
	const want = 1 << unix.CAP_SYS_PTRACE
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			return fmt.Errorf("cannot list the threads of this process: %w", err)
		}
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3, Pid: int32(tid)}
		var sets [2]unix.CapUserData // capabilities 0 to 31 and 32 to 63
		err = unix.Capget(&header, &sets[0])
		if errors.Is(err, unix.ESRCH) {
			continue // the thread has ended
		}
		if err != nil {
			return fmt.Errorf("read the capabilities of a thread: %w", err)
		}
		if sets != [2]unix.CapUserData{{Effective: want, Permitted: want}} {
			return fmt.Errorf("a thread has the capabilities %+v: want CAP_SYS_PTRACE only", sets)
		}
	}
	return nil
}
