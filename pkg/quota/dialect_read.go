// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"strconv"
	"strings"
)

// Words of HAMi and of HAMi-core, once 4paradigm's vGPU.
const (
	hamiMemory        = "CUDA_DEVICE_MEMORY_LIMIT"
	hamiSM            = "CUDA_DEVICE_SM_LIMIT"
	hamiPriority      = "CUDA_TASK_PRIORITY"
	hamiPolicy        = "GPU_CORE_UTILIZATION_POLICY"
	hamiOversubscribe = "CUDA_OVERSUBSCRIBE"
	hamiDisable       = "CUDA_DISABLE_CONTROL"
)

// readHAMi reads the limits for each GPU, which stand over the one for all, and the percentage likewise.
func readHAMi(w words) (x wish, err error) {
	size := func(s setting) (amount, error) {
		if saysNothing(s.value) {
			return amount{}, nil
		}
		return sized(s, s.value, hamiUnits, 1, "want bytes, or a whole number with k, m or g behind it, such as 6g or 6144m")
	}
	whole, err := w.used(&x, hamiMemory)
	if err != nil {
		return x, err
	}
	if x.memory.each, err = size(whole); err != nil {
		return x, err
	}
	for n := range maxIDs {
		one, err := w.used(&x, at(hamiMemory, n))
		if err != nil {
			return x, err
		}
		limit, err := size(one)
		if err != nil {
			return x, err
		}
		x.memory.put(n, limit)
	}
	if err := readSM(w, &x); err != nil {
		return x, err
	}
	prio, err := w.used(&x, hamiPriority)
	if err != nil {
		return x, err
	}
	if prio.value != "" {
		// HAMi knows two levels, and the lower is everybody's who says nothing.
		switch prio.value {
		case "0":
			x.priority = told{int(PriorityHigh), prio}
		case "1":
			x.priority = told{int(PriorityDefault), prio}
		default:
			return x, prio.bad("want 0 for high priority, 1 for the default", "")
		}
	}
	return x, x.ignore(w, hamiOversubscribe, hamiDisable)
}

// readSM reads HAMi's percentages. A Quota has one for all its GPUs.
func readSM(w words, x *wish) error {
	policy, err := w.used(x, hamiPolicy)
	if err != nil {
		return err
	}
	names := []string{hamiSM}
	for n := range maxIDs {
		names = append(names, at(hamiSM, n))
	}
	var percent told
	for _, name := range names {
		sm, err := w.used(x, name)
		if err != nil {
			return err
		}
		if saysNothing(sm.value) {
			continue
		}
		n, reason := parseWhole(sm.value, "want a percentage from 0 to 100")
		if reason == "" && n > MaxPercent {
			reason = "want a percentage from 0 to 100"
		}
		if reason != "" {
			return sm.bad(reason, "")
		}
		if percent.by.set && percent.value != int(n) {
			return sm.bad("differs from "+percent.by.name+"="+show(percent.by.value)+", and cgpu has one percentage for all GPUs of a container",
				"set one value")
		}
		percent = told{int(n), sm}
	}
	// 100 is HAMi's word for no limit. As a percentage of cgpu's it would keep every other container out.
	if percent.value < MaxPercent && !strings.EqualFold(policy.value, "disable") {
		x.percent = percent
	}
	return nil
}

// Words of NVIDIA's fractions: the container toolkit reads the singular, the first releases of the fractioning daemon
// wrote the plural.
const (
	nvidiaLimit    = "NVIDIA_GPU_MEMORY_LIMIT"
	nvidiaLimits   = "NVIDIA_GPU_MEMORY_LIMITS"
	nvidiaRequest  = "NVIDIA_GPU_MEMORY_REQUEST"
	nvidiaRequests = "NVIDIA_GPU_MEMORY_REQUESTS"
)

