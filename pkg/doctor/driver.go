// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/domain/server"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// TryDriver is Host.Try's word for a child that makes RM calls. It prints TrialReport.
const TryDriver = "driver"

// TrialReport is what the child says.
type TrialReport struct {
	Trials []gpusched.Trial `json:"trials"`
	Err    string           `json:"err,omitempty"`
}

var driverChecks = []Check{
	{Name: "driver", Means: "The NVIDIA driver is loaded and its version is one whose structures the guard knows.",
		Remedy: "load the driver (modprobe nvidia); cgpu.toml with driver = \"sim\" does without", Run: checkDriver},
	{Name: "nodes", Means: "nvidiactl, nvidia-uvm and the nodes of the table's GPUs are there.",
		Remedy: "nvidia-modprobe -u -c 0 makes the nodes; then cgpu refresh", Run: checkNodes},
	{Name: "gsp", Means: "The GPUs run GSP firmware, as they do under the open kernel modules; cgpu is tested with these.",
		Remedy: "use the open kernel modules on Turing and newer GPUs", Run: checkGSP},
	{Name: "scheduling",
		Means: "The driver takes what shares out the GPU's time: an RM client, a channel group of our own without work, its timeslice, the " +
			"control that pauses, records of context switches.",
		Remedy: "use a driver version that docs/measurements.md names as tested; memory limits hold without", Run: checkScheduling},
	{Name: "hmm",
		Means: "The driver cannot move ordinary host memory of programs to the GPU, which counts against no limit (module parameter " +
			"uvm_disable_hmm).",
		Remedy: "write `options nvidia-uvm uvm_disable_hmm=1` to /etc/modprobe.d/cgpu.conf and load nvidia-uvm again; or set hmm = true in " +
			"cgpu.toml to accept it", Run: checkHMM},
	{Name: "counters",
		Means: "Hardware counters are off for containers (`profiling` in cgpu.toml), or the driver lets users read them, as a guard is one " +
			"(NVreg_RestrictProfilingToAdminUsers).",
		Remedy: "write `options nvidia NVreg_RestrictProfilingToAdminUsers=0` to /etc/modprobe.d/cgpu.conf and load nvidia again, or set " +
			"profiling = false in cgpu.toml", Run: checkCounters},
	{Name: "mig", Means: "No GPU is in MIG mode: its parts are not sliced further.",
		Remedy: "nvidia-smi -i N -mig 0, if the GPU shall be shared by cgpu", Run: checkMIG},
	{Name: "persistence",
		Means:  "The driver stays loaded without users (persistence mode); otherwise the first call after a pause takes seconds.",
		Remedy: "start nvidia-persistenced, or nvidia-smi -pm 1", Run: checkPersistence},
	{Name: "domains",
		Means: "The node can have trust domains (`domains` in cgpu.toml): a guard enforces, the driver's control daemon of MPS is installed, " +
			"and its server may have a user namespace.",
		Remedy: "install nvidia-cuda-mps-control, or take the domains out of cgpu.toml", Run: checkDomains},
}

const driverVersionFile = "/proc/driver/nvidia/version"

// driverVersion finds the version in /proc/driver/nvidia/version, and whether the modules are the open ones.
func driverVersion(text string) (version string, open bool) {
	first, _, _ := strings.Cut(text, "\n")
	for _, word := range strings.Fields(first) {
		if _, err := rm.ParseVersion(word); err == nil {
			return word, strings.Contains(first, "Open Kernel Module")
		}
	}
	return "", false
}

func checkDriver(h *Host) Result {
	settings := h.settings()
	if h.simulated() {
		version := h.config.Sim.DriverVersion
		if t, err := h.node(); err == nil {
			version = t.DriverVersion
		}
		if _, err := rm.ForDriver(version, settings.AllowUnknownDriver); err != nil {
			return fail("simulated: %v", err).but("set sim.driver_version in cgpu.toml to a known one")
		}
		return ok("simulated, as %s: no real GPU is shared", version)
	}
	text, found := h.text(driverVersionFile)
	if !found {
		return fail("%s is not there: no NVIDIA driver is loaded", driverVersionFile)
	}
	version, open := driverVersion(text)
	if version == "" {
		return fail("%s has no version: %q", driverVersionFile, text).but("report it with the driver's version")
	}
	abi, err := rm.ForDriver(version, settings.AllowUnknownDriver)
	if err != nil {
		return needed(h, fail("%v", err).but("use a driver of a known branch, or update cgpu"))
	}
	kind := "proprietary modules"
	if open {
		kind = "open modules"
	}
	if abi.Guessed() {
		return warn("%s (%s) is of an unknown branch, let in by allow_unknown_driver", version, kind).
			but("update cgpu, or use a driver of branch %s", strings.Join(rm.KnownBranches(), ", "))
	}
	return ok("%s, %s", version, kind)
}

