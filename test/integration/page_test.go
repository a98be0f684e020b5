// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestPage: what the container's programs read of their vGPU, and the library that reads it.
func TestPage(t *testing.T) {
	noTrace(t)
	t.Run("content", pageContent)
	t.Run("limiter", limiterLoads)
	t.Run("own preloads", ownPreloads)
	t.Run("musl", limiterInMusl)
}

// pageContent: the page says what is so, at once, and only the guard can write it.
func pageContent(t *testing.T) {
	for _, way := range []struct {
		name string
		opts []string
	}{{"plain", nil}, {"another user", []string{"--user", "1000"}}, {"read-only root", []string{"--read-only"}}} {
		t.Run(way.name, func(t *testing.T) {
			noTrace(t)
			id := holding(t, container{env: withSpill("1GiB", "512MiB"), opts: way.opts}, "300MiB")
			want := func(limit, used, spill quota.Bytes) {
				t.Helper()
				eventually(t, time.Second, func() string {
					r := execIn(id, "cgpu-probe", "page")
					if r.Code != 0 || !strings.Contains(r.Stdout, "writable=no") {
						return r.String()
					}
					if number(t, r.Stdout, "vgpu0_limit") != limit || number(t, r.Stdout, "vgpu0_used") != used ||
						number(t, r.Stdout, "vgpu0_spill") != spill {
						return fmt.Sprintf("want limit %d, used %d, spill %d: %s", limit, used, spill, r)
					}
					return ""
				})
			}
			want(quota.GiB, 300*quota.MiB, 512*quota.MiB)
			cgpu(t, "set", id, "--memory", "2GiB", "--spill", "1GiB")
			want(2*quota.GiB, 300*quota.MiB, quota.GiB)
			docker(t, "exec", "-d", id, "cgpu-probe", "hold", "100MiB")
			want(2*quota.GiB, 400*quota.MiB, quota.GiB)
			killIn(t, id, "hold 100MiB")
			want(2*quota.GiB, 300*quota.MiB, quota.GiB)
		})
	}
}

// limiterLoads: programs of the C library have the limiter, however they come into the container.
func limiterLoads(t *testing.T) {
	noTrace(t)
	id := container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}.start(t)
	for _, way := range [][]string{
		{id, "cgpu-probe-libc", "self"},
		{"--user", "1000", id, "cgpu-probe-libc", "self"},
		{"-e", "LD_PRELOAD=", id, "cgpu-probe-libc", "self"},
		{id, "env", "-i", "/bin/cgpu-probe-libc", "self"},
		{id, "sh", "-c", "unset LD_PRELOAD; cgpu-probe-libc self"},
	} {
		r := lab.Run(nil, append([]string{"docker", "exec"}, way...)...)
		if r.Code != 0 || !strings.Contains(r.Stdout, "limiter=yes") || r.Stderr != "" {
			t.Errorf("want the limiter, without a word: %s", r)
		}
	}
	if r := execIn(id, "cgpu-probe", "self"); r.Code != 0 || !strings.Contains(r.Stdout, "limiter=no") {
		t.Errorf("a static program: %s", r)
	}
	c := container{env: append(sizeOf("1GiB"), "CGPU_LIMITER=off"), cmd: []string{"cgpu-probe-libc", "self"}}
	if out := c.run(t); !strings.Contains(out, "limiter=no") {
		t.Errorf("switched off: %s", out)
	}
	// Without a quota nothing of ours is in the container.
	c.env = nil
	c.cmd = []string{"sh", "-c", "ls /run/cgpu /etc/ld.so.preload; env"}
	if r := c.try(t); strings.Contains(r.Stdout, "cgpu") || strings.Contains(r.Stdout, "preload") {
		t.Errorf("in a container without a quota: %s", r)
	}
}

// ownPreloads: an image's own LD_PRELOAD and /etc/ld.so.preload stay in effect.
func ownPreloads(t *testing.T) {
	noTrace(t)
	dir := t.TempDir()
	for _, name := range []string{"first.so", "second.so"} {
		compile(t, "cc", "-shared", "-nostdlib", "-o", filepath.Join(dir, name), "-xc", "/dev/null")
	}
	if err := os.WriteFile(filepath.Join(dir, "ld.so.preload"), []byte("/second.so\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// An image of its own: a mounted /etc/ld.so.preload would be another case.
	made := strings.TrimSpace(docker(t, "create", image))
	defer docker(t, "rm", made)
	for from, to := range map[string]string{"first.so": "/first.so", "second.so": "/second.so", "ld.so.preload": "/etc/ld.so.preload"} {
		docker(t, "cp", filepath.Join(dir, from), made+":"+to)
	}
	docker(t, "commit", made, "probe-preload")
	defer docker(t, "rmi", "probe-preload")
	args := []string{"docker", "run", "--rm", "--network", "none", "-e", "LD_PRELOAD=/first.so"}
	for _, e := range sizeOf("1GiB") {
		args = append(args, "-e", e)
	}
	out := run(t, append(args, "probe-preload", "cgpu-probe-libc", "self")...)
	for _, library := range []string{"libcgpu.so", "first.so", "second.so"} {
		if !strings.Contains(out, library) {
			t.Errorf("%s is not loaded: %s", library, out)
		}
	}
}

func compile(t *testing.T, cc string, args ...string) {
	t.Helper()
	testenv.NeedsProgram(t, cc)
	run(t, append([]string{cc}, args...)...)
}

// limiterInMusl: the library needs no C library of its own choice.
func limiterInMusl(t *testing.T) {
	machine := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	loader := "/lib/ld-musl-" + machine + ".so.1"
	if _, err := os.Stat(loader); err != nil {
		testenv.Lacks(t, "musl is not installed")
	}
	noTrace(t)
	dir := t.TempDir()
	source := filepath.Join(dir, "maps.c")
	text := "#include <stdio.h>\nint main(void) { char b[4096]; FILE *f = fopen(\"/proc/self/maps\", \"r\");\n" +
		"while (f && fgets(b, sizeof b, f)) fputs(b, stdout); return !f; }\n"
	if err := os.WriteFile(source, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "maps")
	compile(t, "musl-gcc", "-o", program, source)
	c := container{env: sizeOf("1GiB"), opts: []string{"-v", loader + ":" + loader + ":ro", "-v", program + ":/maps:ro"},
		cmd: []string{"/maps"}}
	r := c.try(t)
	if r.Code != 0 || r.Stderr != "" || !strings.Contains(r.Stdout, "libcgpu.so") || !strings.Contains(r.Stdout, "ld-musl") {
		t.Errorf("want the limiter in a program of musl: %s", r)
	}
}
