// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestMain lets the test's program be the child that a kernel is tried with.
func TestMain(m *testing.M) {
	if os.Getenv("CGPU_DOCTOR_TEST_CHILD") != "" {
		os.Exit(KernelChild(os.Stdout))
	}
	os.Exit(m.Run())
}

// files makes a root folder of texts.
func files(t *testing.T, texts map[string]string) *Host {
	t.Helper()
	root := t.TempDir()
	for path, text := range texts {
		path = filepath.Join(root, path)
		mode := os.FileMode(0o644)
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	return &Host{Root: root, RunDir: filepath.Join(root, "run/cgpu"), ConfigFile: filepath.Join(root, "etc/cgpu/cgpu.toml"),
		Bin: filepath.Join(root, "bin"), config: config.Default()}
}

// expect compares a result: its status, and a part of what it says.
func expect(t *testing.T, what string, got Result, status Status, says string) {
	t.Helper()
	if got.Status != status || !strings.Contains(got.Found+" → "+got.Remedy, says) || strings.Contains(got.Found, "\n") {
		t.Errorf("%s:\n got %s: %s → %s\nwant %s: …%s…", what, got.Status, got.Found, got.Remedy, status, says)
	}
}

func TestExamine(t *testing.T) {
	one := func(name string, r Result) Check {
		return Check{Name: name, Remedy: "the check's", Run: func(*Host) Result { return r }}
	}
	r := Examine(&Host{}, []Check{one("a", ok("good")), one("b", warn("so\nso")), one("c", skip("no")), one("d", warn("x").but("its own"))})
	want := []Result{{Name: "a", Status: OK, Found: "good"}, {Name: "b", Status: Warn, Found: "so so", Remedy: "the check's"},
		{Name: "c", Status: Skip, Found: "no"}, {Name: "d", Status: Warn, Found: "x", Remedy: "its own"}}
	if r.Status != Warn || !reflect.DeepEqual(r.Checks, want) {
		t.Errorf("got %+v", r)
	}
	for status, list := range map[Status][]Check{
		OK:   {one("a", ok("")), one("b", skip(""))},
		Fail: {one("a", fail("")), one("b", warn("")), one("c", ok(""))},
	} {
		if got := Examine(&Host{}, list).Status; got != status {
			t.Errorf("%s of %+v", got, list)
		}
	}
}

// TestChecks: a name is one word and one check's, and whoever fails can say what to do.
func TestChecks(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range slices.Concat(Checks(), []Check{SelfTest()}, Measurements()) {
		if c.Name == "" || strings.ContainsAny(c.Name, " |") || seen[c.Name] || c.Means == "" || c.Remedy == "" || c.Run == nil {
			t.Errorf("%+v", c)
		}
		seen[c.Name] = true
	}
}

// TestKernelHere plays container and guard on this machine. Sandboxes without seccomp or pidfd_getfd say so.
func TestKernelHere(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := &Host{Root: "/", Try: func(ctx context.Context, what string) (*exec.Cmd, error) {
		cmd := exec.CommandContext(ctx, self)
		cmd.Env = append(os.Environ(), "CGPU_DOCTOR_TEST_CHILD="+what)
		return cmd, nil
	}}
	r, err := h.tryKernel()
	if err != nil {
		t.Fatal(err)
	}
	release, _ := h.text("/proc/sys/kernel/osrelease")
	kernel := version.MustParseGeneric(release)
	for what, why := range map[string]string{"notify": r.Notify, "getfd": r.GetFD, "memory": r.ReadMemory, "openat2": r.Openat2} {
		if strings.Contains(why, "not permitted") || strings.Contains(why, "not implemented") {
			testenv.Lacks(t, "this machine forbids it: %s: %s", what, why)
		}
		if why != "" {
			t.Errorf("%s: %s", what, why)
		}
	}
	if kernel.Major() >= 7 && (r.WaitKillable != "" || r.SyncWakeUp != "" || r.ThreadPidfd != "") {
		t.Errorf("Linux %s: %+v", release, r)
	}
	// A child that is none.
	h.Try = func(ctx context.Context, _ string) (*exec.Cmd, error) {
		return exec.CommandContext(ctx, "/bin/echo", "no"), nil
	}
	if _, err := h.tryKernel(); err == nil || !strings.Contains(err.Error(), `"no"`) {
		t.Errorf("a child that says nonsense: %v", err)
	}
	h.Try = func(context.Context, string) (*exec.Cmd, error) { return nil, errors.New("no child") }
	expect(t, "no child", kernelCheck("x", Fail, "", func(KernelReport) string { return "" })(h), Fail, "no child")
}

func TestKernelChecks(t *testing.T) {
	report := &KernelReport{Notify: "EINVAL", SyncWakeUp: "EINVAL"}
	h := &Host{kernel: report, config: config.Default()}
	find := func(name string) func(*Host) Result {
		for _, c := range kernelChecks {
			if c.Name == name {
				return c.Run
			}
		}
		t.Fatal(name)
		return nil
	}
	expect(t, "refused", find("seccomp-notify")(h), Fail, "EINVAL")
	expect(t, "not there", find("sync-wake-up")(h), Warn, "take longer")
	expect(t, "there", find("openat2")(h), OK, "works")
	h.config.Settings.Enforcement = device.EnforcePreload
	h.loaded, h.tableErr = true, device.ErrMissing
	expect(t, "refused, in preload mode", find("seccomp-notify")(h), Warn, "does without")
}

func TestKernelFiles(t *testing.T) {
	for _, tt := range []struct {
		name   string
		files  map[string]string
		run    func(*Host) Result
		status Status
		says   string
	}{
		{"new", map[string]string{"proc/sys/kernel/osrelease": "6.8.0-31-generic\n"}, checkKernel, OK, "6.8.0"},
		{"just enough", map[string]string{"proc/sys/kernel/osrelease": "5.9.0"}, checkKernel, OK, "5.9.0"},
		{"old", map[string]string{"proc/sys/kernel/osrelease": "5.4.0-100"}, checkKernel, Fail, "needs 5.9"},
		{"older", map[string]string{"proc/sys/kernel/osrelease": "4.19.0"}, checkKernel, Fail, "needs 5.9"},
		{"no number", map[string]string{"proc/sys/kernel/osrelease": "linux"}, checkKernel, Warn, `"linux"`},
		{"no /proc", nil, checkKernel, Warn, "cannot be read"},
		{"no yama", nil, checkYama, OK, "no Yama"},
		{"yama 1", map[string]string{"proc/sys/kernel/yama/ptrace_scope": "1\n"}, checkYama, OK, "1"},
		{"yama 3", map[string]string{"proc/sys/kernel/yama/ptrace_scope": "3\n"}, checkYama, Fail, "ptrace_scope is 3"},
		{"v2", map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpu", "sys/fs/cgroup/cpu.stat": "usage_usec 1"}, checkCgroup, OK, "v2"},
		{"v2, strange", map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpu"}, checkCgroup, Warn, "without cpu.stat"},
		{"v1", map[string]string{"sys/fs/cgroup/cpuacct/cpuacct.usage": "1", "sys/fs/cgroup/devices/x": ""}, checkCgroup, OK, "v1"},
		{"v1 without devices", map[string]string{"sys/fs/cgroup/cpuacct/cpuacct.usage": "1"}, checkCgroup, Warn, "devices controller"},
		{"none", nil, checkCgroup, Warn, "neither"},
		{"hmm off", map[string]string{"sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "Y\n"}, checkHMM, OK, "off"},
		{"hmm on", map[string]string{"sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "N\n"}, checkHMM, Warn, "uncounted"},
		{"no uvm", nil, checkHMM, Skip, "not loaded"},
		{"counters off", map[string]string{"proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"}, checkCounters, OK, "off"},
		{"counters off", map[string]string{"proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"}, checkCounters, OK, "off"},
		{"no driver", nil, checkDriver, Fail, "no NVIDIA driver"},
		{"known driver",
			map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release " +
				"Build\nGCC version: 12.2.0\n"}, checkDriver, OK, "580.159.04, open modules"},
		{"closed driver",
			map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.86.05  Fri Jul 14\n"},
			checkDriver, OK, "proprietary"},
		{"new driver",
			map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  600.10.01  Release Build\n"},
			checkDriver, Fail, "600 is not known"},
		{"damaged version", map[string]string{"proc/driver/nvidia/version": "NVRM version:"}, checkDriver, Fail, "no version"},
		{"MIG", map[string]string{"proc/driver/nvidia/capabilities/gpu0/mig/gi1/access": ""}, checkMIG, Warn, "1 MIG instance"},
		{"MIG mode", map[string]string{"usr/bin/nvidia-smi": "#!/bin/sh\necho Disabled\necho Enabled\n"}, checkMIG, Warn, "GPU 1"},
		{"no MIG", map[string]string{"usr/bin/nvidia-smi": "#!/bin/sh\necho Disabled\n"}, checkMIG, OK, "off"},
		{"persistent", map[string]string{"var/run/nvidia-persistenced/socket": ""}, checkPersistence, OK, "persistenced"},
		{"not persistent", map[string]string{"usr/bin/nvidia-smi": "#!/bin/sh\necho Enabled\necho Disabled\n"}, checkPersistence, Warn, "GPU 1"},
		{"nobody knows", nil, checkPersistence, Skip, "not installed"},
		{"GSP", map[string]string{"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nGPU Firmware: \t 580.159.04\n"},
			checkGSP, OK, "580.159.04"},
		{"no GSP", map[string]string{"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: Tesla V100\nGPU Firmware: \t N/A\n"}, checkGSP,
			Warn, "0000:01:00.0"},
		{"no GPU", nil, checkGSP, Skip, "no GPU"},
	} {
		h := files(t, tt.files)
		h.loaded, h.tableErr = true, device.ErrMissing
		expect(t, tt.name, tt.run(h), tt.status, tt.says)
	}
}

// Counters that cgpu.toml allows are of no use where the driver keeps them from guards.
func TestCounters(t *testing.T) {
	for _, tt := range []struct {
		params string
		status Status
		says   string
	}{
		{"RmProfilingAdminOnly: 1\nRmMsg: \"\"\n", Warn, "CAP_SYS_ADMIN"},
		{"RmProfilingAdminOnly: 0\n", OK, "on"},
		{"", OK, "on"},
	} {
		h := files(t, map[string]string{"proc/driver/nvidia/params": tt.params})
		h.loaded, h.tableErr = true, device.ErrMissing
		h.config.Settings.Profiling = true
		expect(t, tt.params, checkCounters(h), tt.status, tt.says)
	}
}

func TestRuntime(t *testing.T) {
	const features = `#!/bin/sh
case $1 in --version) echo "runc version 1.1.5" ;; features) echo '{"linux":{"seccomp":{"enabled":true,"actions":["SCMP_ACT_ALLOW","SCMP_ACT_NOTIFY"]}}}' ;; esac
`
	for _, tt := range []struct {
		name     string
		files    map[string]string
		runtimes []string
		found    Status
		seccomp  Status
		says     string
	}{
		{"runc", map[string]string{"usr/sbin/runc": features}, []string{"runc", "crun"}, OK, OK, "SCMP_ACT_NOTIFY"},
		{"by path", map[string]string{"opt/runc": features}, []string{"/opt/runc"}, OK, OK, "SCMP_ACT_NOTIFY"},
		{"none", nil, []string{"runc", "crun"}, Fail, Skip, "no runtime"},
		{"not executable", map[string]string{"usr/bin/runc": "x"}, []string{"runc"}, Fail, Skip, "no runtime"},
		{"broken", map[string]string{"usr/bin/runc": "#!/bin/sh\nexit 1\n"}, []string{"runc"}, Fail, Skip, "no runtime"},
		{"old crun", map[string]string{"usr/bin/crun": "#!/bin/sh\n[ $1 = --version ] && printf 'crun version 1.8.1\\n+SYSTEMD +SECCOMP\\n'\n"},
			[]string{"runc", "crun"}, OK, OK, "crun with seccomp"},
		{"old runc", map[string]string{"usr/bin/runc": "#!/bin/sh\n[ $1 = --version ] && echo runc version 1.0.3\n"},
			[]string{"runc"}, OK, Fail, "1.0.3"},
	} {
		h := files(t, tt.files)
		h.loaded, h.tableErr = true, device.ErrMissing
		h.config.Settings.Runtimes = tt.runtimes
		expect(t, tt.name, checkRuntime(h), tt.found, "")
		expect(t, tt.name, checkRuntimeSeccomp(h), tt.seccomp, tt.says)
	}
	for text, want := range map[string]Status{
		`{"linux":{"seccomp":{"enabled":false}}}`:                                                                       Fail,
		`{"linux":{"seccomp":{"actions":["SCMP_ACT_ALLOW"]}}}`:                                                          Fail,
		`{"linux":{"seccomp":{"actions":["SCMP_ACT_NOTIFY"],"knownFlags":["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"]}}}`: OK,
	} {
		if r, known := judgeFeatures("runc", text); !known || r.Status != want {
			t.Errorf("%s: %+v", text, r)
		}
	}
	for _, text := range []string{"", "{}", `{"linux":{}}`, "runc: no such command"} {
		if r, known := judgeFeatures("runc", text); known {
			t.Errorf("%q: %+v", text, r)
		}
	}
	expect(t, "crun without", judgeVersion("crun version 1.8\n+SYSTEMD"), Fail, "+SECCOMP")
	expect(t, "another", judgeVersion("youki version 0.3"), Warn, "self-test")
}

func TestTrials(t *testing.T) {
	good := []gpusched.Trial{{What: gpusched.TryClient}, {What: gpusched.TryGroup}, {What: gpusched.TryClient, GPU: 1},
		{What: gpusched.TryGroup, GPU: 1}}
	expect(t, "good", judgeTrials(TrialReport{Trials: good}), OK, "client, group on 2 GPUs")
	for what, status := range map[string]Status{gpusched.TryClient: Fail, gpusched.TryTimeslice: Fail, gpusched.TryGroup: Warn,
		gpusched.TryPause: Warn, gpusched.TrySwitches: Warn} {
		expect(t, what, judgeTrials(TrialReport{Trials: append(good, gpusched.Trial{What: what, GPU: 1, Refused: "because"})}), status,
			"GPU 1: "+what+": because (")
	}
	// A warning after a failure does not hide it.
	expect(t, "both", judgeTrials(TrialReport{Trials: []gpusched.Trial{{What: gpusched.TryTimeslice, Refused: "a"},
		{What: gpusched.TryPause, Refused: "b"}}}), Fail, "b")
	expect(t, "none", judgeTrials(TrialReport{Err: "no driver"}), Fail, "no driver")
}

func TestMemory(t *testing.T) {
	const g = quota.GiB
	half := device.Config{MaxSpill: device.Part{Percent: 50}, SpillReserve: device.Part{Percent: 10}}
	for _, tt := range []struct {
		name                    string
		c                       device.Config
		total, available, given quota.Bytes
		status                  Status
		says                    string
	}{
		{"nothing spilled", half, 100 * g, 20 * g, 0, OK, "0MiB are promised"},
		{"some", half, 100 * g, 60 * g, 40 * g, OK, "40960MiB are promised"},
		{"more than there is", half, 100 * g, 30 * g, 40 * g, Warn, "refused before that"},
		{"more than allowed", half, 100 * g, 90 * g, 60 * g, Warn, "max_spill is 51200MiB"},
		{"not known", half, 0, 0, 0, Warn, "cgpu refresh"},
		{"too large", device.Config{MaxSpill: device.Part{Bytes: 200 * g}}, 100 * g, 90 * g, 0, Warn, "more than the host's"},
		{"all but the reserve", device.Config{MaxSpill: device.Part{Percent: 90}, SpillReserve: device.Part{Percent: 10}},
			100 * g, 90 * g, 0, OK, ""},
	} {
		expect(t, tt.name, judgeMemory(tt.c, tt.total, tt.available, tt.given), tt.status, tt.says)
	}
	for text, want := range map[string]quota.Bytes{
		"MemTotal: 100 kB\nMemAvailable:   64 kB\n": 64 * quota.KiB, "MemAvailable: x kB": 0, "MemAvailable: 64": 0, "": 0,
		"MemAvailable: 99999999999999999999999 kB": 0,
	} {
		if got := memAvailable(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func TestGuards(t *testing.T) {
	expect(t, "none", judgeGuards(nil), OK, "no container runs")
	expect(t, "one", judgeGuards([]Container{{Name: "a", State: "running"}, {Name: "b", State: "gone", Dead: true, Bad: true}}), OK, "the one")
	expect(t, "alone", judgeGuards([]Container{{Name: "a", State: "running"}, {Name: "b", State: "running", Alone: true}}),
		Warn, "GPU time of b")
	expect(t, "dead", judgeGuards([]Container{{Name: "a", State: "running"}, {Name: "b", State: "guard dead", Bad: true}}),
		Fail, "b: guard dead")
}

func TestLeftovers(t *testing.T) {
	used := map[string]bool{"0123456789abcdef": true}
	for name, want := range map[string]bool{
		"0123456789abcdef.sock": false, "fedcba9876543210.sock": true, "fedcba9876543210": true, "fedcba9876543210.pause": true,
		"fedcba9876543210.txt": false, "fedcba98.sock": false, "README": false, "FEDCBA9876543210.ctl": false,
	} {
		if leftover(name, used) != want {
			t.Errorf("%s: want %v", name, want)
		}
	}
}

func TestPrograms(t *testing.T) {
	all := map[string]string{}
	for _, name := range ours {
		all["bin/"+name] = "#!/bin/sh\n# v1.2.3\n"
	}
	h := files(t, all)
	h.loaded, h.tableErr, h.Version, h.UID = true, device.ErrMissing, "v1.2.3", os.Getuid()
	expect(t, "all", checkPrograms(h), OK, "version v1.2.3")
	h.Version = "v1.2.4"
	expect(t, "another version", checkPrograms(h), Warn, "v1.2.4, but not cgpu-runtime and cgpu-refresh")
	h.Version = "unknown"
	expect(t, "no version", checkPrograms(h), OK, "")
	for _, mode := range []os.FileMode{0o757, 0o775} {
		if err := os.Chmod(filepath.Join(h.Bin, "cgpu-guard"), mode); err != nil {
			t.Fatal(err)
		}
		expect(t, "writable", checkPrograms(h), Fail, "write cgpu-guard")
	}
	if err := os.Chmod(filepath.Join(h.Bin, "cgpu-guard"), 0o755); err != nil {
		t.Fatal(err)
	}
	for mode, want := range map[os.FileMode]Status{0o757: Fail, 0o757 | os.ModeSticky: OK} {
		if err := os.Chmod(h.Root, mode); err != nil { // the folder above
			t.Fatal(err)
		}
		expect(t, mode.String(), checkPrograms(&Host{Root: h.Root, RunDir: h.RunDir, Bin: h.Bin, loaded: true, tableErr: h.tableErr, UID: h.UID,
			config: h.config, Version: "unknown"}), want, "")
	}
	if err := os.Chmod(h.Root, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(h.Bin, "cgpu-guard")); err != nil {
		t.Fatal(err)
	}
	expect(t, "missing", checkPrograms(h), Fail, "lacks cgpu-guard")
	expect(t, "mixed", judgePrograms("/bin", "v1", nil, nil, map[string][]string{"a": {"cgpu"}, "b": {"cgpu-hook"}}), Warn,
		"cgpu of a; cgpu-hook of b")
}

func TestState(t *testing.T) {
	h := files(t, map[string]string{"etc/cgpu/cgpu.toml": "max_inst = 3\n", "run/cgpu/page/fedcba9876543210": ""})
	expect(t, "good", checkConfig(h), OK, "cgpu.toml")
	expect(t, "no table", checkTable(h), Warn, "not made yet")
	expect(t, "no records", checkLedger(h), OK, "0 containers")
	expect(t, "young", checkLeftovers(h), OK, "none")
	old := h.RunDir + "/page/fedcba9876543210"
	if err := exec.Command("touch", "-d", "1 hour ago", old).Run(); err != nil {
		t.Fatal(err)
	}
	expect(t, "old", checkLeftovers(h), Warn, "1 file")
	expect(t, "no limiter", checkLimiter(h), Warn, "not beside")
	h.config.Settings.Enforcement = device.EnforcePreload
	expect(t, "no limiter in preload mode", checkLimiter(h), Fail, "no container")
	expect(t, "preload", checkEnforcement(h), Warn, "walked around")
	smi := files(t, map[string]string{"usr/bin/nvidia-smi": "#!/bin/sh\necho Disabled\n"})
	for setting, word := range map[string]string{device.EnforceGuard: "and memory by NVIDIA's driver, too",
		device.EnforcePreload: `, too (limits = "both")`,
		device.EnforceDriver:  "memory alone is limited"} {
		h.config.Settings.Enforcement, h.config.Settings.DriverLimits = setting, true
		want := Warn
		if setting == device.EnforceGuard {
			want = OK
		}
		expect(t, setting+" and the driver", checkEnforcement(h), want, word)
		smi.config.Settings = h.config.Settings
		expect(t, "limits that would be forgotten", checkPersistence(smi), Fail, "forgets the limits of containers")
	}
	h.config.Settings.Enforcement = device.EnforceDriver
	expect(t, "no limiter wanted", checkLimiter(h), Skip, "no container loads")
	h = files(t, map[string]string{"etc/cgpu/cgpu.toml": "max_isnt = 3\n", "run/cgpu/node.json": "{", "run/cgpu/ledger.json": "{"})
	expect(t, "misspelt", checkConfig(h), Fail, "max_isnt")
	expect(t, "damaged table", checkTable(h), Warn, "stale")
	expect(t, "damaged ledger", checkLedger(h), Fail, "damaged")
	expect(t, "leftovers beside a damaged ledger", checkLeftovers(h), Skip, "could not be read")
	expect(t, "guards beside a damaged ledger", checkGuards(h), Skip, "could not be read")
	h = files(t, nil)
	expect(t, "no file", checkConfig(h), OK, "defaults")
	h.UID = 1000
	expect(t, "rights", checkRights(h), Warn, "not root")
	expect(t, "self-test", checkSelf(h), Fail, "needs root")
}

// TestDead: a record whose container is gone is worth a line.
func TestDead(t *testing.T) {
	h := files(t, nil)
	h.RunDir = t.TempDir()
	book := ledger.Open(h.RunDir)
	uuid := "GPU-00000000-0000-0000-0000-000000000000"
	_, err := book.Reserve(ledger.Request{Record: ledger.Record{ID: "a", Nonce: "0123456789abcdef", LauncherPID: os.Getpid(),
		VGPUs: []ledger.VGPU{{UUID: uuid, Slice: quota.Slice{Limit: quota.MiB, Share: quota.Share{Weight: 1}}}}},
		GPUs: []ledger.GPU{{UUID: uuid, Memory: quota.GiB}}, Card: config.Default().Settings.Card()})
	if err != nil {
		t.Fatal(err)
	}
	dead := true
	h.Containers = func(_ *device.Table, list []ledger.Record) []Container {
		return []Container{{Name: list[0].ID, State: "gone", Dead: dead}}
	}
	expect(t, "gone", checkLedger(h), Warn, "1 container is gone, but in the ledger: a")
	dead = false
	expect(t, "there", checkLedger(h), OK, "1 container")
	expect(t, "its guard", checkGuards(h), OK, "the one")
}

func TestRoomy(t *testing.T) {
	table := &device.Table{GPUs: []device.GPU{{UUID: "a", Memory: quota.GiB}, {UUID: "b", Memory: quota.GiB}},
		Config: device.Config{Overcommit: 1, MaxInst: 2}}
	record := func(uuid string, limit quota.Bytes) ledger.Record {
		return ledger.Record{VGPUs: []ledger.VGPU{{UUID: uuid, Slice: quota.Slice{Limit: limit}}}}
	}
	full := []ledger.Record{record("a", 700*quota.MiB), {Native: []string{"b"}}}
	for _, tt := range []struct {
		records []ledger.Record
		want    bool
	}{
		{nil, true},
		{full, false},
		{full[:1], true},
		{full[1:], true},
		{[]ledger.Record{record("a", 1), record("a", 1), record("b", 1), record("b", 1)}, false},
	} {
		if roomy(table, tt.records) != tt.want {
			t.Errorf("%+v: want %v", tt.records, tt.want)
		}
	}
}

// TestProgram: what CRI-O's packages bring is found where cgpu-runtime finds it, behind all that is in PATH.
func TestProgram(t *testing.T) {
	h := &Host{Root: t.TempDir(), Path: "/opt/bin"}
	for _, dir := range []string{"usr/libexec/crio", "usr/sbin", "opt/bin"} {
		path := filepath.Join(h.Root, dir, "crun")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			t.Fatal(err)
		}
		if got := h.program("crun"); got != path {
			t.Errorf("%q, want %q", got, path)
		}
	}
}

// Who is not root cannot read the table: that is no fault of the node's.
func TestTableNeedsRoot(t *testing.T) {
	denied := fmt.Errorf("device: %w", &fs.PathError{Op: "open", Path: "/x", Err: syscall.EACCES})
	expect(t, "a user", checkTable(&Host{UID: 1000, loaded: true, tableErr: denied}), Skip, "needs root")
	expect(t, "root", checkTable(&Host{loaded: true, tableErr: denied}), Fail, "permission denied")
}
