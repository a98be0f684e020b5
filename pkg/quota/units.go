// SPDX-License-Identifier: Apache-2.0

package quota

import "strconv"

// Units are what a device plugin allocated to a container by counting, as the kubelet knows it: the ids of devices that it
// gave to the container, and those that a GPU has.
type Units struct {
	Memory  int            // of aliyun.com/gpu-mem that the container has; 0: none
	Percent int            // of aliyun.com/gpu-core.percentage
	PerGPU  map[string]int // units of memory of each GPU, by UUID
}

// unitsName is what messages call the units by.
const unitsName = "aliyun.com/gpu-mem"

// FromUnits makes a request of what gpushare's plugin allocated. How much it is comes from u alone, since a pod's author can set
// every variable: CONTAINER as he likes, and a small DEV would make much of few units. The GPU comes from variables and from
// the annotations of gpushare's scheduler, and is only a wish: any GPU of the plugin's with room is as good for all others.
//
// A DEV that is larger than what the kubelet counts is believed: it makes the limit smaller, and the kubelet leaves out units
// that the plugin calls unhealthy.
func FromUnits(env []string, annotations map[string]string, u Units, gpus []GPU) (*Quota, error) {
	s := gather(env, nil)
	s.gpushare = s.hearGPUShare(annotations)
	q := &Quota{Asked: map[string]string{}}
	q.Priority, q.Percent = PriorityDefault, u.Percent
	if err := readGPUs(q, s); err != nil {
		return nil, err
	}
	q.Native = Selector{} // NVIDIA_VISIBLE_DEVICES is nobody's allocation
	q.from = map[key]setting{memContainer: {name: unitsName, value: strconv.Itoa(u.Memory), set: true}}
	q.Asked[unitsName] = strconv.Itoa(u.Memory)
	if q.Visible.IsZero() && len(gpus) == 1 {
		q.Visible = Selector{All: true}
	}
	chosen, err := q.pick(q.Visible, gpus, visibleDevices, memIdx, nvidiaVisible)
	if err != nil {
		return nil, err
	}
	if len(chosen) != 1 {
		return nil, q.refuse("is of one GPU, and the container's variables and annotations name "+strconv.Itoa(len(chosen)),
			checkPod, memContainer)
	}
	if u.PerGPU[chosen[0].UUID] == 0 {
		return nil, q.refuse("is to be of "+describe(chosen[0])+", of which the device plugin has no healthy unit", checkPod, memContainer)
	}
	q.Visible = Selector{IDs: []string{chosen[0].UUID}}
	// The plugin takes all GPUs for as large as the first, so the most that one has is the number of each.
	most := 0
	for _, n := range u.PerGPU {
		most = max(most, n)
	}
	q.Memory = Memory{Num: uint64(u.Memory), Den: uint64(most)}
	for _, dev := range []setting{s.variables[memDev], s.annotations[memDev]} {
		for _, value := range []string{dev.value, dev.other, dev.last} {
			if n, reason := parseWhole(value, ""); reason == "" {
				q.Memory.Den = max(q.Memory.Den, n)
			}
		}
	}
	return q, nil
}