// readDriverLimit reads the limit; a request alone is the limit too, as with NVIDIA's own daemon.
func readDriverLimit(w words) (x wish, err error) {
	limit, err := readEither(w, &x, nvidiaLimit, nvidiaLimits)
	if err != nil {
		return x, err
	}
	request, err := readEither(w, &x, nvidiaRequest, nvidiaRequests)
	if err != nil {
		return x, err
	}
	switch {
	case limit.bytes == 0:
		limit = request
	case request.bytes > limit.bytes:
		return x, request.by.bad("is more than "+limit.by.name+"="+show(limit.by.value), "ask for no more than the limit")
	case request.bytes != 0 && request.bytes < limit.bytes:
		x.unmapped = append(x.unmapped, request.by)
	}
	x.memory.each = limit
	return x, nil
}

// readEither reads a word that has two spellings.
func readEither(w words, x *wish, names ...string) (found amount, err error) {
	for _, name := range names {
		s, err := w.used(x, name)
		if err != nil {
			return amount{}, err
		}
		if saysNothing(s.value) {
			continue
		}
		one, err := sized(s, s.value, quantityUnits, MiB, "want a whole number of MiB, or one with Mi or Gi behind it, such as 6144 or 6Gi")
		if err != nil {
			return amount{}, err
		}
		if found.bytes != 0 && found.bytes != one.bytes {
			return amount{}, differ(found.by, "", s, "")
		}
		found = one
	}
	return found, nil
}

// Words of MPS.
const (
	mpsMemory   = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	mpsPercent  = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	mpsPriority = "CUDA_MPS_CLIENT_PRIORITY"
)

// readMPS reads a list such as 0=6G,1=4096M, and the percentage, which may have decimals.
func readMPS(w words) (x wish, err error) {
	list, err := w.used(&x, mpsMemory)
	if err != nil {
		return x, err
	}
	if !saysNothing(list.value) {
		if err := readPinned(list, &x); err != nil {
			return x, err
		}
	}
	percent, err := w.used(&x, mpsPercent)
	if err != nil {
		return x, err
	}
	if percent.value != "" {
		const want = "want a percentage above 0 and up to 100"
		whole, fraction, point := strings.Cut(percent.value, ".")
		n, ok := digits(whole)
		zeros := strings.Trim(fraction, "0") == ""
		if !isDigits(whole) || point && !isDigits(fraction) || !ok || n > MaxPercent || n == MaxPercent && !zeros || n == 0 && zeros {
			return x, percent.bad(want, "")
		}
		if n < MaxPercent {
			x.percent = told{max(1, int(n)), percent}
		}
	}
	return x, x.ignore(w, mpsPriority)
}

func readPinned(list setting, x *wish) error {
	const want = "want a limit for each GPU of the container, such as 0=6G,1=4096M or GPU-<UUID>=6G"
	if len(list.value) > maxList || strings.Count(list.value, ",") >= maxIDs {
		return list.bad("is too long a list; "+want, "")
	}
	for entry := range strings.SplitSeq(list.value, ",") {
		gpu, size, ok := strings.Cut(strings.TrimSpace(entry), "=")
		if !ok {
			return list.bad(want, "")
		}
		limit, err := sized(list, size, mpsUnits, 0, want)
		if err != nil {
			return err
		}
		if strings.HasPrefix(gpu, "GPU-") && isGPUID(gpu) {
			x.named = append(x.named, NamedLimit{gpu, limit.bytes})
			continue
		}
		n, ok := digits(gpu)
		if !isDigits(gpu) || !ok || n >= maxIDs {
			return list.bad(want, "")
		}
		if at := x.memory.at; int(n) < len(at) && at[n].bytes != 0 {
			return list.bad("names GPU "+strconv.FormatUint(n, 10)+" twice", "name each GPU once")
		}
		x.memory.put(int(n), limit)
	}
	return nil
}

// Words of PAI's eGPU.
const (
	paiEnable   = "AMP_VGPU_ENABLE"
	paiMemory   = "GPU_MEM_PER_DEVICE"
	paiUtil     = "GPU_UTIL_PER_DEVICE"
	paiReserved = "ALIYUN_COM_GPU_MEM_RESERVED"
)

