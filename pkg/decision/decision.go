// SPDX-License-Identifier: Apache-2.0

// Package decision reads what a scheduler that is not Kubernetes' own decided about a pod: which GPU each container gets, and how much of
// it. Such a scheduler writes its decision into annotations of the pod, where the pod's author could write too. So each row of the table
// has a policy beside its parser (policy.go), which keeps everybody but who binds pods from these annotations; a decision counts only
// where that policy is in force, and was when the pod was made.
//
// The package is pure. cgpu-agent reads pod and policy from the API server (package nri), and carries out what is read here.
package decision

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Pod is what counts of one.
type Pod struct {
	Namespace, Name, UID string
	Node                 string // its spec.nodeName
	Created              time.Time
	Ending               bool              // has a deletion time
	Annotations          map[string]string // those that Reads names
	Containers           []Container       // init containers first, each kind in its order
	Ephemeral            []string          // names of ephemeral containers, which no scheduler gives anything
}

// Container of a Pod.
type Container struct {
	Name string
	Init bool
	// Limits are those that the scheduler goes by, as the API server has them, which lets nobody change them.
	Limits map[string]string
}

// Bounds of a pod that is read, whoever made it.
const (
	MaxContainers = 128
	MaxValue      = 8 << 10 // of an annotation
	MaxLimit      = 32      // of a limit's text
	maxUUID       = 64
)

// Scheduler is one that is understood.
type Scheduler struct {
	// Name is what it is called in flags.
	Name string
	// Decided are annotations by which the scheduler says what it decided: no new pod has any of them. A * stands for a container's name.
	Decided []string
	// Asked are those by which the author asks. They are part of the decision, so they stay as the pod was made with them.
	Asked []string
	// Limits are the resources by which a container asks, where it does not by annotations.
	Limits []string
	// Settling is how long API servers may take from the writing of the policy to following it; 0: a minute.
	Settling time.Duration
	parse    func(s *Scheduler, p *Pod, i int) ([]gpu, error)
	// asks says for what a container with such limits asks; nil where it asks by annotations.
	asks func(limits map[string]uint64) ask
}

// ask is for that many GPUs, so much of each. 0 MiB are any memory, down from all of a GPU: a part of it in percent, or a default of the
// scheduler's.
type ask struct{ gpus, mib, percent uint64 }

// gpu is a part of one that a container was given.
type gpu struct {
	uuid    string
	memory  quota.Bytes
	percent int
}

// Schedulers are all that are understood. What each writes where is from its source:
//
//	HAMi      pkg/scheduler/scheduler.go (Filter), pkg/device/devices.go (EncodePodSingleDevice), 4707fb02, 2026-08
//	Volcano   pkg/scheduler/api/devices/nvidia/vgpu (Allocate, encodePodDevices), pkg/scheduler/api/devices/util.go, ed72c7c8, 2026-08
//	KAI       docs/gpu-sharing/README.md and pkg/common/resources (NvFractions), after 0.18, 2026-09
func Schedulers() []*Scheduler {
	return []*Scheduler{
		{Name: "hami", Decided: []string{"hami.io/vgpu-devices-allocated", "hami.io/vgpu-node"},
			Limits: []string{"nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"}, parse: parseHAMi, asks: asksHAMi},
		{Name: "kai", Decided: []string{"nvidia.com/container.*.gpus.devices"},
			Asked: []string{"nvidia.com/container.*.gpu-memory.request", "nvidia.com/container.*.gpu-memory.limit"}, parse: parseKAI},
		{Name: "volcano", Decided: []string{"volcano.sh/vgpu-ids-new", "volcano.sh/vgpu-node"},
			Limits: []string{"volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores", "volcano.sh/vgpu-memory-percentage"},
			parse:  parseVolcano, asks: asksVolcano},
	}
}

// Find returns the scheduler of a name; nil where there is none.
func Find(name string) *Scheduler {
	all := Schedulers()
	if i := slices.IndexFunc(all, func(s *Scheduler) bool { return s.Name == name }); i >= 0 {
		return all[i]
	}
	return nil
}

