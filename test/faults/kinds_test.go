// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import "golang.org/x/sys/unix"

// kind is how calls fail, and which.
type kind struct {
	name   string
	errors map[int]string // by errno's name; nil: the process is killed instead
}

var kinds = []kind{
	{"kill", nil},
	{"full", map[int]string{unix.SYS_WRITE: "ENOSPC", unix.SYS_PWRITE64: "ENOSPC", unix.SYS_MKDIRAT: "ENOSPC", unix.SYS_RENAME: "ENOSPC",
		unix.SYS_RENAMEAT: "ENOSPC", unix.SYS_FALLOCATE: "ENOSPC", unix.SYS_FTRUNCATE: "ENOSPC", unix.SYS_BIND: "ENOSPC"}},
	{"files", map[int]string{unix.SYS_OPENAT: "EMFILE", unix.SYS_SOCKET: "EMFILE", unix.SYS_PIPE2: "EMFILE", unix.SYS_ACCEPT4: "EMFILE",
		unix.SYS_MEMFD_CREATE: "EMFILE", unix.SYS_PIDFD_OPEN: "EMFILE", unix.SYS_PIDFD_GETFD: "EMFILE"}},
	{"memory", map[int]string{unix.SYS_MOUNT: "ENOMEM", unix.SYS_UMOUNT2: "ENOMEM", unix.SYS_FLOCK: "ENOMEM", unix.SYS_UNLINKAT: "ENOMEM",
		unix.SYS_NEWFSTATAT: "ENOMEM", unix.SYS_CONNECT: "ENOMEM", unix.SYS_OPENAT: "ENOMEM", unix.SYS_SOCKET: "ENOMEM",
		unix.SYS_SENDMSG: "ENOMEM", unix.SYS_MEMFD_CREATE: "ENOMEM", unix.SYS_PIDFD_OPEN: "ENOMEM", unix.SYS_PIDFD_GETFD: "ENOMEM",
		unix.SYS_EXECVE: "ENOMEM", unix.SYS_PROCESS_VM_READV: "ENOMEM"}},
	{"interrupted", map[int]string{unix.SYS_FLOCK: "EINTR", unix.SYS_READ: "EINTR", unix.SYS_WRITE: "EINTR", unix.SYS_OPENAT: "EINTR",
		unix.SYS_CONNECT: "EINTR", unix.SYS_ACCEPT4: "EINTR"}},
}
