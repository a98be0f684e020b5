// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// editHooks removes NVIDIA's hooks that would undo our work and adds ours, behind those of others.
func editHooks(doc *Document, p *Plan) error {
	hooks, err := doc.within("hooks")
	if err != nil {
		return err
	}
	if hooks != nil {
		for i := range hooks.members {
			if err := dropNVIDIA(&hooks.members[i]); err != nil {
				return err
			}
		}
	}
	// Hooks inherit nothing: what they need is in Args and Env, and paths are absolute.
	env := []string{"CGPU_RUN_DIR=" + p.RunDir, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	root, err := doc.Root()
	if err != nil {
		return err
	}
	if args := setupArgs(p, root); args != nil {
		// It reads what the image's author made, who might make it slow.
		timeout := 20
		if err := addHook(doc, "createContainer", specs.Hook{Path: p.Hook, Args: args, Env: env, Timeout: &timeout}); err != nil {
			return err
		}
	}
	if p.Socket == "" || p.DriverLimits {
		// Without a guard nobody else would know the container's first process. It may ask the driver, and waits for that a minute.
		timeout := 90
		started := []string{path.Base(p.Hook), "started", "--id", p.ID, "--nonce", p.Nonce}
		if err := addHook(doc, "createRuntime", specs.Hook{Path: p.Hook, Args: started, Env: env, Timeout: &timeout}); err != nil {
			return err
		}
	}
	release := []string{path.Base(p.Hook), "release", "--id", p.ID, "--nonce", p.Nonce}
	return addHook(doc, "poststop", specs.Hook{Path: p.Hook, Args: release, Env: env})
}

// setupArgs is what cgpu-hook setup has to do in the container, all of it in its arguments: the driver may change
// between create and start, the spec does not. Nil when there is nothing to do, since a hook costs a few milliseconds.
func setupArgs(p *Plan, root string) []string {
	if len(p.hooked) == 0 && len(p.Links) == 0 && len(p.LibDirs) == 0 {
		return nil
	}
	args := []string{path.Base(p.Hook), "setup", "--root", root}
	for _, m := range p.hooked {
		args = append(args, "--mount", m.Source+"::"+m.Destination)
	}
	for _, l := range p.Links {
		args = append(args, "--link", l.Target+"::"+l.Path)
	}
	for _, dir := range p.LibDirs {
		args = append(args, "--lib-dir", dir)
	}
	for _, l := range p.Libraries {
		args = append(args, "--lib", fmt.Sprintf("%#x::%s::%s", l.Flags, l.Name, l.Path))
	}
	return args
}

// addHook appends h to the list of hooks called kind.
func addHook(doc *Document, kind string, h specs.Hook) error {
	list, err := doc.list(kind, "hooks")
	if err != nil {
		return err
	}
	b, err := json.Marshal(h)
	if err != nil {
		return err
	}
	return doc.setList(append(list, b), kind, "hooks")
}

// dropNVIDIA removes from one list of hooks those that isNVIDIAHook names.
func dropNVIDIA(m *member) error {
	if string(m.value) == "null" {
		return nil
	}
	list, err := elements(m.value)
	if err != nil {
		return fmt.Errorf("hooks.%s: %w", m.key, err)
	}
	var kept [][]byte
	for i, raw := range list {
		var h specs.Hook
		if err := json.Unmarshal(raw, &h); err != nil {
			return fmt.Errorf("hooks.%s[%d]: %w", m.key, i, err)
		}
		if !isNVIDIAHook(h) {
			kept = append(kept, raw)
		}
	}
	if len(kept) < len(list) {
		m.value = array(kept)
	}
	return nil
}

// isNVIDIAHook names the hooks that must not run in our containers: the legacy one, which injects devices into the
// live container, and the CDI one that sets NVIDIA's own memory limit, because ours decides.
func isNVIDIAHook(h specs.Hook) bool {
	switch path.Base(h.Path) {
	case "nvidia-container-runtime-hook", "nvidia-container-toolkit":
		return true
	case "nvidia-cdi-hook", "nvidia-ctk":
		return slices.Contains(h.Args, "apply-cuda-memory-limits")
	}
	return false
}