// Names of all of them.
func Names() (names []string) {
	for _, s := range Schedulers() {
		names = append(names, s.Name)
	}
	return names
}

// Reads says whether an annotation is one that the scheduler's decision is read from.
func (s *Scheduler) Reads(key string) bool { return matches(s.Decided, key) || matches(s.Asked, key) }

// Decides says whether these annotations claim that the scheduler decided something about a container, or its pod.
func (s *Scheduler) Decides(annotations map[string]string, container string) bool {
	return slices.ContainsFunc(s.Decided, func(key string) bool {
		_, ok := annotations[strings.Replace(key, "*", container, 1)]
		return ok
	})
}

func matches(patterns []string, key string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		before, after, star := strings.Cut(p, "*")
		if !star {
			return p == key
		}
		return len(key) > len(before)+len(after) && strings.HasPrefix(key, before) && strings.HasSuffix(key, after)
	})
}

// Shares are what the container of a name was given of this node's GPUs; none where it was given nothing. The node is the one that the
// pod is to run on, gpus its table.
func (s *Scheduler) Shares(p *Pod, container, node string, gpus []device.GPU) ([]alloc.Share, error) {
	switch i := slices.IndexFunc(p.Containers, func(c Container) bool { return c.Name == container }); {
	case p.Node != node:
		return nil, fmt.Errorf("decision: pod %s/%s: is bound to node %.253q, and this is %q", p.Namespace, p.Name, p.Node, node)
	case p.Ending:
		return nil, fmt.Errorf("decision: pod %s/%s: is being deleted: make it anew", p.Namespace, p.Name)
	case i < 0 && slices.Contains(p.Ephemeral, container): // kubectl debug
		return nil, nil
	case i < 0:
		return nil, fmt.Errorf("decision: pod %s/%s: has no container %q", p.Namespace, p.Name, container)
	default:
		for key, value := range p.Annotations {
			if len(value) > MaxValue {
				return nil, fmt.Errorf("decision: annotation %s: has more than %d bytes", key, MaxValue)
			}
		}
		parts, err := s.parse(s, p, i)
		if err == nil {
			err = check(parts, gpus)
		}
		if err == nil && s.asks != nil && len(parts) > 0 {
			err = s.within(p.Containers[i], parts)
		}
		if err != nil {
			return nil, fmt.Errorf("decision: container %q: %w", container, err)
		}
		return s.shares(p, container, parts), nil
	}
}

func (s *Scheduler) shares(p *Pod, container string, parts []gpu) (shares []alloc.Share) {
	for n, g := range parts {
		id := fmt.Sprintf("%s/%s/%s/%d", s.Name, p.UID, container, n)
		shares = append(shares, alloc.Share{ID: id, UUID: g.uuid, Containers: 1,
			Slice: quota.Slice{Limit: g.memory, Share: quota.Share{Percent: g.percent, Priority: quota.PriorityDefault}}})
	}
	return shares
}

// check holds a decision to what the node has. How much of that is left the ledger knows, when the container starts.
func check(parts []gpu, gpus []device.GPU) error {
	if len(parts) > alloc.MaxShares {
		return fmt.Errorf("was given parts of %d GPUs: a container can have %d", len(parts), alloc.MaxShares)
	}
	for n, g := range parts {
		i := slices.IndexFunc(gpus, func(k device.GPU) bool { return k.UUID == g.uuid })
		switch {
		case i < 0:
			return fmt.Errorf("GPU %q: is not among the %d of this node: does the scheduler see another node's?", g.uuid, len(gpus))
		case g.memory < quota.MiB:
			return fmt.Errorf("GPU %s: memory %d bytes: want at least a MiB", g.uuid, uint64(g.memory))
		case g.memory > gpus[i].Memory:
			return fmt.Errorf("GPU %s: memory %v: it has %v: does the scheduler scale memory up?", g.uuid, g.memory, gpus[i].Memory)
		case slices.ContainsFunc(parts[:n], func(o gpu) bool { return o.uuid == g.uuid }):
			return fmt.Errorf("GPU %s: was given to it twice", g.uuid)
		}
	}
	return nil
}

