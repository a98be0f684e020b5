// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// gpushare's annotations of a pod, and the variables of the same names.
const (
	annotationIndex      = "ALIYUN_COM_GPU_MEM_IDX"
	annotationPod        = "ALIYUN_COM_GPU_MEM_POD"
	annotationDev        = "ALIYUN_COM_GPU_MEM_DEV"
	annotationAssigned   = "ALIYUN_COM_GPU_MEM_ASSIGNED"
	annotationAssumeTime = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
	annotationAssignTime = "ALIYUN_COM_GPU_MEM_ASSIGN_TIME"
)

// annotationPlacement is how the author of a pod wishes its GPUs chosen: as placement in cgpu.toml, which counts else.
const annotationPlacement = "cgpu.io/placement"

// want is a container that the kubelet may be asking for. The kubelet does not say for which container it asks, only for how
// many units; which one it is has to be guessed. Nothing that holds an amount depends on the guess: it is the device ids
// that book.
type want struct {
	pod             string // UID
	name, container string // "namespace/name"
	limits          map[string]int
	held            []string // resources that it has, as the kubelet says
	podMemory       int      // units of the whole pod, without init containers, as gpushare counts
	gpus            int      // as many GPUs as ACK's label on the pod says; else 1
	index           int      // position of the GPU that the extender chose; noIndex
	placement       string
	since           time.Time
	// Set by match. sure: it is a container of this pod; exact: it is this one, or one with the same limits.
	sure, exact bool
}

// noIndex is want.index of a pod that the extender did not place.
const noIndex = -1

// key names the container and the resource that it was served.
type key struct{ pod, container, resource string }

// Pod is what counts of a pod of the node. Cgpu-agent's watch reads no more of one, since who makes a pod may
// make it of more than a megabyte.
type Pod struct {
	Namespace, Name, UID string
	Ended                bool      // not long ago; there is no more than its name
	Created, Scheduled   time.Time // the latter where a scheduler has placed it
	Waiting              bool      // its phase is Pending
	Started              bool      // has a start time: the kubelet reports it with the first status of a pod that it has admitted or refused
	Ending               bool      // has a deletion time
	Annotations          map[string]string
	Count                string      // its label ResourceCount
	Memory               int         // units of all its containers but init ones, as gpushare counts
	Containers           []Container // those that ask for units, MaxContainers at most
	More                 bool        // there are more of these
}

// Container is one of a Pod.
type Container struct {
	Name            string
	Init            bool
	Memory, Percent int
}

// MaxContainers bounds what is kept of a pod, which may have thousands of containers.
const MaxContainers = 32

// Annotations are the names of those that Pod is to have.
func Annotations() []string {
	return []string{annotationIndex, annotationPod, annotationAssigned, annotationAssumeTime, annotationPlacement}
}

// Set sets how many units of a resource the container asks for; 0 for what is no number of units.
func (c *Container) Set(resource string, n int) {
	if n < 0 || n > 1<<30 {
		n = 0
	}
	switch resource {
	case ResourceMemory:
		c.Memory = n
	case ResourcePercent:
		c.Percent = n
	}
}

func (p *Pod) name() string { return p.Namespace + "/" + p.Name }

// candidates are the containers for which the kubelet may be asking: those of pods that it has not admitted yet, and those that it
// has admitted, and has no units for: it has lost its checkpoint, or the pod is ending. Of what it has it does not ask for more.
func candidates(pods []Pod, has listing) []want {
	var all []want
	for i := range pods {
		p := &pods[i]
		if p.Ended {
			continue
		}
		held := has[p.name()]
		lacks := func(c Container) bool {
			return c.Memory > 0 && len(held[c.Name][ResourceMemory]) == 0 || c.Percent > 0 && len(held[c.Name][ResourcePercent]) == 0
		}
		main := func(c Container) bool { return !c.Init }
		admitted := p.Started || !p.Waiting || p.Ending
		if admitted {
			// The kubelet does not tell what init containers have.
			someLack := slices.ContainsFunc(p.Containers, func(c Container) bool { return main(c) && lacks(c) })
			if held == nil || !someLack && slices.ContainsFunc(p.Containers, main) {
				continue
			}
		}
		base := want{pod: p.UID, name: p.name(), podMemory: p.Memory, gpus: p.gpus(), index: p.index(), placement: p.placement(),
			since: p.bound()}
		for _, init := range []bool{true, false} {
			for _, c := range p.Containers {
				w := base
				w.container = c.Name
				w.limits = map[string]int{ResourceMemory: c.Memory, ResourcePercent: c.Percent}
				for resource, ids := range held[c.Name] {
					if len(ids) > 0 {
						w.held = append(w.held, resource)
					}
				}
				if c.Init == init && (!admitted || c.Init || lacks(c)) {
					all = append(all, w)
				}
			}
		}
	}
	return all
}

