// SPDX-License-Identifier: Apache-2.0

//go:build integration

package main

import (
	"reflect"
	"testing"
)

// TestSplit: the parts of a start, from lines as strace writes them.
func TestSplit(t *testing.T) {
	const text = `1  100.000 execve("/usr/bin/sh", ["sh", "-c", "cgpu-runtime create"], 0x1 /* 2 vars */) = 0
2  100.001 execve("/bin/cgpu-runtime", ["cgpu-runtime", "--root", "/s", "create", "t1"], 0x1 /* 2 vars */) = 0
3  100.002 execve("/no/cgpu-guard", ["cgpu-guard"], 0x1 /* 2 vars */) = -1 ENOENT (No such file or directory)
3  100.003 execve("/bin/cgpu-guard", ["cgpu-guard"], 0x1 /* 2 vars */) = 0
2  100.005 execve("/usr/sbin/runc", ["runc", "--root", "/s", "create", "t1"], 0x1 <unfinished ...>
2  100.006 <... execve resumed>) = 0
4  100.009 execve("/proc/self/exe", ["/usr/sbin/runc", "init"], 0x1 /* 7 vars */) = 0
9  100.0095 mount("/proc/self/exe", "/x", NULL, MS_BIND, NULL) = 0
4  100.010 mount("", "/", NULL, MS_REC, NULL) = 0
4  100.014 move_mount(3, "", 4, "", 0) = 0
4  100.015 symlinkat("/proc/self/fd", 5, "fd") = 0
5  100.016 execve("/bin/cgpu-hook", ["cgpu-hook", "setup", "--link", "a"], 0x1 /* 2 vars */) = 0
6  100.0163 move_mount(7, "", 8, "", 0) = 0
6  100.0168 move_mount(7, "", 8, "", 0) = 0
6  100.017 symlinkat("libcuda.so.1", 7, "libcuda.so") = 0
6  100.018 symlinkat("libcuda.so.2", 7, "libcuda.so.1") = 0
6  100.020 renameat(7, ".x", 7, "ld.so.cache") = 0
5  100.021 +++ exited with 0 +++
4  100.022 pivot_root(".", ".") = 0
4  100.023 mount("", "/x", NULL, MS_REC, NULL) = 0
2  100.024 +++ exited with 0 +++
8  100.030 execve("/bin/cgpu-runtime", ["cgpu-runtime", "start", "t1"], 0x1 /* 2 vars */) = 0
8  100.032 execve("/usr/sbin/runc", ["runc", "start", "t1"], 0x1 /* 2 vars */) = 0
4  100.035 execve("/bin/true", ["true"], 0x1 /* 7 vars */) = 0
8  100.036 +++ exited with 0 +++
`
	want := map[string]float64{"create, all": 23, "  cgpu-runtime until it is runc": 4, "    until the guard begins": 2,
		"  runc until its init begins": 4, "  cgpu-hook setup": 5, "  runc's mounts, from the first to the last": 4, "  calls for them (no ms)": 2,
		"  mounts, of cgpu-hook setup": 0.5, "  runc from its new root to the end": 2,
		"  links, of cgpu-hook setup": 1, "  ld cache, of cgpu-hook setup": 2, "start, all": 6, "  cgpu-runtime start until it is runc": 2,
		"  runc until the program begins": 3}
	got := map[string]float64{}
	for _, p := range split(readTrace(text)) {
		got[p.name] = float64(int(p.took*1000+0.5)) / 1000
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if parts := split(readTrace("1 1.0 execve(\"/bin/sh\", [\"sh\"], 0) = 0\n")); len(parts) != 0 {
		t.Errorf("of no start: %v", parts)
	}
}
