// SPDX-License-Identifier: Apache-2.0

package quota

import "strings"

// Bounds of a GPU list. No machine has this many GPUs.
const (
	maxList = 4096 // bytes
	maxIDs  = 64
)

const (
	wantGPUs   = "want GPU indices, UUIDs or unique beginnings of UUIDs, separated by commas, or all"
	seeGPUs    = "cgpu smi lists the GPUs of this machine"
	oneList    = "name each GPU once: in ALIYUN_COM_GPU_VISIBLE_DEVICES to slice it, or in NVIDIA_VISIBLE_DEVICES to give it whole"
	noPlacing  = "means that the device plugin found no GPU for this pod"
	checkPod   = "check the pod's ALIYUN_COM_GPU_MEM_* annotations and that gpushare's scheduler extender placed it"
	noGPUMagic = "no-gpu-has-" // what gpushare's plugin writes instead of an index
)

// readGPUs reads which GPUs to slice and which to give whole.
//
//   - ALIYUN_COM_GPU_VISIBLE_DEVICES names the GPUs to slice; those that NVIDIA_VISIBLE_DEVICES lists beside them are
//     whole (mixed layout). "all" in the latter never makes a GPU whole: docker writes it for --gpus all, and many
//     images do, so reading it as whole would lift the limit.
//   - Else gpushare's ALIYUN_COM_GPU_MEM_IDX names the one GPU to slice, and NVIDIA_VISIBLE_DEVICES, which its plugin
//     sets to the same GPU, counts for nothing.
//   - Else the GPUs in NVIDIA_VISIBLE_DEVICES are sliced, if it names any.
func readGPUs(q *Quota, s *settings) error {
	nvidia, err := s.get(nvidiaVisible)
	if err != nil {
		return err
	}
	if strings.HasPrefix(nvidia.value, noGPUMagic) {
		return nvidia.bad(noPlacing, checkPod)
	}
	idx, err := q.used(s, memIdx)
	if err != nil {
		return err
	}
	if idx.set {
		if idx.value == "-1" || strings.HasPrefix(idx.value, noGPUMagic) {
			return idx.bad(noPlacing, checkPod)
		}
		if !isDigits(idx.value) || len(idx.value) > maxNumber {
			return idx.bad("want the index of one GPU", seeGPUs)
		}
	}
	visible, err := q.used(s, visibleDevices)
	if err != nil {
		return err
	}
	if visible.set {
		if q.Visible, err = parseSelector(visible); err != nil {
			return err
		}
		if q.Visible.IsZero() {
			return visible.bad("names no GPU", wantGPUs)
		}
	}
	switch {
	case idx.set && !visible.set:
		q.Visible = Selector{IDs: []string{idx.value}}
	case !idx.set:
		return readNVIDIA(q, nvidia)
	}
	return nil
}

// readNVIDIA gives NVIDIA_VISIBLE_DEVICES its meaning: whole GPUs beside the sliced ones, or else the sliced ones.
func readNVIDIA(q *Quota, nvidia setting) error {
	named, err := parseSelector(nvidia)
	if err != nil {
		return err
	}
	switch {
	case named.IsZero():
		return nil
	case q.Visible.IsZero():
		q.Visible = named
	case !named.All:
		// Resolve looks again: there an index and a UUID may turn out to be one GPU.
		for _, id := range named.IDs {
			if q.Visible.All || q.Visible.has(id) {
				return nvidia.bad("names GPU "+show(id)+", which is to be sliced too", oneList)
			}
		}
		q.Native = named
	default:
		return nil
	}
	q.Asked[nvidia.name] = nvidia.value
	return nil
}

// parseSelector reads a list of GPUs. An unset or empty value, "void" and "none" name nothing.
func parseSelector(v setting) (Selector, error) {
	switch v.value {
	case "", "void", "none":
		return Selector{}, nil
	case "all":
		return Selector{All: true}, nil
	}
	if len(v.value) > maxList || strings.Count(v.value, ",") >= maxIDs {
		return Selector{}, v.bad("is too long a list", wantGPUs)
	}
	var s Selector
	for id := range strings.SplitSeq(v.value, ",") {
		switch {
		case strings.HasPrefix(id, "MIG-"), strings.HasPrefix(id, "MIG:"), isMIGPair(id):
			return Selector{}, v.bad("names a MIG device, which cannot be sliced further", "name a whole GPU: "+seeGPUs)
		case !isGPUID(id):
			return Selector{}, v.bad("has "+show(id)+" in it, which is no GPU; "+wantGPUs, seeGPUs)
		case s.has(id):
			return Selector{}, v.bad("names GPU "+show(id)+" twice", "name each GPU once")
		}
		s.IDs = append(s.IDs, id)
	}
	return s, nil
}

// isGPUID reports that id looks like an index or (the beginning of) a UUID.
func isGPUID(id string) bool {
	if isDigits(id) {
		return len(id) <= maxNumber
	}
	rest, ok := strings.CutPrefix(id, "GPU-")
	if !ok || rest == "" || len(rest) > 64 {
		return false
	}
	for i := range len(rest) {
		if c := rest[i] | 0x20; !isDigit(rest[i]) && rest[i] != '-' && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// isMIGPair reports NVIDIA's "GPU:instance" form of a MIG device.
func isMIGPair(id string) bool {
	gpu, instance, ok := strings.Cut(id, ":")
	return ok && isDigits(gpu) && isDigits(instance)
}

// has reports that the same text (case aside) is in s.
func (s Selector) has(id string) bool {
	for _, have := range s.IDs {
		if strings.EqualFold(have, id) {
			return true
		}
	}
	return false
}