// inOrder sorts as the kubelet will probably admit: as pods were bound. gpushare's extender binds one pod of a node after the
// other, and its ASSUME_TIME has nanoseconds; Kubernetes' own times have seconds.
func inOrder(all []want) {
	slices.SortStableFunc(all, func(a, b want) int {
		return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.name, b.name))
	})
}

// gpus reads ACK's label for a share on several GPUs.
func (p *Pod) gpus() int {
	n, err := strconv.Atoi(p.Count)
	if err != nil || n < 1 || n > 64 {
		return 1
	}
	return n
}

// placement reads the pod's wish; empty: it has none.
func (p *Pod) placement() string { return placementOf(p.Annotations[annotationPlacement]) }

// placementOf is a word for a placement; empty where it is none.
func placementOf(wish string) string {
	switch wish {
	case binpack, spread:
		return wish
	}
	return ""
}

// index reads what the extender wrote. A pod's author can write it too, so what the extender would not have written is
// nobody's choice.
func (p *Pod) index() int {
	assumed, err := strconv.ParseInt(p.Annotations[annotationAssumeTime], 10, 64)
	if err != nil || assumed <= 0 || p.Annotations[annotationAssigned] != "false" || p.Annotations[annotationPod] != strconv.Itoa(p.Memory) {
		return noIndex
	}
	n, err := strconv.Atoi(p.Annotations[annotationIndex])
	if err != nil || n < 0 {
		return noIndex
	}
	return n
}

// bound is when a pod was bound, as well as it can be known. An assume time from before the pod's creation is made up, and
// would let its pod go before all others.
func (p *Pod) bound() time.Time {
	if p.index() != noIndex {
		if n, err := strconv.ParseInt(p.Annotations[annotationAssumeTime], 10, 64); err == nil && n > 0 {
			if t := time.Unix(0, n); !t.Before(p.Created) {
				return t
			}
		}
		return p.Created
	}
	if p.Scheduled.Before(p.Created) {
		return p.Created
	}
	return p.Scheduled
}

// mark says that a container was served a resource; sure: it was known to be this one.
type mark struct {
	at   time.Time
	sure bool
}

// match finds the container that the kubelet asks n units of a resource for: one that has this limit and was not surely
// served.
//
// Where these are of one pod, it is that pod, since the one that is asked for is among them: sure is set. Else it is a guess,
// and anybody may have made a pod of this size, with labels and annotations as he likes, so that it is taken for another's.
// What the pods then do not agree on is left out. The GPU that an extender chose stays, as a wish: that of the first, or of
// the one whose GPU it is (position, which Allocate knows): pods of one size that the extender placed on several GPUs come
// to be where it thinks, as long as there is room.
func match(all []want, served map[key]mark, resource string, n, position int) *want {
	var open []*want
	var found *want
	best := 0
	guessed, equal := false, true
	for i := range all {
		w := &all[i]
		m, done := served[key{w.pod, w.container, resource}]
		if m.sure || w.limits[resource] != n || slices.Contains(w.held, resource) {
			continue
		}
		open = append(open, w)
		guessed = guessed || done
		equal = equal && w.limits[other(resource)] == open[0].limits[other(resource)]
		rank := 0
		if !done {
			rank += 3
		}
		switch {
		case position < 0: // the first
		case w.index == position:
			rank += 2
		case w.index < 0:
			rank++
		}
		if found == nil || rank > best {
			found, best = w, rank
		}
	}
	if found == nil {
		return nil
	}
	w := *found
	w.sure = true
	for _, x := range open {
		w.sure = w.sure && x.pod == w.pod
	}
	w.exact = w.sure && (equal || !guessed)
	if w.sure {
		return &w
	}
	w.name = "a pod" // its status says why it was refused, and is not to name another's
	for _, x := range open {
		if x.gpus != w.gpus {
			w.gpus = 1
		}
		if x.podMemory != w.podMemory {
			w.podMemory = 0
		}
		if x.placement != w.placement {
			w.placement = ""
		}
	}
	return &w
}
