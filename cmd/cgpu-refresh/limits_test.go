// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
)

// fakeNVML is a library that keeps limits in a file for each cgroup and GPU, as the driver does; -DOLD is one before 615.
const fakeNVML = `
#include <stdio.h>
#include <string.h>
struct set { const char *cgroup; unsigned long long soft, hard; };
struct get { const char *cgroup; unsigned long long soft, hard, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
const char *nvmlErrorString(int ret) { return ret == 17 ? "no cgroup" : "no GPU"; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *v, unsigned n) { snprintf(v, n, VERSION); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **d) {
	static char known[2][8] = {"GPU-a", "GPU-b"};
	for (int i = 0; i < 2; i++)
		if (!strcmp(uuid, known[i])) { *d = known[i]; return 0; }
	return 6;
}
int nvmlDeviceGetPersistenceMode(void *d, int *mode) { *mode = PERSISTENT; return 0; }
#ifndef OLD
static FILE *file(const char *cgroup, void *d, const char *mode) {
	char path[4096];
	snprintf(path, sizeof path, "%s/%s", cgroup, (char *)d);
	return fopen(path, mode);
}
int nvmlDeviceSetMemoryLimits_v1(void *d, struct set *l) {
	FILE *f = file(l->cgroup, d, "w");
	if (!f) return 17;
	fprintf(f, "%llu %llu", l->soft, l->hard);
	return fclose(f);
}
int nvmlDeviceGetMemoryLimits_v1(void *d, struct get *l) {
	FILE *f = file(l->cgroup, d, "r");
	if (!f || fscanf(f, "%llu %llu", &l->soft, &l->hard) != 2) return 6;
	return fclose(f);
}
#endif
`

// fakeDriver is the root of such a driver.
func fakeDriver(t *testing.T, version string, flags ...string) string {
	t.Helper()
	dir := t.TempDir()
	lib := filepath.Join(dir, "usr/lib64")
	if err := os.MkdirAll(lib, 0o755); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(flags, "-DPERSISTENT=0") {
		flags = append(flags, "-DPERSISTENT=1")
	}
	args := append(flags, "-shared", "-fPIC", `-DVERSION="`+version+`"`, "-x", "c", "-o", filepath.Join(lib, nvmlFile), "-")
	cc := exec.Command("gcc", args...)
	cc.Stdin = strings.NewReader(fakeNVML)
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	return dir
}

// TestLimitCgroup goes through go-nvml to a library that looks like NVIDIA's.
func TestLimitCgroup(t *testing.T) {
	v2, v1 := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(v2, "cgroup.controllers"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	leaf := filepath.Join(v2, "leaf")
	if err := os.Mkdir(leaf, 0o755); err != nil {
		t.Fatal(err)
	}
	newer, older := fakeDriver(t, "615.71.09"), fakeDriver(t, "580.142", "-DOLD")
	forgets := fakeDriver(t, "615.71.09", "-DPERSISTENT=0")
	for _, tt := range []struct {
		driver, cgroups, cgroup string
		limits                  []string
		want                    string
	}{
		{newer, v2, leaf, []string{"GPU-a=1073741824", "GPU-b=7"}, ""},
		{older, v2, leaf, []string{"GPU-a=1"}, `limits = "both" in cgpu.toml: driver 580.142 has no memory limits of its own: want 615 or newer`},
		{forgets, v2, leaf, []string{"GPU-a=1"}, "GPU GPU-a, cgroup " + leaf + ": persistence mode: it is off"},
		{newer, v1, leaf, []string{"GPU-a=1"}, "cgroups of v2 only"},
		{newer, v2, v2 + "/none", []string{"GPU-a=1"}, "GPU GPU-a, cgroup " + v2 + "/none: limit: 1 bytes are refused: no cgroup"},
		{newer, v2, leaf, []string{"GPU-c=1"}, "GPU GPU-c, cgroup " + leaf + ": handle: no GPU"},
		{newer, v2, leaf, []string{"GPU-a=0"}, `limit "GPU-a=0": want UUID=BYTES`},
		{newer, v2, leaf, []string{"GPU-a"}, `want UUID=BYTES`},
		{newer, v2, leaf, []string{"GPU-a=18446744073709551615"}, `want UUID=BYTES`},
	} {
		cmd := exec.Command(os.Args[0], append([]string{tt.driver, tt.cgroups, tt.cgroup}, tt.limits...)...)
		cmd.Args[0] = asLimiter
		out, err := cmd.CombinedOutput()
		if (err == nil) != (tt.want == "") || !strings.Contains(string(out), tt.want) {
			t.Errorf("%v: %v %s, want %q", tt.limits, err, out, tt.want)
		}
	}
	for gpu, want := range map[string]string{"GPU-a": "0 1073741824", "GPU-b": "0 7"} {
		if got, err := os.ReadFile(filepath.Join(leaf, gpu)); string(got) != want {
			t.Errorf("%s: soft and hard %s, want %s (%v)", gpu, got, want, err)
		}
	}
}

// TestLimitDriverRoot: a hook has none of the engine's environment, and its driver is that of the table all the same.
func TestLimitDriverRoot(t *testing.T) {
	root, runDir := fakeDriver(t, "580.142", "-DOLD"), t.TempDir()
	table := device.Table{Version: device.TableVersion, Driver: device.DriverNVIDIA, DriverRoot: root, Config: config.Default().Settings,
		Key: device.Key{ConfigFile: "/srv/engine/cgpu.toml"}}
	if err := table.Save(runDir); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], t.TempDir(), "GPU-a=1")
	cmd.Args[0], cmd.Env = asLimiter, []string{"CGPU_RUN_DIR=" + runDir}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "driver 580.142 has no memory limits") {
		t.Errorf("%v %s, want the driver of %s", err, out, root)
	}
}