// within holds a decision to what the container asks for. A scheduler that decides for whoever calls it, as HAMi before September 2026,
// may have been told of another pod than there is; by the limits count quotas.
func (s *Scheduler) within(c Container, parts []gpu) error {
	limits := map[string]uint64{}
	for name, text := range c.Limits {
		n, err := parseQuantity(text)
		if err != nil {
			return fmt.Errorf("limit %s=%.32q: %w", name, text, err)
		}
		limits[name] = n
	}
	most := s.asks(limits)
	if uint64(len(parts)) > most.gpus {
		return fmt.Errorf("was given parts of %d GPUs, and its limit %s is %d: does anybody else write in the scheduler's name?", len(parts),
			s.Limits[0], most.gpus)
	}
	for _, g := range parts {
		switch {
		case most.mib > 0 && uint64(g.memory/quota.MiB) > most.mib:
			return fmt.Errorf("GPU %s: memory %v: its limit %s is %d MiB: does the scheduler multiply it (memoryFactor)?", g.uuid, g.memory,
				s.Limits[1], most.mib)
		case most.percent > 0 && most.percent < quota.MaxPercent && (g.percent == 0 || uint64(g.percent) > most.percent):
			return fmt.Errorf("GPU %s: %d percent: its limit %s is %d, and 0 is no cap", g.uuid, g.percent, s.Limits[2], most.percent)
		}
	}
	return nil
}

// asksHAMi: without memory it gives the percentage that is asked for, else its default, else all.
func asksHAMi(limits map[string]uint64) ask {
	return ask{gpus: limits["nvidia.com/gpu"], mib: limits["nvidia.com/gpumem"], percent: limits["nvidia.com/gpucores"]}
}

// asksVolcano: memory alone is that of one GPU, and a percentage goes before it.
func asksVolcano(limits map[string]uint64) ask {
	a := ask{gpus: limits["volcano.sh/vgpu-number"], mib: limits["volcano.sh/vgpu-memory"], percent: limits["volcano.sh/vgpu-cores"]}
	if _, counted := limits["volcano.sh/vgpu-number"]; !counted {
		a.gpus = 1
	}
	if _, part := limits["volcano.sh/vgpu-memory-percentage"]; part {
		a.mib = 0
	}
	return a
}

// parseHAMi: one list of GPUs for each container, also for those that have none, init containers first.
func parseHAMi(s *Scheduler, p *Pod, i int) ([]gpu, error) {
	return listed(p, s.Decided, len(p.Containers), i)
}

// parseVolcano: one list for each container that asks; init containers cannot.
func parseVolcano(s *Scheduler, p *Pod, i int) ([]gpu, error) {
	at, all := -1, 0
	for n, c := range p.Containers {
		_, counted := c.Limits["volcano.sh/vgpu-number"]
		_, sized := c.Limits["volcano.sh/vgpu-memory"]
		if c.Init || !counted && !sized {
			continue
		}
		if n == i {
			at = all
		}
		all++
	}
	return listed(p, s.Decided, all, at)
}

