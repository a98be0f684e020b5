// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"slices"
	"strconv"
	"strings"
)

// mostIgnored bounds what is told of words that do nothing: a tenant chooses them.
const mostIgnored = 8

// ours are what the names of cgpu's variables and annotations begin with.
const (
	aliyunPrefix     = "ALIYUN_COM_GPU_"
	nativePrefix     = "CGPU_"
	annotationPrefix = "cgpu.io/"
)

// own begin like names for containers and are for cgpu's programs, the annotations for cgpu-agent.
var own = []string{"CGPU_RUN_DIR", "CGPU_CONFIG", "CGPU_CLAIM", "CGPU_AGENT_", annotationPrefix + "gpu-mem-limit",
	annotationPrefix + "placement"}

// ignored tells what of the container's words does nothing though it looks as if it were for cgpu: a name that is misspelled, or of
// something that cgpu has not.
func (s *settings) ignored(env []string, annotations map[string]string, dialects []Dialect) []string {
	list := unknown(env, annotations, dialects)
	idx, err1 := s.get(memIdx)
	visible, err2 := s.get(visibleDevices)
	if err1 == nil && err2 == nil && idx.set && visible.set {
		list = append(list, idx.name+", because "+visible.name+" names the GPUs")
	}
	return list
}

// Missed tells what looks as if a container that gets no vGPU were to have one: misspelled names, and settings without a memory limit.
func Missed(env []string, annotations map[string]string, dialects ...Dialect) []string {
	s := gather(env, annotations)
	if s.variables[memContainer].set || s.annotations[memContainer].set {
		return nil // switched off
	}
	list := unknown(env, annotations, dialects)
	for k := range names {
		for _, said := range []setting{s.variables[k], s.annotations[k]} {
			if said.set && key(k) != disable && isOurs(said.name) {
				list = append(list, said.name+", without "+names[memContainer].native)
			}
		}
	}
	return list
}

// unknown lists names that begin like those of cgpu, in any case, and are none.
func unknown(env []string, annotations map[string]string, dialects []Dialect) []string {
	var found []string
	add := func(name string, is func(*keyName) bool) {
		if !isOurs(name) {
			return
		}
		for k := range names {
			if is(&names[k]) {
				return
			}
		}
		found = append(found, name)
	}
	for _, entry := range env {
		v, _, _ := strings.Cut(entry, "=")
		if !isWordOf(v, dialects) && !strings.HasPrefix(v, annotationPrefix) {
			add(v, func(n *keyName) bool { return n.isVariable(v) })
		}
	}
	for a := range annotations {
		if strings.HasPrefix(a, annotationPrefix) && !strings.HasPrefix(a, annotationPrefix+"applied.") {
			add(a, func(n *keyName) bool { return n.annotation == a })
		}
	}
	slices.Sort(found)
	found = slices.Compact(found) // a tenant chooses how many there are
	var list []string
	for _, name := range found[:min(len(found), mostIgnored)] {
		list = append(list, shorten(name)+", a name that cgpu does not know")
	}
	if more := len(found) - mostIgnored; more > 0 {
		list = append(list, strconv.Itoa(more)+" more names that cgpu does not know")
	}
	return list
}

// isOurs reports that a name begins like those of cgpu.
func isOurs(name string) bool {
	for _, prefix := range own {
		if strings.HasPrefix(name, prefix) {
			return false
		}
	}
	// Kubernetes puts such into all pods of a namespace, of a Service whose name begins so.
	if strings.Contains(name, "_SERVICE_") || strings.Contains(name, "_PORT") {
		return false
	}
	for _, prefix := range []string{aliyunPrefix, nativePrefix, annotationPrefix} {
		if len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	return false
}

// isWordOf says whether a variable is one of the dialects'.
func isWordOf(name string, enabled []Dialect) bool {
	for _, d := range dialects {
		if slices.Contains(enabled, d.name) && !d.annotated && (slices.Contains(d.memory, name) || slices.Contains(d.other, name)) {
			return true
		}
	}
	return false
}

// shorten is show for a name, which needs no quotation marks as it is.
func shorten(name string) string {
	if len(name) > maxShown || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return show(name)
	}
	return name
}
