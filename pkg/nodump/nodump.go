// SPDX-License-Identifier: Apache-2.0

// Package nodump is imported by each program of ours that runs on a node, for its effect: the process is not dumpable (PR_SET_DUMPABLE,
// prctl(2)). Then it leaves no core dump, and nobody of the same user who lacks CAP_SYS_PTRACE can attach to it, read its memory or take
// its descriptors: not the root of a container that shares the host's PID namespace from cgpu-rescue and cgpu-agent, which have no
// capability (__ptrace_may_access, kernel/ptrace.c). Nothing of ours looks into another program of ours without that capability.
//
// A program that such a process becomes by execve is dumpable again (begin_new_exec, fs/exec.c): runc, and the command of cgpu run.
package nodump

import "golang.org/x/sys/unix"

// Before main: there is no time at which it is otherwise. It cannot fail on Linux; a sandbox without the call is no reason not to run.
func init() { _ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) }