func checkNodes(h *Host) Result {
	t, err := h.node()
	if t == nil {
		return skip("there is no node table: %v", err)
	}
	var missing []string
	seen := 0
	look := func(path string) {
		seen++
		if info, err := os.Stat(path); err != nil || info.Mode()&os.ModeCharDevice == 0 {
			missing = append(missing, path)
		}
	}
	for _, n := range t.Nodes {
		look(n.HostPath)
	}
	for _, g := range t.GPUs {
		look(g.Node.HostPath)
	}
	if len(missing) > 0 {
		return fail("no device at %s", strings.Join(missing, ", "))
	}
	return ok("%s of %s", terminal.Plural(seen, "node"), terminal.Plural(len(t.GPUs), "GPU"))
}

func checkGSP(h *Host) Result {
	if h.simulated() {
		return skip("the simulated driver has none")
	}
	files, _ := filepath.Glob(h.at("/proc/driver/nvidia/gpus/*/information"))
	firmware := map[string]string{}
	for _, file := range files {
		if b, err := readSome(file); err == nil {
			firmware[filepath.Base(filepath.Dir(file))] = gspVersion(string(b))
		}
	}
	return judgeGSP(firmware)
}

// gspVersion reads the line "GPU Firmware: 580.159.04" of a GPU's information; empty: there is none.
func gspVersion(text string) string {
	for l := range strings.Lines(text) {
		if v, found := strings.CutPrefix(l, "GPU Firmware:"); found {
			if v = strings.TrimSpace(v); v != "N/A" {
				return v
			}
		}
	}
	return ""
}

// judgeGSP judges the firmware by PCI address.
func judgeGSP(firmware map[string]string) Result {
	if len(firmware) == 0 {
		return skip("/proc/driver/nvidia/gpus lists no GPU")
	}
	var without, with []string
	for _, bus := range slices.Sorted(maps.Keys(firmware)) {
		if firmware[bus] == "" {
			without = append(without, bus)
		} else {
			with = append(with, firmware[bus])
		}
	}
	if len(without) > 0 {
		return warn("%s without GSP firmware: %s; pauses are not tested there", terminal.Plural(len(without), "GPU"), strings.Join(without, ", "))
	}
	return ok("firmware %s", strings.Join(slices.Compact(with), ", "))
}

func checkScheduling(h *Host) Result {
	t, err := h.node()
	switch {
	case err != nil:
		return skip("needs a fresh node table")
	case h.UID != 0:
		return skip("needs root")
	case len(t.GPUs) == 0:
		return skip("there is no GPU")
	}
	return tryDriver(h, 2*tryTime)
}

// tryDriver has a child try it, and gives up at the limit.
func tryDriver(h *Host, limit time.Duration) Result {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd, err := h.Try(ctx, TryDriver)
	if err != nil {
		return fail("cannot try it: %v", err).but("run cgpu doctor again; if it stays, report it")
	}
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	// A child that hangs in the driver does not die, and Wait would wait for it: it is left behind.
	if err := cmd.Start(); err != nil {
		return fail("cannot try it: %v", err).but("run cgpu doctor again; if it stays, report it")
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		return fail("the driver did not answer within %v; process %d is left waiting for it", limit, cmd.Process.Pid).
			but("look at dmesg for Xid and NVRM lines")
	}
	var report TrialReport
	if err != nil || json.Unmarshal(out.Bytes(), &report) != nil {
		return fail("the child that tries it: %v: %s", err, said.String()).but("report it")
	}
	return judgeTrials(report)
}

// judgeTrials says what a node cannot do after what was tried.
func judgeTrials(r TrialReport) Result {
	lost := map[string]string{
		gpusched.TryClient:    "nothing can be scheduled",
		gpusched.TryGroup:     "timeslices could not be tried",
		gpusched.TryTimeslice: "weights do nothing",
		gpusched.TryPause:     "hard caps and cgpu pause do nothing",
		gpusched.TrySwitches:  "every context counts as one with work",
	}
	if r.Err != "" {
		return fail("%s", r.Err)
	}
	gpus := map[int]bool{}
	var refused []string
	worst := OK
	for _, t := range r.Trials {
		gpus[t.GPU] = true
		if t.Refused == "" {
			continue
		}
		refused = append(refused, fmt.Sprintf("GPU %d: %s: %s (%s)", t.GPU, t.What, t.Refused, lost[t.What]))
		switch {
		case t.What == gpusched.TryClient, t.What == gpusched.TryTimeslice:
			worst = Fail
		case worst == OK:
			worst = Warn
		}
	}
	if len(refused) > 0 {
		return Result{Status: worst, Found: line("%s", strings.Join(refused, "; "))}
	}
	return ok("%s on %s", strings.Join(tried(r.Trials), ", "), terminal.Plural(len(gpus), "GPU"))
}

