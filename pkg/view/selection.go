// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// Selection is what of a view is shown; the zero value is all.
type Selection struct {
	gpus, containers []string
	filters          map[string][]string
}

// filterKeys are what --filter knows, with the value that a vGPU has and the values that there are.
var filterKeys = []struct {
	key    string
	of     func(snapshot.GPU, snapshot.VGPU) string
	values func() []string
}{
	{"state", func(_ snapshot.GPU, x snapshot.VGPU) string { return dashed(x.ShownState()) }, func() []string {
		var list []string
		for _, s := range []string{snapshot.StateRunning, snapshot.StatePaused, snapshot.StateStarting, snapshot.StateGone,
			snapshot.StateNoAnswer, snapshot.StateGuardDead, snapshot.StateNoPage} {
			list = append(list, dashed(s))
		}
		return list
	}},
	{"priority", func(_ snapshot.GPU, x snapshot.VGPU) string { return Priority(x) }, func() []string {
		return []string{quota.PriorityBestEffort.String(), quota.PriorityDefault.String(), quota.PriorityHigh.String()}
	}},
	{"policy", func(g snapshot.GPU, _ snapshot.VGPU) string { return g.Policy }, PolicyNames},
	{"enforcement", func(_ snapshot.GPU, x snapshot.VGPU) string { return x.Enforcement }, func() []string {
		return []string{device.EnforceGuard, device.EnforcePreload, device.EnforceDriver}
	}},
}

// FilterWords are all that --filter takes.
func FilterWords() []string {
	var list []string
	for _, f := range filterKeys {
		for _, value := range f.values() {
			list = append(list, f.key+"="+value)
		}
	}
	return list
}

// PolicyNames are those of sched, in the order of their numbers.
func PolicyNames() []string {
	var list []string
	for p := sched.PolicyFair; p <= sched.PolicyNative; p++ {
		list = append(list, p.String())
	}
	return list
}

// dashed makes one word of a state.
func dashed(state string) string { return strings.ReplaceAll(state, " ", "-") }

// listed takes lists with commas apart.
func listed(values []string) (all []string) {
	for _, v := range values {
		all = append(all, strings.Split(v, ",")...)
	}
	return all
}

// NewSelection is what GPUs, containers and filters select, as people type them.
func NewSelection(gpus, containers, filters []string) (Selection, error) {
	s := Selection{gpus: listed(gpus), containers: containers, filters: map[string][]string{}}
	for _, name := range s.containers {
		if name == "" {
			return s, fmt.Errorf(`--container "": want an ID or a name`)
		}
	}
	for _, text := range filters {
		key, value, _ := strings.Cut(text, "=")
		value = dashed(value)
		var keys []string
		known := false
		for _, f := range filterKeys {
			keys = append(keys, f.key)
			if f.key != key {
				continue
			}
			known = true
			if values := f.values(); !slices.Contains(values, value) {
				return s, fmt.Errorf("--filter %q: want %s= one of %s", text, key, strings.Join(values, ", "))
			}
		}
		if !known {
			return s, fmt.Errorf("--filter %q: want KEY=VALUE with one of the keys %s", text, strings.Join(keys, ", "))
		}
		s.filters[key] = append(s.filters[key], value)
	}
	return s, nil
}

// Apply leaves of a view what is selected. A GPU or a container that is not there is an error; a filter that nothing fits is not.
func (s Selection) Apply(v snapshot.View) (snapshot.View, error) {
	table := &device.Table{}
	for _, g := range v.GPUs {
		table.GPUs = append(table.GPUs, device.GPU{Index: g.Index, UUID: g.UUID})
	}
	var wanted []string
	for _, name := range s.gpus {
		g, err := node.FindGPU(table, name)
		if err != nil {
			return v, fmt.Errorf("--gpu: %w", err)
		}
		wanted = append(wanted, g.UUID)
	}
	found := map[string]bool{}
	kept := []snapshot.GPU{}
	for _, g := range v.GPUs {
		vgpus := []snapshot.VGPU{}
		for _, x := range g.VGPUs {
			named := len(s.containers) == 0
			for _, name := range s.containers {
				if IsContainer(name, x.ID, x.Nonce, x.Name) {
					named, found[name] = true, true
				}
			}
			if named && s.fits(g, x) {
				vgpus = append(vgpus, x)
			}
		}
		if len(wanted) > 0 && !slices.Contains(wanted, g.UUID) || len(vgpus) == 0 && len(s.containers)+len(s.filters) > 0 {
			continue
		}
		g.VGPUs = vgpus
		kept = append(kept, g)
	}
	for _, name := range s.containers {
		if !found[name] {
			return v, fmt.Errorf("--container %q: no container with a GPU has this ID or name; cgpu smi lists them", name)
		}
	}
	v.GPUs = kept
	return v, nil
}

// fits holds a vGPU against the filters.
func (s Selection) fits(g snapshot.GPU, x snapshot.VGPU) bool {
	for _, f := range filterKeys {
		if values, ok := s.filters[f.key]; ok && !slices.Contains(values, f.of(g, x)) {
			return false
		}
	}
	return true
}

// IsContainer says whether a container is meant by what somebody typed. More than one may be: what is only shown needs not be
// told apart.
func IsContainer(typed, id, nonce, name string) bool {
	return typed != "" && (strings.HasPrefix(id, typed) || nonce == typed || name == typed)
}
