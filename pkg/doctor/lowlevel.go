// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

var runtimeChecks = []Check{
	{Name: "runtime", Means: "A low-level runtime of `runtimes` in cgpu.toml is installed; cgpu-runtime becomes the first that it finds.",
		Remedy: "install runc 1.1 or newer or crun, or set runtimes in cgpu.toml", Run: checkRuntime},
	{Name: "runtime-seccomp", Means: "It can hand a seccomp listener to a guard (`features`, or its version where it has no such command).",
		Remedy: "install runc 1.1 or newer, or a crun that was built with seccomp", Run: checkRuntimeSeccomp},
}

// askTime bounds what other programs may take to answer.
const askTime = 10 * time.Second

func checkRuntime(h *Host) Result {
	names := h.settings().Runtimes
	var found []string
	for _, name := range names {
		path := h.program(name)
		if path == "" {
			continue
		}
		text, err := output(path, "--version")
		if err != nil {
			return fail("%s --version: %v", path, err).but("repair it or install it anew, or set runtimes in cgpu.toml")
		}
		first, _, _ := strings.Cut(text, "\n")
		h.low = append(h.low, lowLevel{path, text})
		found = append(found, path+" ("+first+")")
	}
	if len(found) == 0 {
		return fail("none of %s is there", strings.Join(names, ", "))
	}
	// The first is the one in use; the others are shown so that nobody wonders.
	return ok("%s", strings.Join(found, ", "))
}

func checkRuntimeSeccomp(h *Host) Result {
	if len(h.low) == 0 {
		return skip("there is no runtime")
	}
	low := h.low[0]
	if text, err := output(low.path, "features"); err == nil {
		if r, ok := judgeFeatures(filepath.Base(low.path), text); ok {
			return needed(h, r)
		}
	}
	return needed(h, judgeVersion(low.version))
}

// judgeFeatures reads what `runc features` says (features.md of the OCI runtime spec).
func judgeFeatures(name, text string) (Result, bool) {
	var f struct {
		Linux struct {
			Seccomp *struct {
				Enabled    *bool    `json:"enabled"`
				Actions    []string `json:"actions"`
				KnownFlags []string `json:"knownFlags"`
				Supported  []string `json:"supportedFlags"`
			} `json:"seccomp"`
		} `json:"linux"`
	}
	if json.Unmarshal([]byte(text), &f) != nil || f.Linux.Seccomp == nil {
		return Result{}, false
	}
	s := f.Linux.Seccomp
	switch {
	case s.Enabled != nil && !*s.Enabled:
		return fail("%s was built without seccomp", name), true
	case !slices.Contains(s.Actions, "SCMP_ACT_NOTIFY"):
		return fail("%s does not know SCMP_ACT_NOTIFY", name), true
	case slices.Contains(append(s.KnownFlags, s.Supported...), "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"):
		return ok("%s knows SCMP_ACT_NOTIFY and WAIT_KILLABLE_RECV", name), true
	}
	return ok("%s knows SCMP_ACT_NOTIFY", name), true
}

// judgeVersion is for runtimes without `features`: runc before 1.1, crun before 1.8.6.
func judgeVersion(text string) Result {
	fields := strings.Fields(text)
	switch {
	case strings.HasPrefix(text, "crun"):
		if slices.Contains(fields, "+SECCOMP") {
			return ok("crun with seccomp; it has no features command to ask for more")
		}
		return fail("crun was built without seccomp: its version lists no +SECCOMP")
	case strings.HasPrefix(text, "runc version"):
		if len(fields) > 2 && strings.HasPrefix(fields[2], "1.0") {
			return fail("runc %s hands no seccomp listener over", fields[2])
		}
	}
	first, _, _ := strings.Cut(text, "\n")
	return warn("%s does not tell whether it knows SCMP_ACT_NOTIFY", first).but("cgpu doctor --self-test tries it")
}
