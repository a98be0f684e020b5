// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// parse reads a command line, without starting anything.
func parse(t *testing.T, args ...string) (settings, error) {
	t.Helper()
	f, rest, err := readFlags(args)
	if err != nil || len(rest) > 0 {
		return settings{}, fmt.Errorf("%v %w", rest, err)
	}
	return settingsOf(f)
}

func TestSettings(t *testing.T) {
	t.Setenv("CGPU_AGENT_MEMORY_UNIT", "MiB")
	t.Setenv("NODE_NAME", "from-env")
	s, err := parse(t, "--frontends", "dra,deviceplugin", "--dra-gpus", "0, 1", "--deviceplugin-gpus", "GPU-2", "--health-address", "none",
		"--smi", "off", "--cdi-dir", "/etc/cdi/")
	if err != nil {
		t.Fatal(err)
	}
	if s.node != "from-env" || s.unit != quota.MiB || s.health != "" || s.smi || s.cdiDir != "/etc/cdi" || len(s.frontEnds) != 2 {
		t.Errorf("%+v", s)
	}
	s.kubeletDir = t.TempDir()
	must(t, os.MkdirAll(filepath.Join(s.kubeletDir, "plugins", "gpu.cgpu.io"), 0o700))
	division := divisionOf(s)
	gpus := []device.GPU{{Index: 0, UUID: "GPU-0"}, {Index: 1, UUID: "GPU-1"}, {Index: 3, UUID: "GPU-2"}, {Index: 5, UUID: "GPU-5"}}
	must(t, division.Resolve(gpus))
	list := frontEnds(s, nil, nil, division, logger("json", os.Stderr))
	has := func(i int, g device.GPU) bool { return list[i].Mine(g) && !list[i].Others(g) }
	for g, want := range map[device.GPU][2]bool{gpus[0]: {true, false}, gpus[1]: {true, false}, gpus[2]: {false, true},
		gpus[3]: {false, false}} {
		if has(0, g) != want[0] || has(1, g) != want[1] {
			t.Errorf("%v: dra %v, plugin %v, want %v", g, has(0, g), has(1, g), want)
		}
	}
	if s, err = parse(t); err != nil || s.draGPUs != nil || s.frontEnds[0] != frontDRA || s.health != ":9470" || !s.smi || s.web {
		t.Errorf("defaults: %+v, %v", s, err)
	}
	if s.names != (deviceplugin.Names{}) {
		t.Errorf("%+v", s.names)
	}
	if s, err := parse(t, "--frontends", "kai", "--memory-resource", "nvidia.com/gpumem"); err != nil || s.frontEnds[0] != "kai" ||
		s.names.Inside("nvidia.com/gpumem") != deviceplugin.ResourceMemory || s.nriSocket != "/var/run/nri/nri.sock" {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err := parse(t, "--web", "on"); err != nil || !s.web {
		t.Errorf("%+v, %v", s, err)
	}
	if f := frontEnds(s, nil, nil, divisionOf(s), logger("text", os.Stderr)); len(f) != 1 || f[0].Mine != nil || f[0].Others != nil {
		t.Errorf("all GPUs: %+v", f)
	}
}

func TestSettingsRefused(t *testing.T) {
	for args, want := range map[string]string{
		"--frontends vgpu":                          `"vgpu" is none`,
		"--frontends ,":                             "want dra",
		"--frontends dra,dra":                       "twice",
		"--deviceplugin-gpus 1":                     "--frontends has no deviceplugin",
		"--frontends dra,deviceplugin":              "--dra-gpus: is missing",
		"--frontends dra,deviceplugin --dra-gpus 0": "--deviceplugin-gpus: is missing",
		"--frontends dra,deviceplugin --dra-gpus 0,1 --deviceplugin-gpus 1": "both have 1",
		"--frontends hami,kai":                  `"hami" is none`,
		"--frontends dra,volcano":               "; or one of hami, kai, volcano, alone",
		"--frontends hami --dra-gpus 0":         "--frontends has no dra",
		"--nri-socket nri.sock":                 "absolute",
		"--memory-resource gpu":                 `--memory-resource "gpu": want the name of an extended resource`,
		"--memory-resource a/b/c":               "want the name",
		"--percent-resource kubernetes.io/x":    "want the name",
		"--percent-resource requests.a.com/x":   "want the name",
		"--percent-resource aliyun.com/gpu-mem": "want two names",
		"--dra-gpus first":                      "whole UUIDs",
		"--dra-gpus ,":                          "empty list",
		"--memory-unit GB":                      "want GiB, MiB",
		"--memory-unit 0MiB":                    "want GiB, MiB",
		"--memory-unit -1GiB":                   "want GiB, MiB",
		"--cdi-dir cdi":                         "absolute",
		"--kubelet-dir ./x":                     "absolute",
		"--hook cgpu-hook":                      "absolute",
		"--log-format logfmt":                   "want text or json",
		"--smi no":                              "want on or off",
		"--web yes":                             "want on or off",
		"--web on --smi off":                    "want --smi on",
		"--web on --health-address none":        "and an address",
		"--nonsense":                            "nonsense",
	} {
		if _, err := parse(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// Nobody is reached, so that an API server that is away does not keep the agent from starting.
func TestConnect(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"apiVersion":"v1","kind":"Config","current-context":"c","clusters":[{"name":"k","cluster":{"server":"https://127.0.0.1:1"}}],` +
		`"users":[{"name":"u","user":{"token":"t"}}],"contexts":[{"name":"c","context":{"cluster":"k","user":"u"}}]}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// What containers wait for does not wait for its turn: without a limit there is no limiter.
	for pace, limited := range map[float32]bool{ownPace: true, atOnce: false} {
		client, err := connect(file, pace)
		if err != nil {
			t.Fatal(err)
		}
		if limiter := client.CoreV1().RESTClient().GetRateLimiter(); (limiter != nil) != limited {
			t.Errorf("%v a second: %v", pace, limiter)
		}
	}
	if _, err := connect(file+".none", ownPace); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Error(err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := connect("", ownPace); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Error(err)
	}
}

func TestUnit(t *testing.T) {
	for text, want := range map[string]quota.Bytes{"GiB": quota.GiB, "MiB": quota.MiB, "256MiB": 256 * quota.MiB, "2GiB": 2 * quota.GiB} {
		if s, err := parse(t, "--memory-unit", text); err != nil || s.unit != want {
			t.Errorf("%s: %v, %v", text, s.unit, err)
		}
	}
}