// tried lists what was tried, each once.
func tried(trials []gpusched.Trial) []string {
	var list []string
	for _, t := range trials {
		if !slices.Contains(list, t.What) {
			list = append(list, t.What)
		}
	}
	return list
}

func checkHMM(h *Host) Result {
	if h.simulated() {
		return skip("the simulated driver has none")
	}
	off, found := h.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
	switch {
	case !found:
		return skip("nvidia-uvm is not loaded, or has no HMM")
	case off == "Y" || off == "1":
		return ok("off by uvm_disable_hmm")
	case h.settings().HMM:
		return ok("on, as hmm = true in cgpu.toml allows")
	}
	return warn("on for programs that do not load libcgpu.so: their host memory can move to the GPU, uncounted")
}

func checkCounters(h *Host) Result {
	if !h.settings().Profiling {
		return ok("off for containers")
	}
	if params, _ := h.text("/proc/driver/nvidia/params"); strings.Contains(params, "RmProfilingAdminOnly: 1") {
		return warn("profiling = true in cgpu.toml, but the driver keeps them from users without CAP_SYS_ADMIN")
	}
	return ok("on, as profiling = true in cgpu.toml allows")
}

func checkMIG(h *Host) Result {
	if h.simulated() {
		return skip("the simulated driver has none")
	}
	// The driver keeps a folder of capabilities for each instance.
	if instances, _ := filepath.Glob(h.at("/proc/driver/nvidia/capabilities/gpu*/mig/gi*")); len(instances) > 0 {
		return warn("%s exist", terminal.Plural(len(instances), "MIG instance"))
	}
	modes, err := h.nvidiaSMI("mig.mode.current")
	if err != nil {
		return ok("no MIG instances")
	}
	for i, mode := range modes {
		if mode == "Enabled" {
			return warn("GPU %d is in MIG mode", i)
		}
	}
	return ok("off")
}

func checkPersistence(h *Host) Result {
	if h.simulated() {
		return skip("the simulated driver stays")
	}
	if h.there("/var/run/nvidia-persistenced/socket") {
		return ok("nvidia-persistenced runs")
	}
	modes, err := h.nvidiaSMI("persistence_mode")
	if err != nil {
		return skip("nvidia-smi does not tell: %v", err)
	}
	for i, mode := range modes {
		if mode != "Enabled" {
			what := fmt.Sprintf("GPU %d: persistence mode is %s", i, strings.ToLower(mode))
			if limits := h.settings().Limits(); limits != device.LimitsGuard {
				return fail("%s: the driver forgets the limits of containers with the GPU's last user (limits = %q), so none starts", what, limits)
			}
			return warn("%s", what)
		}
	}
	return ok("on")
}

// nvidiaSMI asks for one property of each GPU.
func (h *Host) nvidiaSMI(property string) ([]string, error) {
	path := h.program("nvidia-smi")
	if path == "" {
		return nil, fmt.Errorf("it is not installed")
	}
	text, err := output(path, "--query-gpu="+property, "--format=csv,noheader")
	if err != nil {
		return nil, err
	}
	var list []string
	for l := range strings.Lines(text) {
		list = append(list, strings.TrimSpace(l))
	}
	return list, nil
}

// checkDomains says what domains lack here; of a node that names none it is no fault.
func checkDomains(h *Host) Result {
	t, err := h.node()
	if t == nil {
		return skip("there is no node table: %v", err)
	}
	var names []string
	for _, d := range t.Config.Domains {
		names = append(names, d.Name)
	}
	lack, remedy := h.lacksForDomains(t)
	switch {
	case lack != "" && len(names) == 0:
		return skip("none are named in cgpu.toml, and the node could have none: %s", lack)
	case lack != "":
		return fail("%s: %s", strings.Join(names, ", "), lack).but("%s", remedy)
	case len(names) == 0:
		return ok("none are named in cgpu.toml; the node could have some")
	}
	return ok("%s", strings.Join(names, ", "))
}

func (h *Host) lacksForDomains(t *device.Table) (lack, remedy string) {
	if setting := t.Config.Unguarded(); setting != "" {
		return setting + " in cgpu.toml: no guard keeps domains apart", "take it out of cgpu.toml, or the domains"
	}
	if _, err := server.ControlProgram(t); err != nil {
		lack, remedy, _ = strings.Cut(err.Error(), ": ")
		return lack, remedy
	}
	for path, bad := range map[string]string{
		"/proc/sys/user/max_user_namespaces":                     "0",
		"/proc/sys/kernel/unprivileged_userns_clone":             "0",
		"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
	} {
		if text, found := h.text(path); found && strings.TrimSpace(text) == bad {
			return fmt.Sprintf("%s is %s: a user without privileges gets no user namespace of use", path, bad),
				"let users have user namespaces (sysctl), or take the domains out of cgpu.toml"
		}
	}
	return "", ""
}
