// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ldcache"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// asHook makes the test binary cgpu-hook, or with the value asKeeper one function of it.
const (
	asHook   = "CGPU_HOOK_TEST_MAIN"
	asKeeper = "keeper"
)

func TestMain(m *testing.M) {
	switch os.Getenv(asHook) {
	case "":
		os.Exit(m.Run())
	case asKeeper:
		if err := keeper(os.Args[1], os.Args[2]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	default:
		main()
	}
}

func TestStaysQuiet(t *testing.T) {
	for _, args := range [][]string{
		{"cgpu-hook"},
		{"cgpu-hook", "prestart"},
		{"/usr/bin/nvidia-container-runtime-hook", "prestart"},
		{"/usr/bin/nvidia-container-runtime-hook", "poststop"},
		{"cgpu-hook", "of-a-newer-version", "--x"},
	} {
		if err := run(args, strings.NewReader(""), &bytes.Buffer{}); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// A share of a GPU that arrives here arrives at the wrong runtime.
func TestAllocatedRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"id=c/1,uuid=GPU-a,memory=6442450944": "was allocated 6144MiB of GPU GPU-a, but does not have the cgpu runtime: set runtimeClassName: " +
			"cgpu",
		"id=c/1,uuid=GPU-a,memory=all": "was allocated GPU GPU-a, but does not",
		"id=c/1,memory=1048576":        "was allocated 1MiB of a GPU, but does not",
		"garbage\n":                    "was allocated a share of a GPU, but does not",
	} {
		err := run([]string{"cgpu-hook", alloc.HookCommand, alloc.AnnotationShares, text}, strings.NewReader("{}"), &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	for _, args := range [][]string{{"cgpu-hook", "allocated"}, {"cgpu-hook", "allocated", "x"}} {
		if run(args, strings.NewReader(""), &bytes.Buffer{}) == nil {
			t.Errorf("%v lets the container start", args)
		}
	}
}

func TestParseJob(t *testing.T) {
	j, err := parseJob([]string{"--root", "/r", "--link", "a.so.1::/lib/a.so", "--lib-dir", "/lib/", "--link", "../b::/x/b", "--lib",
		"0x303::a.so.1::/lib//a.so.1.2", "--mount", "/usr/a.so.1.2::/lib//a.so.1.2"})
	want := job{
		root:      "/r",
		binds:     []bind{{host: "/usr/a.so.1.2", path: "/lib/a.so.1.2"}},
		links:     []device.Link{{Target: "a.so.1", Path: "/lib/a.so"}, {Target: "../b", Path: "/x/b"}},
		libDirs:   []string{"/lib"},
		libraries: []ldcache.Entry{{Name: "a.so.1", Path: "/lib/a.so.1.2", Flags: ldcache.X8664}},
	}
	if diff := cmp.Diff(want, j, cmp.AllowUnexported(job{}, bind{})); err != nil || diff != "" {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
	for _, bad := range [][]string{
		{"--link", "a"}, {"--link", "a::b"}, {"--link", "::/b"}, {"--link", "a::/"}, {"--lib-dir", "x"}, {"--lib-dir", "/x\n/y"},
		{"--lib", "/lib/a.so"}, {"--lib", "::a::/a"}, {"--lib", "0x100000000::a::/a"}, {"--lib", "3::::/a"}, {"--lib", "3::../a::/a"},
		{"--lib", "3::a::a"}, {"--lib", "3::a"}, {"--mount", "/a"}, {"--mount", "a::/b"}, {"--mount", "/a::b"}, {"--mount", "/a::/"},
		{"--root", "r"},
	} {
		if _, err := parseJob(append([]string{"--root", "/r"}, bad...)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// inRoot opens a fresh root.
func inRoot(t *testing.T) (root, string) {
	t.Helper()
	dir := t.TempDir()
	r, err := openRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r, dir
}

// TestStaysInside plants links that lead out of the root and looks for anything that appears outside.
func TestStaysInside(t *testing.T) {
	r, dir := inRoot(t)
	outside := t.TempDir()
	up := strings.Repeat("../", 20)
	for name, target := range map[string]string{"abs": outside, "rel": up + outside[1:], "etc": outside, "magic": "/proc/self/root"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"/abs/l", "/rel/l", "/rel/sub/l", "/etc/ld.so.conf.d/l", "/magic/l", "/" + up + "l"} {
		// Either it fails or it lands inside.
		if err := makeLinks(r, []device.Link{{Target: "target", Path: name}}, io.Discard); err != nil {
			t.Logf("%s: %v", name, err)
		}
		dir, err := r.folder(path.Dir(name))
		if err == nil {
			err = dir.write("l.txt", []byte("text"))
			dir.close()
		}
		if err != nil {
			t.Logf("%s: %v", name, err)
		}
	}
	if entries, _ := os.ReadDir(outside); len(entries) > 0 {
		t.Errorf("outside of the root: %v", entries)
	}
	if _, err := os.Lstat("/l"); err == nil {
		t.Error("/l was made")
	}
}

func TestLink(t *testing.T) {
	r, dir := inRoot(t)
	os.MkdirAll(filepath.Join(dir, "usr/lib"), 0o755)
	os.Symlink("/usr/lib", filepath.Join(dir, "lib")) // absolute, as images have it
	os.WriteFile(filepath.Join(dir, "usr/lib/own.so"), []byte("image"), 0o644)
	os.WriteFile(filepath.Join(dir, "usr/lib/empty.so"), nil, 0o644)
	os.Symlink("old", filepath.Join(dir, "usr/lib/other.so"))
	for range 2 { // restart
		for _, name := range []string{"new.so", "own.so", "empty.so", "other.so", "deep/er/new.so"} {
			if err := makeLinks(r, []device.Link{{Target: "target", Path: "/lib/" + name}}, io.Discard); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, want := range map[string]string{"new.so": "target", "own.so": "", "empty.so": "target", "other.so": "target",
		"deep/er/new.so": "target"} {
		if got, _ := os.Readlink(filepath.Join(dir, "usr/lib", name)); got != want {
			t.Errorf("%s -> %q, want %q", name, got, want)
		}
	}
}

func TestWriteReplacesLink(t *testing.T) {
	r, dir := inRoot(t)
	victim := filepath.Join(t.TempDir(), "victim")
	os.WriteFile(victim, []byte("safe"), 0o644)
	os.Symlink(victim, filepath.Join(dir, "f"))
	f, err := r.folder("/")
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	if err := f.write("f", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(victim); string(text) != "safe" {
		t.Errorf("the link's target has %q", text)
	}
	if text, _ := os.ReadFile(filepath.Join(dir, "f")); string(text) != "new" {
		t.Errorf("have %q", text)
	}
}

// Hooks of several containers are at work in one folder: none fails, and there is a whole file at any time.
func TestWriteAtOnce(t *testing.T) {
	r, dir := inRoot(t)
	const size, hooks, rounds = 8192, 4, 300
	write := func(hook, round int) error {
		f, err := r.folder("/etc")
		if err != nil {
			return err
		}
		defer f.close()
		return f.write("f", bytes.Repeat([]byte{byte(hook), byte(round)}, size/2))
	}
	if err := write(0, 0); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for hook := range hooks {
		all.Go(func() {
			for round := range rounds {
				if err := write(hook, round); err != nil {
					t.Error(err)
					return
				}
				if text, err := os.ReadFile(filepath.Join(dir, "etc/f")); err != nil || len(text) != size {
					t.Errorf("%d bytes, %v", len(text), err)
					return
				}
			}
		})
	}
	all.Wait()
	if left, _ := os.ReadDir(filepath.Join(dir, "etc")); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

// TestSetup runs the whole command, twice, on a root without libraries.
func TestSetup(t *testing.T) {
	bundle := t.TempDir()
	os.MkdirAll(filepath.Join(bundle, "rootfs/drv"), 0o755)
	t.Setenv("CGPU_RUN_DIR", t.TempDir())
	defer unix.Umask(unix.Umask(0o077)) // an engine may have it
	for range 2 {
		state := `{"ociVersion":"1.0.2","id":"x","bundle":"` + bundle + `"}`
		args := []string{"cgpu-hook", "setup", "--root", filepath.Join(bundle, "rootfs"), "--link", "liba.so.1::/drv/liba.so",
			"--lib-dir", "/drv", "--lib", "0x303::liba.so::/drv/liba.so.1"}
		if err := run(args, strings.NewReader(state), os.Stderr); err != nil {
			t.Fatal(err)
		}
	}
	entries, _ := os.ReadDir(filepath.Join(bundle, "rootfs/etc/ld.so.conf.d"))
	if len(entries) != 1 || entries[0].Name() != "00-cgpu.conf" {
		t.Errorf("ld.so.conf.d has %v", entries)
	}
	for _, name := range []string{"etc", "etc/ld.so.conf.d"} {
		if info, err := os.Stat(filepath.Join(bundle, "rootfs", name)); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s is %v, %v", name, info.Mode(), err)
		}
	}
	text, err := os.ReadFile(filepath.Join(bundle, "rootfs/etc/ld.so.cache"))
	if err != nil {
		t.Fatal(err)
	}
	cache, err := ldcache.Parse(text)
	if want := (ldcache.Entry{Name: "liba.so", Path: "/drv/liba.so.1", Flags: ldcache.X8664}); err != nil || len(cache.Entries) != 1 ||
		cache.Entries[0] != want {
		t.Errorf("%+v, %v, want only %+v", cache, err, want)
	}
	if target, _ := os.Readlink(filepath.Join(bundle, "rootfs/drv/liba.so")); target != "liba.so.1" {
		t.Errorf("link to %q", target)
	}
}

// Folders without names of libraries are of a table that an older cgpu-refresh made: that is told.
func TestSetupWithoutNames(t *testing.T) {
	bundle := t.TempDir()
	os.MkdirAll(filepath.Join(bundle, "rootfs/etc"), 0o755)
	defer unix.Umask(unix.Umask(0o022))
	var stderr bytes.Buffer
	args := []string{"cgpu-hook", "setup", "--root", filepath.Join(bundle, "rootfs"), "--lib-dir", "/drv"}
	if err := run(args, strings.NewReader("{}"), &stderr); err != nil {
		t.Fatal(err)
	}
	if strings.Count(stderr.String(), "\n") != 1 || !strings.Contains(stderr.String(), "run cgpu refresh") {
		t.Errorf("stderr: %s", &stderr)
	}
	if text, err := os.ReadFile(filepath.Join(bundle, "rootfs/etc/ld.so.conf.d/00-cgpu.conf")); err != nil || string(text) != "/drv\n" {
		t.Errorf("%q, %v", text, err)
	}
}

func TestReadOnlyRoot(t *testing.T) {
	testenv.NeedsRoot(t, "a read-only mount")
	bundle := t.TempDir()
	dir := filepath.Join(bundle, "rootfs")
	os.Mkdir(dir, 0o755)
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_RDONLY, ""); err != nil {
		testenv.Lacks(t, "cannot mount: %v", err)
	}
	t.Cleanup(func() { syscall.Unmount(dir, 0) })
	t.Setenv("CGPU_RUN_DIR", t.TempDir())
	var stderr bytes.Buffer
	state := strings.NewReader(`{"bundle":"` + bundle + `"}`)
	if err := run([]string{"cgpu-hook", "setup", "--root", dir, "--link", "a::/lib/a.so", "--lib-dir", "/lib", "--lib", "3::a.so::/lib/a.so"},
		state, &stderr); err != nil {
		t.Error(err)
	}
	if strings.Count(stderr.String(), "cgpu-hook: the container starts without: ") != 2 {
		t.Errorf("stderr: %s", &stderr)
	}
}

// TestStarted notes the first process of a container in preload mode.
func TestStarted(t *testing.T) {
	const nonce = "aaaaaaaaaaaaaaaa"
	dir := t.TempDir()
	t.Setenv("CGPU_RUN_DIR", dir)
	book := ledger.Open(dir)
	_, err := book.Reserve(ledger.Request{
		Record: ledger.Record{ID: "c", Nonce: nonce, Preload: true,
			VGPUs: []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}},
		GPUs: []ledger.GPU{{UUID: "GPU-a", Memory: 2 * quota.GiB}},
		Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99},
	})
	if err != nil {
		t.Fatal(err)
	}
	call := func(nonce, state string) error {
		return run([]string{"cgpu-hook", "started", "--id", "c", "--nonce", nonce}, strings.NewReader(state), os.Stderr)
	}
	for other, state := range map[string]string{
		nonce:              `{"pid":0}`,
		"bbbbbbbbbbbbbbbb": `{"pid":1}`, // another reservation
		nonce + "\t":       `{`,
		"":                 `{"pid":1}`,
	} {
		if err := call(strings.TrimSuffix(other, "\t"), state); err == nil {
			t.Errorf("nonce %q, state %s: no error", other, state)
		}
	}
	if r, err := book.Find("c"); err != nil || r.InitPID != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := call(nonce, fmt.Sprintf(`{"ociVersion":"1.0.2","id":"c","pid":%d,"bundle":"/b"}`, os.Getpid())); err != nil {
		t.Fatal(err)
	}
	start, _ := ledger.ProcStart(os.Getpid())
	if r, err := book.Find("c"); err != nil || r.InitPID != os.Getpid() || r.InitStart != start || start == 0 {
		t.Errorf("%+v, %v", r, err)
	}
	// This process is in no container's cgroup: one that was promised the driver's limits must not start without them.
	if err := book.Update(nonce, func(r *ledger.Record) error { r.DriverLimits = true; return nil }); err != nil {
		t.Fatal(err)
	}
	if err := call(nonce, fmt.Sprintf(`{"pid":%d}`, os.Getpid())); err == nil || !strings.Contains(err.Error(), "cgroup") {
		t.Errorf("with the driver's limits: %v", err)
	}
}

func TestRelease(t *testing.T) {
	const first, second = "1111111111111111", "2222222222222222"
	dir := t.TempDir()
	t.Setenv("CGPU_RUN_DIR", dir)
	book := ledger.Open(dir)
	request := ledger.Request{
		Record: ledger.Record{ID: "c", Nonce: second,
			VGPUs: []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}},
		GPUs: []ledger.GPU{{UUID: "GPU-a", Memory: 2 * quota.GiB}},
		Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99},
	}
	if _, err := book.Reserve(request); err != nil {
		t.Fatal(err)
	}
	call := func(nonce string) error {
		return run([]string{"cgpu-hook", "release", "--id", "c", "--nonce", nonce}, strings.NewReader("{}"), os.Stderr)
	}
	for _, nonce := range []string{first, second} {
		if err := page.Create(page.File(dir, nonce), page.Header{}, nil); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(page.PreloadFile(page.File(dir, nonce)), nil, 0o444); err != nil {
			t.Fatal(err)
		}
		// With what a hook of the administrator's may leave in the folder where it runs.
		if err := os.MkdirAll(filepath.Join(page.Bundle(dir, nonce), "notes"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	pages := func(want int) {
		t.Helper()
		if left, _ := os.ReadDir(filepath.Join(dir, "page")); len(left) != want {
			t.Errorf("pages: %v, want %d", left, want)
		}
		if left, _ := os.ReadDir(filepath.Join(dir, "bundle")); len(left) != want {
			t.Errorf("bundles: %v, want %d", left, want)
		}
	}
	if err := call(first); err != nil { // the guard of an earlier start
		t.Error(err)
	}
	pages(1)
	if _, err := book.Find("c"); err != nil {
		t.Error("released by another nonce:", err)
	}
	for range 2 {
		if err := call(second); err != nil {
			t.Error(err)
		}
	}
	if _, err := book.Find("c"); !errors.Is(err, ledger.ErrNotFound) {
		t.Error("not released:", err)
	}
	pages(0)
	for _, bad := range []string{"", "..", "../ledger.json", "/x", "222222222222222/"} {
		if err := call(bad); err == nil {
			t.Errorf("released with nonce %q", bad)
		}
	}
}

// A guard that lives gives back itself, also where another engine has a container of the same ID.
func TestReleaseOfTheSameID(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("CGPU_RUN_DIR", dir)
	book := ledger.Open(dir)
	nonces := []string{"1111111111111111", "2222222222222222"}
	for _, nonce := range nonces {
		if _, err := book.Reserve(ledger.Request{
			Record: ledger.Record{ID: "c", Nonce: nonce, Root: "/run/" + nonce, GuardPID: os.Getpid(),
				VGPUs: []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}},
			GPUs: []ledger.GPU{{UUID: "GPU-a", Memory: 2 * quota.GiB}},
			Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99},
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := run([]string{"cgpu-hook", "release", "--id", "c", "--nonce", nonces[1]}, strings.NewReader("{}"), os.Stderr); err != nil {
		t.Error(err)
	}
	for _, nonce := range nonces {
		if _, err := book.Get(nonce); err != nil {
			t.Error(err)
		}
	}
}

// A guard that is late gives the reservation back itself. In preload mode (the simulated driver's) the page is not its own.
func TestReleaseBesideALateGuard(t *testing.T) {
	const nonce = "1111111111111111"
	for _, preload := range []bool{false, true} {
		dir := t.TempDir()
		t.Setenv("CGPU_RUN_DIR", dir)
		if _, err := ledger.Open(dir).Reserve(ledger.Request{
			Record: ledger.Record{ID: "c", Nonce: nonce, GuardPID: os.Getpid(), Preload: preload,
				VGPUs: []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}},
			GPUs: []ledger.GPU{{UUID: "GPU-a", Memory: 2 * quota.GiB}},
			Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99},
		}); err != nil {
			t.Fatal(err)
		}
		file := page.File(dir, nonce)
		if err := page.Create(file, page.Header{}, nil); err != nil {
			t.Fatal(err)
		}
		if err := run([]string{"cgpu-hook", "release", "--id", "c", "--nonce", nonce}, strings.NewReader("{}"), os.Stderr); err != nil {
			t.Error(err)
		}
		if _, err := ledger.Open(dir).Get(nonce); err != nil {
			t.Errorf("preload %v: released beside a guard that lives: %v", preload, err)
		}
		if _, err := os.Stat(file); preload != errors.Is(err, os.ErrNotExist) {
			t.Errorf("preload %v: the page: %v", preload, err)
		}
	}
}

// TestReleaseBesideALateInit: a container whose first process has not ended altogether is waited for longer: another one of its ID would be
// refused.
func TestReleaseBesideALateInit(t *testing.T) {
	const nonce = "1111111111111111"
	dir := t.TempDir()
	t.Setenv("CGPU_RUN_DIR", dir)
	init := exec.Command("sleep", "1000")
	if err := init.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	time.AfterFunc(2*guardTime, func() {
		_ = init.Process.Kill()
		_ = init.Wait()
		close(ended)
	})
	request := ledger.Request{
		Record: ledger.Record{ID: "c", Nonce: nonce, GuardPID: os.Getpid(), InitPID: init.Process.Pid,
			VGPUs: []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}},
		GPUs: []ledger.GPU{{UUID: "GPU-a", Memory: 2 * quota.GiB}},
		Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99},
	}
	if _, err := ledger.Open(dir).Reserve(request); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{"cgpu-hook", "release", "--id", "c", "--nonce", nonce}, strings.NewReader("{}"), os.Stderr); err != nil {
		t.Error(err)
	}
	request.Record.Nonce, request.Record.InitPID = "2222222222222222", 0
	if _, err := ledger.Open(dir).Reserve(request); err != nil {
		t.Error(err)
	}
	<-ended
}

// Of a guard that was killed, who finds its reservation tells; of one that has ended by itself, nobody needs to.
func TestReleaseOfALostGuard(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("CGPU_RUN_DIR", dir)
	for _, guard := range []int{0, 1 << 29} {
		if _, err := ledger.Open(dir).Reserve(ledger.Request{
			Record: ledger.Record{ID: "c", Nonce: "aaaaaaaaaaaaaaaa", Name: "web", GuardPID: guard, GuardStart: 1, Native: []string{"GPU-a"}},
			GPUs:   []ledger.GPU{{UUID: "GPU-a", Memory: 2 * quota.GiB}},
			Card:   sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99},
		}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := run([]string{"cgpu-hook", "release", "--id", "c", "--nonce", "aaaaaaaaaaaaaaaa"}, strings.NewReader("{}"),
				os.Stderr); err != nil {
				t.Fatal(err)
			}
		}
		list, err := event.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if guard == 0 {
			if len(list) != 0 {
				t.Errorf("without a guard: %+v", list)
			}
			continue
		}
		if len(list) != 2 || list[0].Kind != event.Warning || list[0].PID != guard || list[1].Kind != event.End || list[1].Container != "c" ||
			list[1].Name != "web" || list[1].Nonce != "aaaaaaaaaaaaaaaa" {
			t.Errorf("%+v", list)
		}
	}
}

// TestReadsTheState: crun writes the container's state to a hook and dies of SIGPIPE if that has ended meanwhile.
func TestReadsTheState(t *testing.T) {
	t.Setenv("CGPU_RUN_DIR", t.TempDir())
	for _, args := range [][]string{{"release", "--id", "c", "--nonce", "aaaaaaaaaaaaaaaa"}, {"prestart"}, {"started"},
		{"one of a newer version"}} {
		state := strings.NewReader(`{"id":"c"}` + strings.Repeat(" ", 1<<16))
		_ = run(append([]string{"cgpu-hook"}, args...), state, io.Discard)
		if state.Len() > 0 {
			t.Errorf("%s: %d bytes are unread", args[0], state.Len())
		}
	}
}

// TestReleaseTellsName: what Docker calls a container is in its record alone, which goes with the container.
func TestReleaseTellsName(t *testing.T) {
	const id, nonce = "0123456789ab", "1111111111111111"
	dir, records, bundle := t.TempDir(), filepath.Join(t.TempDir(), id), t.TempDir()
	t.Setenv("CGPU_RUN_DIR", dir)
	if err := os.Mkdir(records, 0o700); err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{
		filepath.Join(bundle, "config.json"): fmt.Sprintf(`{"mounts":[{"destination":"/etc/hostname","source":%q}]}`,
			filepath.Join(records, "hostname")),
		filepath.Join(records, "config.v2.json"): fmt.Sprintf(`{"ID":%q,"Name":"/web"}`, id),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, state := range []string{fmt.Sprintf(`{"id":%q,"bundle":%q}`, id, bundle),
		fmt.Sprintf(`{"id":"other","bundle":%q}`, bundle), "{}", ""} {
		if err := run([]string{"cgpu-hook", "release", "--id", id, "--nonce", nonce}, strings.NewReader(state), os.Stderr); err != nil {
			t.Error(err)
		}
	}
	list, err := event.Read(dir)
	if err != nil || len(list) != 1 || list[0].Kind != event.Deleted || list[0].Container != id || list[0].Nonce != nonce ||
		list[0].Name != "web" {
		t.Errorf("%+v, %v", list, err)
	}
}
