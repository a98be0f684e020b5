// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"os"
	"path/filepath"
	"testing"
)

// unconditionalIoctl is a custom profile as people write them: everything allowed, ioctl named.
const customProfile = `{
  "defaultAction": "SCMP_ACT_ERRNO",
  "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
  "syscalls": [
    {"names": ["ioctl"], "action": "SCMP_ACT_ALLOW"},
    {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}]},
    {"names": [` + customCalls + `], "action": "SCMP_ACT_ALLOW"}
  ]
}`

const customCalls = `"access","arch_prctl","bind","brk","capget","capset","chdir","clone","clone3","close","connect","dup","dup2","dup3",
"epoll_create1","epoll_ctl","epoll_pwait","epoll_wait","eventfd2","execve","exit","exit_group","faccessat","faccessat2","fchdir","fchmod","fchown","fcntl",
"fork","fstat","fstatfs","futex","getcwd","getdents64","getegid","geteuid","getgid","getpgrp","getpid","getppid","getrandom","getrlimit","getsockname","gettid",
"gettimeofday","getuid","kill","lseek","lstat","madvise","mincore","mkdirat","mmap","mount","mprotect","mremap","munmap","nanosleep","newfstatat","open","openat",
"pidfd_open","pidfd_send_signal","pipe","pipe2","poll","ppoll","prctl","pread64","prlimit64","pselect6","read","readlink","readlinkat","recvfrom","recvmsg",
"restart_syscall","rseq","rt_sigaction","rt_sigprocmask","rt_sigreturn","sched_getaffinity","sched_yield","seccomp","select","sendmsg","sendto","set_robust_list","set_tid_address",
"setgid","setgroups","setitimer","setpgid","setresgid","setresuid","setsid","setuid","sigaltstack","socket","socketpair","stat","statfs","statx","sysinfo","tgkill","timer_create",
"timer_settime","timer_delete","tkill","umask","uname","unlinkat","vfork","wait4","waitid","write","writev","clock_gettime","clock_nanosleep","pivot_root","setns","unshare","umount2","mknodat","sethostname","process_vm_readv"`

// TestWays: however the container is started, it sees its own size, one GPU, and is stopped at its limit.
func TestWays(t *testing.T) {
	profile := filepath.Join(t.TempDir(), "seccomp.json")
	if err := os.WriteFile(profile, []byte(customProfile), 0o644); err != nil {
		t.Fatal(err)
	}
	limit := fraction(t, 6, 15)
	ways := []struct {
		name  string
		opts  []string
		probe string // "" for cgpu-probe
	}{
		{name: "plain"},
		{name: "runtime named", opts: []string{"--runtime", "cgpu"}},
		{name: "privileged", opts: []string{"--privileged"}},
		{name: "unconfined", opts: []string{"--security-opt", "seccomp=unconfined"}},
		{name: "custom profile", opts: []string{"--security-opt", "seccomp=" + profile}},
		{name: "non-root user", opts: []string{"--user", "1000:1000"}},
		{name: "non-root with all capabilities dropped", opts: []string{"--user", "1000", "--cap-drop", "ALL"}},
		{name: "read-only root", opts: []string{"--read-only"}},
		{name: "no-new-privileges", opts: []string{"--security-opt", "no-new-privileges"}},
		{name: "no capabilities", opts: []string{"--cap-drop", "ALL"}},
		{name: "init", opts: []string{"--init"}},
		{name: "host pid namespace", opts: []string{"--pid", "host"}},
		{name: "host ipc namespace", opts: []string{"--ipc", "host"}},
		{name: "setuid program", opts: []string{"--user", "1000"}, probe: "cgpu-probe-setuid"},
		{name: "terminal", opts: []string{"-t"}},
		{name: "sys_ptrace", opts: []string{"--cap-add", "SYS_PTRACE"}},
		{name: "sys_admin", opts: []string{"--cap-add", "SYS_ADMIN", "--security-opt", "seccomp=unconfined"}},
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			noTrace(t)
			probe := way.probe
			if probe == "" {
				probe = "cgpu-probe"
			}
			c := container{env: sixOfFifteen, opts: way.opts}
			if lab.Run(nil, "docker", "info").Code != 0 {
				t.Fatal("dockerd is gone")
			}
			c.cmd = []string{probe, "meminfo"}
			if got := total(t, c.run(t)); got != limit {
				t.Errorf("total = %v, want %v", got, limit)
			}
			c.cmd = []string{probe, "oom"}
			checkOOM(t, c.try(t), limit)
			c.cmd = []string{probe, "gpus"}
			checkGPUs(t, c.run(t), 0)
		})
	}
}

// TestEnvironmentCleared: the limit does not live in the program's environment.
func TestEnvironmentCleared(t *testing.T) {
	noTrace(t)
	c := container{env: sixOfFifteen, cmd: []string{"env", "-i", "/bin/cgpu-probe", "oom"}}
	checkOOM(t, c.try(t), fraction(t, 6, 15))
}

// TestChild: a child that fork and exec made is under the same limit.
func TestChild(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		noTrace(t)
		c := m.of(container{env: sixOfFifteen, cmd: []string{"sh", "-c", "sh -c '(" + m.probe + " oom; exit $?)'; exit $?"}})
		checkOOM(t, c.try(t), fraction(t, 6, 15))
	})
}

// TestNames: words of runc's command line as container names confuse nobody.
func TestNames(t *testing.T) {
	for _, name := range []string{"create", "run", "delete", "exec"} {
		t.Run(name, func(t *testing.T) {
			noTrace(t)
			c := container{name: name, env: sixOfFifteen, cmd: []string{"cgpu-probe", "meminfo"}}
			if got, want := total(t, c.run(t)), fraction(t, 6, 15); got != want {
				t.Errorf("total = %v, want %v", got, want)
			}
		})
	}
}
