// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const configs = "../../configs/"

// uncomment turns the lines "#key = value" and "#[table]" of the example into settings; prose has a space after "#".
func uncomment(text string) string {
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, "#") && !strings.HasPrefix(l, "# ") {
			lines[i] = l[1:]
		}
	}
	return strings.Join(lines, "\n")
}

func TestExampleIsTheDefault(t *testing.T) {
	text, err := os.ReadFile(configs + "cgpu.toml")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"as shipped": string(text), "uncommented": uncomment(string(text))} {
		got, err := Parse("cgpu.toml", []byte(text))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(Default(), got); diff != "" {
			t.Errorf("%s: differs from the defaults (-default +example):\n%s", name, diff)
		}
	}
	// Every key that is known is documented.
	for _, v := range []any{file{}, file{}.Sim} {
		for field := range reflect.TypeOf(v).Fields() {
			key := field.Tag.Get("toml")
			if key != "sim" && key != "gpus" && !strings.Contains(string(text), "\n#"+key+" = ") {
				t.Errorf("configs/cgpu.toml does not document %s", key)
			}
		}
	}
}

// docs/variables.md names every key, and the defaults that it gives are the defaults.
func TestDocumentedDefaults(t *testing.T) {
	text, err := os.ReadFile("../../docs/variables.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## /etc/cgpu/cgpu.toml")
	section, _, _ = strings.Cut(section, "\n## ")
	var settings strings.Builder
	documented := map[string]bool{}
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 || !strings.HasPrefix(cells[1], " `") || strings.HasPrefix(cells[1], " `[") {
			continue // prose, the table's head, or [sim], whose defaults are in words
		}
		keys, values := strings.Split(cells[1], ","), strings.Split(cells[2], ",")
		if len(keys) == 1 {
			values = cells[2:3]
		}
		for i, key := range keys {
			key = strings.Trim(key, " `")
			fmt.Fprintf(&settings, "%s = %s\n", key, strings.Trim(values[i], " `"))
			documented[key] = true
		}
	}
	got, err := Parse("variables.md", []byte(settings.String()))
	if err != nil {
		t.Fatalf("%v in\n%s", err, settings.String())
	}
	if diff := cmp.Diff(Default(), got); diff != "" {
		t.Errorf("differs from the defaults (-default +documented):\n%s", diff)
	}
	for field := range reflect.TypeOf(file{}).Fields() {
		if key := field.Tag.Get("toml"); key != "sim" && !documented[key] {
			t.Errorf("docs/variables.md does not document %s", key)
		}
	}
}

