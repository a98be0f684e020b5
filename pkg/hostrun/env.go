// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/spec"
)

// environment is what the command gets of the caller's environment env.
func environment(env []string, u User, p spec.Plan) []string {
	set, limiter := map[string]string{}, p.Limiter != ""
	drop := []string{
		// Numbers of the host's GPUs: in the run they count from 0, and a number that is none there would hide them all.
		"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
	}
	if !u.Keep && u.Name != "" { // sudo has set root's
		set["USER"], set["LOGNAME"], set["HOME"], set["SHELL"] = u.Name, u.Name, u.Home, u.Shell
	}
	kept := make([]string, 0, len(env)+1)
	preload := spec.LimiterPath
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		_, replaced := set[name]
		switch {
		case slices.Contains(drop, name), replaced:
		case name == "LD_PRELOAD" && limiter:
			for _, library := range strings.FieldsFunc(value, func(r rune) bool { return r == ':' || r == ' ' }) {
				if library != spec.LimiterPath {
					preload += ":" + library
				}
			}
		default:
			kept = append(kept, e)
		}
	}
	for _, name := range []string{"USER", "LOGNAME", "HOME", "SHELL"} {
		if set[name] != "" {
			kept = append(kept, name+"="+set[name])
		}
	}
	if p.IsMember() {
		name, _, _ := strings.Cut(spec.PipeVariable, "=")
		if !slices.ContainsFunc(kept, func(e string) bool { return strings.HasPrefix(e, name+"=") }) {
			kept = append(kept, spec.PipeVariable)
		}
	}
	if limiter {
		kept = append(kept, "LD_PRELOAD="+preload)
	}
	return kept
}
