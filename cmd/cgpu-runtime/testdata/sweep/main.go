// SPDX-License-Identifier: Apache-2.0

// Command sweep calls ioctl with every low byte under a choice of upper parts and prints how each call was answered.
// The test runs it as a container's program. The file descriptor is not open: EBADF means that the filter let the call
// pass, EDOM that the guard of the test answered, EPERM that the filter forbade it. With an argument it does something else.
package main

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "see":
			see()
		case "sleep":
			time.Sleep(time.Minute)
		}
		return
	}
	for _, fd := range []uintptr{1000, 3000} {
		for _, high := range []uintptr{0, 0x4600, 0x5400, 0xc0204600, 0xffffffff_c0304600} {
			for low := range uintptr(256) {
				_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, fd, high|low, 0)
				show("64", fd, high|low, errno)
				const x32 = 0x40000000 + 514 // ioctl in the x32 table
				_, _, errno = syscall.RawSyscall(x32, fd, high|low, 0)
				show("x32", fd, high|low, errno)
			}
		}
	}
}

// see tells what of the limiter is in the container, and whether it is mounted read-only.
func see() {
	fmt.Println("LD_PRELOAD=" + os.Getenv("LD_PRELOAD"))
	for _, path := range []string{"/run/cgpu/libcgpu.so", "/run/cgpu/vgpu", "/etc/ld.so.preload"} {
		text, err := os.ReadFile(path)
		if err != nil {
			fmt.Println(path, "none")
			continue
		}
		var fs syscall.Statfs_t
		if err := syscall.Statfs(path, &fs); err != nil {
			fmt.Println(path, err)
			continue
		}
		if path == "/run/cgpu/vgpu" {
			text = []byte(strconv.Itoa(len(text)))
		}
		fmt.Printf("%s %q read-only=%v\n", path, text, fs.Flags&1 != 0)
	}
}

func show(abi string, fd, number uintptr, errno syscall.Errno) {
	fmt.Println(abi, fd, strconv.FormatUint(uint64(number), 16), int(errno))
}
