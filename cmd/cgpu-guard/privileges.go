package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

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

// assertPrivileges looks at every thread, since RM will.
func assertPrivileges() error {
	files, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(files) == 0 {
		return fmt.Errorf("cannot read the capabilities of this process: %v", err)
	}
	want := fmt.Sprintf("%016x", 1<<unix.CAP_SYS_PTRACE)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return err
		}
		for line := range bytes.Lines(b) {
			key, value, _ := strings.Cut(string(line), ":")
			value = strings.TrimSpace(value)
			if (key == "CapEff" || key == "CapPrm") && value != want {
				return fmt.Errorf("%s of a thread is %s: want %s (CAP_SYS_PTRACE only)", key, value, want)
			}
			if key == "CapAmb" && strings.Trim(value, "0") != "" {
				return fmt.Errorf("CapAmb of a thread is %s: want none", value)
			}
		}
	}
	return nil
}