func TestSnippets(t *testing.T) {
	for _, name := range []string{"containerd-config-v2.toml", "containerd-config-v3.toml"} {
		text, err := os.ReadFile(configs + name)
		if err != nil {
			t.Fatal(err)
		}
		var v map[string]any
		if err := toml.Unmarshal(text, &v); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	text, err := os.ReadFile(configs + "daemon.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Runtimes map[string]map[string]any `json:"runtimes"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	r := d.Runtimes["cgpu"]
	if path, _ := r["path"].(string); !filepath.IsAbs(path) {
		t.Errorf("daemon.json: path %v is not absolute", r["path"])
	}
	if _, ok := r["runtimeArgs"]; ok || len(r) != 1 {
		t.Errorf("daemon.json: %v: with arguments Docker wraps the runtime in a shell script", r)
	}
}

func TestParse(t *testing.T) {
	got, err := Parse("f", []byte(`
driver = "sim"
driver_root = "/run/nvidia/driver"
runtimes = ["/usr/bin/crun"]
overcommit = 2
max_inst = 4
placement = "spread"
allow_unknown_driver = true
context_overhead = "0"
guard_start_timeout = "1m30s"
calls_burst = 7
policy = "4"
prio_ratio = 20
base_timeslice = "1ms"
min_timeslice = "200us"
max_round = "1s"
high_prio_timeslice = "50us"
max_loss = "30%"
cap_cycle = "500ms"
switch_records = false
enforcement = "preload"
managed = "deny"
hmm = true
profiling = true
graphics = true
max_spill = "64GiB"
spill_reserve = "0"
dialects = ["mps", "hami"]
[[domains]]
name = "team"
weight = 3
percent = 50
users = ["ann", "1000"]
namespaces = ["*"]
shared = true
[[domains]]
name = "b"
[sim]
driver_version = "535.54"
[[sim.gpus]]
memory = "1.5GiB"
[[sim.gpus]]
name = "H200"
uuid = "GPU-00000000-0000-0000-0000-00000000000a"
bus_id = "0001:0a:00.0"
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Driver, want.DriverRoot = "sim", "/run/nvidia/driver"
	want.Settings.Runtimes = []string{"/usr/bin/crun"}
	want.Settings.Overcommit = 2
	want.Settings.MaxInst = 4
	want.Settings.Placement = "spread"
	want.Settings.AllowUnknownDriver = true
	want.Settings.ContextOverhead = 0
	want.Settings.GuardStartTimeout = 90 * time.Second
	want.Settings.CallsBurst = 7
	want.Settings.Policy = sched.PolicySoft
	want.Settings.PrioRatio = 20
	want.Settings.BaseTimeslice = time.Millisecond
	want.Settings.MinTimeslice = 200 * time.Microsecond
	want.Settings.MaxRound = time.Second
	want.Settings.HighPrioTimeslice = 50 * time.Microsecond
	want.Settings.MaxLoss = 30
	want.Settings.CapCycle = 500 * time.Millisecond
	want.Settings.NoSwitchRecords = true
	want.Settings.Enforcement = device.EnforcePreload
	want.Settings.Managed = device.ManagedDeny
	want.Settings.HMM = true
	want.Settings.Profiling = true
	want.Settings.Graphics = true
	want.Settings.MaxSpill = device.Part{Bytes: 64 * quota.GiB}
	want.Settings.SpillReserve = device.Part{}
	want.Settings.Dialects = []quota.Dialect{quota.DialectMPS, quota.DialectHAMi}
	want.Settings.Domains = []device.Domain{
		{Name: "team", Weight: 3, Percent: 50, Users: []string{"ann", "1000"}, Namespaces: []string{"*"}, Shared: true}, {Name: "b"},
	}
	want.Sim = Sim{DriverVersion: "535.54", GPUs: []SimGPU{
		{Name: "Tesla T4", Memory: 1536 * quota.MiB},
		{Name: "H200", Memory: 15109 * quota.MiB, UUID: "GPU-00000000-0000-0000-0000-00000000000a", BusID: "0001:0a:00.0"},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestLimits(t *testing.T) {
	for text, want := range map[string]struct {
		enforcement string
		driver      bool
		unguarded   string
	}{
		"":                        {enforcement: device.EnforceGuard},
		`limits = "guard"`:        {enforcement: device.EnforceGuard},
		`limits = "both"`:         {enforcement: device.EnforceGuard, driver: true},
		`limits = "driver"`:       {enforcement: device.EnforceDriver, driver: true, unguarded: `limits = "driver"`},
		`enforcement = "preload"`: {enforcement: device.EnforcePreload, unguarded: `enforcement = "preload"`},
		"limits = \"both\"\nenforcement = \"preload\"": {enforcement: device.EnforcePreload, driver: true, unguarded: `enforcement = "preload"`},
	} {
		c, err := Parse("f", []byte(text))
		if got := c.Settings; err != nil || got.Enforcement != want.enforcement || got.DriverLimits != want.driver ||
			got.Unguarded() != want.unguarded {
			t.Errorf("%s: %s, driver %v, %s, %v, want %+v", text, got.Enforcement, got.DriverLimits, got.Unguarded(), err, want)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		`max_instances = 3`:                  `config: f:1: unknown key max_instances: want one of docs/variables.md`,
		"[sim]\ngpu = 1":                     `config: f:2: unknown key sim.gpu: want`,
		"\n\n[[sim.gpus]]\nsize=1":           `config: f:4: unknown key sim.gpus.size: want`,
		`[scheduler]`:                        `config: f:1: unknown key scheduler: want`,
		`driver = "amd"`:                     `config: f:1: driver = "amd": want "nvidia" or "sim"`,
		`driver = `:                          `config: f:1`,
		`driver_root = "run/nvidia"`:         `config: f:1: driver_root = "run/nvidia": want the absolute path`,
		`driver_root = "/run/nvidia/"`:       `driver_root = "/run/nvidia/"`,
		`max_inst = "3"`:                     `config: f:1: max_inst`,
		`max_inst = 0`:                       `config: f:1: max_inst = 0: want a whole number from 1 to 64`,
		`max_inst = 65`:                      `max_inst = 65`,
		`overcommit = 0.5`:                   `overcommit = 0.5: want a ratio from 1.0`,
		`overcommit = nan`:                   `overcommit = NaN`,
		`headroom = "51%"`:                   `headroom = "51%": want a part of each GPU's memory such as "50%", from "0%" to "50%"`,
		`headroom_cores = "51%"`:             `headroom_cores = "51%": want whole percent, from 0% to 50%`,
		`placement = ""`:                     `placement = ""`,
		`context_overhead = "13TB"`:          `context_overhead = "13TB": is no size; want a size such as "13MiB" or "1.5GiB"`,
		`context_overhead = "13 MB"`:         `context_overhead = "13 MB": is no size; want`,
		`context_overhead = "9999999999GiB"`: `context_overhead = "9999999999GiB": is`,
		`guard_start_timeout = "10"`:         `guard_start_timeout = "10": want a duration with its unit`,
		`guard_start_timeout = "0s"`:         `from 100ms to 5m0s`,
		`policy = "best"`:                    `policy = "best": want "fair", "preempt", "weight-preempt", "fixed", "soft", "native", or a number from "0" to "5"`,
		`policy = 1`:                         `config: f:1: policy`,
		`prio_ratio = 19`:                    `prio_ratio = 19: want a whole number from 20 to 99`,
		`prio_ratio = 100`:                   `prio_ratio = 100: want`,
		`base_timeslice = "999us"`:           `base_timeslice = "999us": want a duration with its unit, from 1ms to 100ms`,
		`base_timeslice = "101ms"`:           `base_timeslice = "101ms": want`,
		`min_timeslice = "199us"`:            `min_timeslice = "199us": want a duration with its unit, from 200µs to 100ms`,
		`min_timeslice = "11ms"`:             `min_timeslice = "11ms": want no more than base_timeslice, 10ms`,
		"base_timeslice = \"2ms\"\nmin_timeslice = \"3ms\"": `min_timeslice = "3ms": want no more than base_timeslice, 2ms`,
		`limits = "nvml"`:                              `config: f:1: limits = "nvml": want "guard" or "both" or "driver"`,
		"driver = \"sim\"\nlimits = \"both\"":          `config: f:2: limits = "both": the simulated driver has no memory limits of its own: want "guard", or leave it out`,
		"enforcement = \"guard\"\nlimits = \"driver\"": `f:2: limits = "driver": there is neither a guard nor the library then: leave out enforcement, or limits`,
		`limits = true`:                                `limits`,
		`driver_limits = true`:                         `unknown key driver_limits`,
		`max_loss = "0%"`:                              `max_loss = "0%": want whole percent, from 1% to 50%`,
		`max_loss = "51%"`:                             `max_loss = "51%": want`,
		`max_loss = "15"`:                              `max_loss = "15": want`,
		`max_round = "9ms"`:                            `max_round = "9ms": want`,
		`max_round = "1001ms"`:                         `max_round = "1001ms": want`,
		`high_prio_timeslice = "49us"`:                 `high_prio_timeslice = "49us": want`,
		`high_prio_timeslice = "2ms"`:                  `high_prio_timeslice = "2ms": want`,
		`cap_cycle = "49ms"`:                           `cap_cycle = "49ms": want`,
		`cap_cycle = "1s"`:                             `cap_cycle = "1s": want`,
		`enforcement = "none"`:                         `enforcement = "none": want "guard" or "preload"`,
		`managed = ""`:                                 `managed = "": want "limit" or "deny" or "allow"`,
		`dialects = ["HAMi"]`:                          `dialects = "HAMi": want "hami", "nvidia", "mps", "pai", "tkestack" or "gpushare"`,
		`dialects = ["mps", "mps"]`:                    `dialects = "mps": want each dialect once`,
		`domains = ["team"]`:                           `config: f:1: domains = ["team"]: want tables [[domains]]`,
		`domains = [{}]`:                               `config: f:1: domains[0].name = "": want 1 to 63 letters`,
		"[[domains]]\nname = \"a\"\n[[domains]]\nname = \"a/b\"": `config: f:4: domains[1].name = "a/b": want`,
		"[[domains]]\nname = \"a\"\n[[domains]]\nname = \"a\"":   `config: f:4: domains[1].name = "a": want each domain once`,
		"[[domains]]\nname = \"a\"\nweight = 65":                 `config: f:3: domains[0].weight = 65: want a whole number from 1 to 64`,
		"[[domains]]\nname = \"a\"\npercent = 0":                 `domains[0].percent = 0: want`,
		"[[domains]]\nname = \"a\"\nusers = [\"root\"]":          `domains[0].users = "root": want`,
		"[[domains]]\nname = \"a\"\nnamespaces = [\"a/b\"]":      `domains[0].namespaces = "a/b": want`,
		"[[domains]]\nname = \"a\"\nshared = true":               `f:3: domains[0].shared = true: is for pods`,
		"[[domains]]\nname = \"a\"\npriority = 1":                `f:3: unknown key domains.priority`,
		`dialects = "mps"`:                `config: f:1: dialects`,
		`hmm = "no"`:                      `config: f:1: hmm`,
		`max_spill = "101%"`:              `max_spill = "101%": want a part of the host's memory such as "50%", from "0%" to "100%", or a size such as "64GiB"`,
		`max_spill = "-1%"`:               `max_spill = "-1%": want`,
		`max_spill = "1.5%"`:              `max_spill = "1.5%": want`,
		`max_spill = "%"`:                 `max_spill = "%": want`,
		`max_spill = "64TB"`:              `max_spill = "64TB": is no size; want a part`,
		`max_spill = ""`:                  `max_spill = "": is no size; want a part`,
		`spill_reserve = "9999999GiB"`:    `spill_reserve = "9999999GiB": is more memory than`,
		`runtimes = []`:                   `runtimes = []: want at least one`,
		`runtimes = ["./runc"]`:           `runtimes = "./runc": want`,
		`runtimes = ["/x/cgpu-runtime"]`:  `cannot call itself`,
		`calls_burst = -1`:                `calls_burst = -1`,
		"[sim]\ndriver_version = \"new\"": `sim.driver_version = "new"`,
		"[sim]\ngpus = []":                `sim.gpus = "0 GPUs": want 1 to 64`,
		"[[sim.gpus]]\nuuid = \"x\"":      `sim.gpus[0].uuid = "x"`,
		"[[sim.gpus]]\nbus_id = \"x\"":    `sim.gpus[0].bus_id = "x"`,
		"[[sim.gpus]]\nname = \"\"":       `sim.gpus[0].name = ""`,
		"[[sim.gpus]]\nmemory = \"0MiB\"": `sim.gpus[0].memory = "0MiB": is zero; want`,
	} {
		_, err := Parse("f", []byte(text))
		switch {
		case err == nil:
			t.Errorf("%q: accepted", text)
		case !strings.Contains(err.Error(), want):
			t.Errorf("%q:\n got %v\nwant %s", text, err, want)
		case strings.Contains(err.Error(), "\n"):
			t.Errorf("%q: message of several lines: %v", text, err)
		}
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cgpu.toml")
	got, err := Load(path)
	if diff := cmp.Diff(Default(), got); err != nil || diff != "" {
		t.Errorf("no file: %v; differs from the defaults:\n%s", err, diff)
	}
	if err := os.WriteFile(path, []byte("max_inst = 3"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err = Load(path); err != nil || got.Settings.MaxInst != 3 {
		t.Errorf("max_inst = 3 read as %d (%v)", got.Settings.MaxInst, err)
	}
	if _, err = Load(filepath.Dir(path)); err == nil {
		t.Error("read a folder")
	}
}

func FuzzParse(f *testing.F) {
	text, err := os.ReadFile(configs + "cgpu.toml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(uncomment(string(text))))
	f.Add([]byte("overcommit = inf"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := Parse("f", text)
		if err != nil {
			return
		}
		if s := c.Settings; s.Card().Validate() != nil || !(s.Overcommit >= 1) || len(s.Runtimes) == 0 || len(c.Sim.GPUs) == 0 ||
			s.MinTimeslice > s.BaseTimeslice ||
			s.MaxSpill.Of(quota.GiB) > maxSize || s.SpillReserve.Percent < 0 || s.SpillReserve.Percent > 100 ||
			s.Enforcement == "" || s.Managed == "" {
			t.Errorf("accepted %+v", c)
		}
	})
}