// TestLimitNotHeld: a driver that takes a limit and does not have it afterwards is found out.
func TestLimitNotHeld(t *testing.T) {
	const asked = 5000
	for _, tt := range []struct {
		hard uint64
		ret  nvml.Return
		want string
	}{
		{5000, nvml.SUCCESS, ""},
		{4096, nvml.SUCCESS, ""}, // rounded down
		{nvml.DEVICE_MEMORY_LIMIT_MAX, nvml.SUCCESS, "5000 bytes were set, and 18446744073709551615 are in force"},
		{0, nvml.ERROR_NOT_FOUND, "cannot be read back"},
	} {
		d := &mock.Device{
			GetPersistenceModeFunc: func() (nvml.EnableState, nvml.Return) { return nvml.FEATURE_ENABLED, nvml.SUCCESS },
			SetMemoryLimits_v1Func: func(cgroup string, soft, hard uint64) nvml.Return {
				if cgroup != "/c" || soft != 0 || hard != asked {
					t.Errorf("set %s %d %d", cgroup, soft, hard)
				}
				return nvml.SUCCESS
			},
			GetMemoryLimits_v1Func: func(string) (nvml.MemoryLimits_v1, nvml.Return) {
				return nvml.MemoryLimits_v1{HardLimit: tt.hard}, tt.ret
			},
		}
		lib := &mock.Interface{DeviceGetHandleByUUIDFunc: func(string) (nvml.Device, nvml.Return) { return d, nvml.SUCCESS }}
		err := setLimit(lib, "/c", fmt.Sprintf("GPU-a=%d", asked))
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%d: %v, want %q", tt.hard, err, tt.want)
		}
	}
}

// TestHasLimits: the table is not made where the driver's limits are wanted and it has none.
func TestHasLimits(t *testing.T) {
	lib := &mock.Interface{SystemGetDriverVersionFunc: func() (string, nvml.Return) { return "595.45.04", nvml.SUCCESS }}
	lacks := func(symbol string) error {
		if strings.Contains(symbol, "Set") {
			return nil
		}
		return errors.New("no symbol")
	}
	for want, has := range map[string]func(string) error{
		`limits = "driver" in cgpu.toml: driver 595.45.04 has no memory limits`: lacks,
		`limits = "driver" in cgpu.toml: the driver limits cgroups of v2 only`:  known,
	} {
		if err := hasLimits(lib, device.LimitsDriver, has, t.TempDir()); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// TestLimitsAnswers: what is used of a limit, where there is one and the driver tells. No GPU is woken for it.
func TestLimitsAnswers(t *testing.T) {
	var asked []string
	d := &mock.Device{GetMemoryLimits_v1Func: func(cgroup string) (nvml.MemoryLimits_v1, nvml.Return) {
		asked = append(asked, cgroup)
		if cgroup != "/cgroups/a b" {
			return nvml.MemoryLimits_v1{}, nvml.ERROR_NOT_FOUND
		}
		return nvml.MemoryLimits_v1{HardLimit: 9, CurrentUsed: 7}, nvml.SUCCESS
	}}
	lib := &mock.Interface{DeviceGetHandleByUUIDFunc: func(uuid string) (nvml.Device, nvml.Return) {
		if uuid != "GPU-a" {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return d, nvml.SUCCESS
	}}
	all, err := limited(lib, known, "/cgroups", `["GPU-a=/a b","GPU-a=/gone","GPU-x=/a b"]`)
	if used := all["GPU-a=/a b"].Used; err != nil || len(all) != 1 || used == nil || *used != 7 || len(asked) != 2 {
		t.Errorf("%+v, %v, asked of %q", all, err, asked)
	}
	lacks := func(string) error { return errors.New("no symbol") }
	if all, err := limited(lib, lacks, "/cgroups", `["GPU-a=/a b"]`); err != nil || len(all) != 0 || len(asked) != 2 {
		t.Errorf("an older driver: %+v, %v, asked of %q", all, err, asked)
	}
	if _, err := limited(lib, known, "/cgroups", "GPU-a=/x"); err == nil {
		t.Error("no list, and no error")
	}
}