// readPAI reads nothing without eGPU's main switch: eGPU then leaves the container alone.
func readPAI(w words) (x wish, err error) {
	if on, err := w.used(&x, paiEnable); err != nil || on.value != "1" {
		return wish{}, err
	}
	memory, err := w.used(&x, paiMemory)
	if err != nil {
		return x, err
	}
	if !saysNothing(memory.value) {
		if x.memory.each, err = sized(memory, memory.value, nil, 1, "want a number of bytes"); err != nil {
			return x, err
		}
	}
	util, err := w.used(&x, paiUtil)
	if err != nil {
		return x, err
	}
	if util.value != "" {
		n, reason := parseWhole(util.value, "want a percentage from 1 to 100")
		if reason == "" && n > MaxPercent {
			reason = "want a percentage from 1 to 100"
		}
		if reason != "" {
			return x, util.bad(reason, "")
		}
		if n < MaxPercent {
			x.percent = told{int(n), util}
		}
	}
	return x, x.ignore(w, paiReserved)
}

// Words of tkestack's gpu-manager. Its device plugin writes the first two into the container's annotations.
const (
	tkeMemory    = "tencent.com/vcuda-memory"
	tkeCore      = "tencent.com/vcuda-core"
	tkeCoreLimit = "tencent.com/vcuda-core-limit"
	tkeBlock     = 256 * MiB
)

// readTKEStack reads memory and hundredths of a card.
func readTKEStack(w words) (x wish, err error) {
	memory, err := w.used(&x, tkeMemory)
	if err != nil {
		return x, err
	}
	if !saysNothing(memory.value) {
		// A person writes blocks of 256MiB, the device plugin bytes. No card has as many blocks as one block has bytes.
		unit := tkeBlock
		if n, ok := digits(memory.value); ok && isDigits(memory.value) && n >= uint64(tkeBlock) {
			unit = 1
		}
		if x.memory.each, err = sized(memory, memory.value, nil, unit, "want a whole number of blocks of 256MiB, or bytes"); err != nil {
			return x, err
		}
	}
	core, err := w.used(&x, tkeCore)
	if err != nil {
		return x, err
	}
	if !saysNothing(core.value) {
		const want = "want hundredths of a card, 1 to 100, or whole cards in hundreds"
		n, reason := parseWhole(core.value, want)
		if reason == "" && n > MaxPercent && n%100 != 0 {
			reason = want
		}
		if reason != "" {
			return x, core.bad(reason, "")
		}
		if n < MaxPercent {
			x.percent = told{int(n), core}
		}
	}
	return x, x.ignore(w, tkeCoreLimit)
}

// unit is a suffix of a size. Letters count in either case.
type unit struct {
	suffix string
	bytes  Bytes
}

// All units are binary. MPS takes its G for a GiB, as one sees in what cudaMemGetInfo then says. Kubernetes takes G for
// ten to the ninth, so that the dialect with Kubernetes' quantities does not take it at all.
var (
	hamiUnits     = []unit{{"k", KiB}, {"m", MiB}, {"g", GiB}}
	mpsUnits      = []unit{{"GB", GiB}, {"MB", MiB}, {"G", GiB}, {"M", MiB}}
	quantityUnits = []unit{{"GiB", GiB}, {"MiB", MiB}, {"Gi", GiB}, {"Mi", MiB}}
)

// sized reads a whole number with one of units behind it, or of plain units without; plain 0: it must have one.
func sized(s setting, text string, units []unit, plain Bytes, want string) (amount, error) {
	each := plain
	for _, u := range units {
		if cut := len(text) - len(u.suffix); cut >= 0 && strings.EqualFold(text[cut:], u.suffix) {
			text, each = text[:cut], u.bytes
			break
		}
	}
	if each == 0 {
		return amount{}, s.bad(want, "")
	}
	n, reason := parseWhole(text, want)
	switch {
	case reason != "":
		return amount{}, s.bad(reason, "")
	case n > uint64(maxLimit/each):
		return amount{}, s.bad("is too large; "+want, "")
	}
	limit := (Bytes(n) * each).FloorMiB()
	if limit == 0 {
		return amount{}, s.bad("is less than 1MiB; "+want, "")
	}
	return amount{limit, s}, nil
}

// maxLimit keeps limits far from the end of 64 bits.
const maxLimit = Bytes(1 << 60)
