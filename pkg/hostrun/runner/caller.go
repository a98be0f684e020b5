// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"os"
	"os/signal"
	"strings"
	"syscall"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/launch"
)

// IgnoreStops lets no ^Z stop this process, which takes the ledger's lock: every other start on the node would wait for it. The command
// has these signals as they were: what is caught becomes the default again by execve, and what is ignored is left alone.
func IgnoreStops() {
	swallow := make(chan os.Signal, 1)
	for _, s := range []syscall.Signal{syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU} {
		if !ignored(s) {
			signal.Notify(swallow, s)
		}
	}
}

// ignored asks the kernel; signal.Ignored does not know what was ignored when the program began, but for SIGHUP and SIGINT.
func ignored(s syscall.Signal) bool {
	const sigIgn = 1
	var action [4]uint64 // struct sigaction of the kernel; the handler comes first
	_, _, e := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(s), 0, uintptr(unsafe.Pointer(&action)), 8, 0, 0)
	return e == 0 && action[0] == sigIgn
}

// CleanEnvironment leaves nothing of the caller's for the programs that are started as root before his command is: sudo may
// let a user set PATH or LD_LIBRARY_PATH.
func CleanEnvironment() {
	kept := map[string]string{"PATH": strings.Join(launch.Folders, ":")}
	for _, name := range []string{"CGPU_RUN_DIR", "CGPU_CONFIG", "SUDO_UID", "SUDO_GID", "SLURM_CONF"} {
		kept[name] = os.Getenv(name)
	}
	os.Clearenv()
	for name, value := range kept {
		if value != "" {
			_ = os.Setenv(name, value)
		}
	}
}
