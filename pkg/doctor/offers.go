// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
)

// offered is a device that a device plugin of the node offers to the kubelet.
type offered struct{ resource, id string }

// others is what somebody else offers on this node.
type others struct {
	err     string // why it is not known
	devices []offered
	nvidia  bool // NVIDIA's DRA driver is here: what it offers stands in the API server only
}

// agents are the GPUs that cgpu-agent may give to pods, by their UUIDs: those of the table that it has not left to nobody.
func agents(gpus []device.GPU, divided []byte) []string {
	var division struct {
		Owners map[string]string `json:"owners"`
	}
	if len(divided) > 0 && json.Unmarshal(divided, &division) != nil {
		division.Owners = nil // the agent does not start with such a file
	}
	var list []string
	for _, g := range gpus {
		if owner, found := division.Owners[g.UUID]; division.Owners == nil || found && owner != "-" && owner != "*" {
			list = append(list, g.UUID)
		}
	}
	return list
}

// parseOffered reads what cgpu-podresources prints: lines of a resource and an id, the last one "end".
func parseOffered(text string) ([]offered, bool) {
	var list []offered
	for line := range strings.Lines(text) {
		resource, id, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			return list, resource == "end"
		}
		list = append(list, offered{resource, id})
	}
	return nil, false
}

// cgpusResources are those of cgpu's device plugin, and of gpushare's, whose allocations cgpu asks for.
var cgpusResources = []string{"aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage", "aliyun.com/gpu-count"}

// checkOfferedOnce compares what cgpu-agent offers with what the kubelet was offered by others.
func checkOfferedOnce(h *Host) Result {
	k := h.kubernetes()
	switch {
	case !k.node():
		return Result{}
	case !k.kubelet:
		return skip("no kubelet runs here")
	case !k.root:
		return skip("needs root")
	}
	t, err := h.node()
	if err != nil {
		return skip("needs a fresh node table")
	}
	var divided []byte // where it has claims to remember, else where it has not
	for _, file := range []string{h.at(filepath.Join(k.folder, "plugins/gpu.cgpu.io/gpus.json")), filepath.Join(h.RunDir, "gpus.json")} {
		if divided == nil {
			divided, _ = readSome(file)
		}
	}
	return judgeOffered(k.agent, agents(t.GPUs, divided), h.others(k))
}

// others asks the kubelet.
func (h *Host) others(k kubernetes) (o others) {
	o.nvidia = h.answers(filepath.Join(k.folder, "plugins/gpu.nvidia.com/dra*.sock"))
	text, err := output(filepath.Join(h.Bin, "cgpu-podresources"), h.at(k.socket), askTime.String())
	if err != nil {
		o.err = line("the kubelet does not tell what device plugins offer: %v %s", err, text)
		return o
	}
	var whole bool
	if o.devices, whole = parseOffered(text); !whole {
		o.err = "cgpu-podresources is of another version than this cgpu"
	}
	return o
}

// judgeOffered finds the agent's GPUs in the ids of others, which have the GPU's UUID in them, whatever a plugin puts around it (NVIDIA's
// "::0" for a replica, HAMi's "-0").
func judgeOffered(agent offers, mine []string, o others) Result {
	twice, elsewhere := map[string]bool{}, map[string]bool{}
	for _, d := range o.devices {
		if slices.Contains(cgpusResources, d.resource) {
			continue
		}
		i := slices.IndexFunc(mine, func(uuid string) bool { return strings.Contains(strings.ToLower(d.id), strings.ToLower(uuid)) })
		if i >= 0 {
			twice[d.resource+" has "+mine[i]] = true
		} else if strings.Contains(d.id, "GPU-") {
			elsewhere[d.resource] = true
		}
	}
	list := strings.Join(slices.Sorted(maps.Keys(twice)), ", ")
	switch {
	case list != "" && (agent.claims || agent.memory):
		return fail("%s, which cgpu-agent offers as well: a pod gets the whole GPU while others have shares of it", list)
	case list != "":
		return warn("%s, which cgpu shares as well: a pod gets the whole GPU while other containers have shares of it", list)
	case o.nvidia && (agent.claims || agent.memory):
		return warn("NVIDIA's DRA driver (gpu.nvidia.com) is on this node: whether it offers the same GPUs only the API server knows").
			but("kubectl get resourceslices -o wide: no UUID may be in slices of both drivers; leave its DaemonSet off this node")
	case o.err != "":
		return skip("%s", o.err)
	case len(elsewhere) > 0:
		return ok("%s has other GPUs", strings.Join(slices.Sorted(maps.Keys(elsewhere)), ", "))
	}
	return ok("nobody else offers a GPU")
}
