// SPDX-License-Identifier: Apache-2.0

package quota

import "strings"

// key numbers the settings that a container can make.
type key int

const (
	memContainer key = iota
	memDev
	memUnit
	memIdx
	memPod
	visibleDevices
	schdWeight
	highPrio
	corePercentage
	disable
	nvidiaVisible
	priority
	memSpill
	limiter
	domain
	threads
	numKeys
)

// keyName is what a key is called. The annotation is the variable in lower case, without ALIYUN_COM_ or CGPU_, and with dashes (a test
// holds the table to that rule); only that of CGPU_MEM_SPILL stands with the other gpu-mem- annotations. native is cgpu's own
// variable where the other one is Alibaba Cloud's; both mean the same. What has no variable is asked for by annotation only.
type keyName struct{ variable, annotation, native string }

// isVariable says whether a variable of that name is the key's.
func (n *keyName) isVariable(v string) bool { return v != "" && (v == n.variable || v == n.native) }

var names = [numKeys]keyName{
	memContainer:   {"ALIYUN_COM_GPU_MEM_CONTAINER", "cgpu.io/gpu-mem-container", "CGPU_MEM"},
	memDev:         {"ALIYUN_COM_GPU_MEM_DEV", "cgpu.io/gpu-mem-dev", ""},
	memUnit:        {"ALIYUN_COM_GPU_MEM_UNIT", "cgpu.io/gpu-mem-unit", ""},
	memIdx:         {"ALIYUN_COM_GPU_MEM_IDX", "cgpu.io/gpu-mem-idx", ""},
	memPod:         {"ALIYUN_COM_GPU_MEM_POD", "cgpu.io/gpu-mem-pod", ""},
	visibleDevices: {"ALIYUN_COM_GPU_VISIBLE_DEVICES", "cgpu.io/gpu-visible-devices", "CGPU_GPUS"},
	schdWeight:     {"ALIYUN_COM_GPU_SCHD_WEIGHT", "cgpu.io/gpu-schd-weight", "CGPU_WEIGHT"},
	highPrio:       {"ALIYUN_COM_GPU_HIGH_PRIO", "cgpu.io/gpu-high-prio", ""},
	corePercentage: {"ALIYUN_COM_GPU_CORE_PERCENTAGE", "cgpu.io/gpu-core-percentage", "CGPU_PERCENT"},
	disable:        {"CGPU_DISABLE", "cgpu.io/disable", ""},
	nvidiaVisible:  {"NVIDIA_VISIBLE_DEVICES", "cgpu.io/nvidia-visible-devices", ""},
	priority:       {"", "cgpu.io/priority", ""},
	memSpill:       {"CGPU_MEM_SPILL", "cgpu.io/gpu-mem-spill", ""},
	limiter:        {"CGPU_LIMITER", "cgpu.io/limiter", ""},
	domain:         {"CGPU_DOMAIN", "cgpu.io/domain", ""},
	threads:        {"CGPU_THREADS", "cgpu.io/threads", ""},
}

// setting is what the container says for one key, under the name it used.
type setting struct {
	_           [0]func() // not comparable: nobody compares settings, and the code for it made cgpu-runtime 4 KB larger
	name, value string
	set         bool
	// other is a second, different value of the same variable, or of the key's other one, which otherName is then.
	other, otherName string
	conflict         bool
	// last is the value of its last occurrence, which is the one that the container's processes see.
	last string
}

// bad makes the error for a refused setting. 42 copies of it made cgpu-runtime 8 KB larger.
//
//go:noinline
func (s setting) bad(reason, remedy string) error {
	return &Error{Variable: s.name, Value: s.value, Reason: reason, Remedy: remedy}
}

// settings holds both sources apart, because they are trusted differently.
type settings struct {
	variables, annotations [numKeys]setting
	foreign                bool // a dialect's annotation asks for a vGPU
	gpushare               bool // some of annotations are gpushare's
	beside                 bool // an allocation says which GPUs, and how much of each
}

// gather sorts the environment and the annotations by key.
func gather(env []string, annotations map[string]string) *settings {
	var s settings
	for _, entry := range env {
		name, value, _ := strings.Cut(entry, "=")
		// One look at the first letter spares most entries of a long environment all the comparisons.
		if name == "" || (name[0] != 'A' && name[0] != 'C' && name[0] != 'N') {
			continue
		}
		for k := range names {
			if names[k].isVariable(name) {
				s.variables[k].add(key(k), name, value)
				break
			}
		}
	}
	for k := range names {
		if value, ok := annotations[names[k].annotation]; ok {
			s.annotations[k] = setting{name: names[k].annotation, value: value, set: true}
		}
	}
	return &s
}

// add takes one more occurrence of a variable.
func (s *setting) add(k key, name, value string) {
	s.last = value
	switch {
	case !s.set:
		s.name, s.value, s.set = name, value, true
	case k == nvidiaVisible:
		// Engines append their own value behind the user's, and CDI injection then appends "void" to switch NVIDIA's
		// injectors off: the last value that is not such a switch is what was asked for.
		if value != "void" {
			s.value = value
		}
	case !s.conflict && value != s.value:
		s.other, s.otherName, s.conflict = value, name, true
	}
}

// twice is the refusal of a setting with two values.
func (s setting) twice() error {
	if s.otherName != "" && s.otherName != s.name {
		return s.bad("disagrees with "+s.otherName+"="+show(s.other), "set one of them")
	}
	return s.bad("is set a second time, to "+show(s.other), "set it once")
}

// annotated reports that the request came by annotation, that is from a device plugin: a pod cannot forge those, while
// every variable can be overridden by the pod's author. Such a request is read from annotations alone: a variable must
// not lift the limit (CGPU_DISABLE, _MEM_DEV), nor add GPUs to it (both _VISIBLE_DEVICES).
func (s *settings) annotated() bool { return s.annotations[memContainer].set || s.foreign }

// get returns the setting of k that counts.
func (s *settings) get(k key) (setting, error) {
	if a := s.annotations[k]; a.set || s.annotated() && !s.beside {
		return a, nil
	}
	v := s.variables[k]
	if s.beside {
		// A device plugin's and the pod author's behind it, who may lower what he was given.
		v.value = v.last
		return v, nil
	}
	if v.conflict {
		// In Kubernetes the first may be the device plugin's and the last the pod author's; neither is surely right.
		return v, v.twice()
	}
	return v, nil
}