// listed reads HAMi's format, which Volcano took over: lists by container, parted by ";", of GPUs, each ended by ":". keys are the list's
// and the node's. at is the container's place among the all that are listed; less than 0 for one that is not.
func listed(p *Pod, keys []string, all, at int) ([]gpu, error) {
	key, nodeKey := keys[0], keys[1]
	text, ok := p.Annotations[key]
	if !ok {
		return nil, fmt.Errorf("annotation %s: is missing, and %s is there", key, nodeKey)
	}
	if node := p.Annotations[nodeKey]; node != p.Node {
		return nil, fmt.Errorf("annotation %s=%.253q: the pod is bound to node %q", nodeKey, node, p.Node)
	}
	lists := strings.Split(strings.TrimSuffix(text, ";"), ";")
	if len(lists) != all {
		return nil, fmt.Errorf("annotation %s: has %d lists of GPUs for %d containers: is the scheduler of another version?", key, len(lists),
			all)
	}
	if at < 0 || lists[at] == "" {
		return nil, nil
	}
	list, ended := strings.CutSuffix(lists[at], ":")
	if !ended {
		return nil, fmt.Errorf("annotation %s: list %.80q: does not end with a colon", key, lists[at])
	}
	var parts []gpu
	for one := range strings.SplitSeq(list, ":") {
		g, err := parseGPU(one)
		if err != nil {
			return nil, fmt.Errorf("annotation %s: %.80q: %w", key, one, err)
		}
		parts = append(parts, g)
	}
	return parts, nil
}

// parseGPU reads UUID,kind,MiB,percent. As with HAMi, 0 and 100 percent are no cap: the latter is a GPU that the scheduler gives to nobody
// else.
func parseGPU(text string) (g gpu, err error) {
	f := strings.Split(text, ",")
	if len(f) != 4 || f[0] == "" || len(f[0]) > maxUUID {
		return g, fmt.Errorf("want UUID,kind,MiB,percent")
	}
	mib, err := whole(f[2], 1<<30)
	if err != nil {
		return g, fmt.Errorf("memory: %w", err)
	}
	percent, err := whole(f[3], quota.MaxPercent)
	if err != nil {
		return g, fmt.Errorf("cores: %w", err)
	}
	return gpu{uuid: f[0], memory: quota.Bytes(mib) * quota.MiB, percent: percent % quota.MaxPercent}, nil
}

// whole reads a number from 0 to most, in digits alone.
func whole(text string, most uint64) (int, error) {
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil || n > most {
		return 0, fmt.Errorf("%.32q: want a whole number, at most %d", text, most)
	}
	return int(n), nil
}

// parseKAI: the GPUs are the binder's word, how much of each is what the author asked for, since by that the scheduler counts. A limit
// beyond the request is nobody's promise, so it is not given.
func parseKAI(_ *Scheduler, p *Pod, i int) ([]gpu, error) {
	prefix := "nvidia.com/container." + p.Containers[i].Name
	devices, ok := p.Annotations[prefix+".gpus.devices"]
	if !ok {
		return nil, nil
	}
	key := prefix + ".gpu-memory.request"
	text, ok := p.Annotations[key]
	if !ok {
		key = prefix + ".gpu-memory.limit"
		if text, ok = p.Annotations[key]; !ok {
			return nil, fmt.Errorf("annotation %s.gpu-memory.request: is missing: ask for memory, a GPU alone is not shared", prefix)
		}
	}
	memory, err := parseSize(text)
	if err != nil {
		return nil, fmt.Errorf("annotation %s=%.32q: %w", key, text, err)
	}
	var parts []gpu
	for uuid := range strings.SplitSeq(devices, ",") {
		if len(uuid) > maxUUID {
			uuid = uuid[:maxUUID]
		}
		parts = append(parts, gpu{uuid: uuid, memory: memory})
	}
	return parts, nil
}

// parseSize reads memory, in whole MiB.
func parseSize(text string) (quota.Bytes, error) {
	n, err := parseQuantity(text)
	return quota.Bytes(n) / quota.MiB * quota.MiB, err
}

// parseQuantity reads a quantity of Kubernetes' as people write it. Its own parser also takes 1e999999999, which it then computes.
func parseQuantity(text string) (uint64, error) {
	digits := strings.TrimRight(text, "KMGTki")
	unit, ok := map[string]uint64{"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30,
		"Ti": 1 << 40}[text[len(digits):]]
	n, err := strconv.ParseUint(digits, 10, 63)
	if !ok || err != nil || n > 1<<62/unit {
		return 0, fmt.Errorf("want a whole number, alone or with k, M, G, T, Ki, Mi, Gi or Ti")
	}
	return n * unit, nil
}
