// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"math/bits"
	"strconv"
)

const (
	wantSize  = "want a positive number of GiB, or a size such as 6GiB or 6144MiB"
	wantUnits = "with ALIYUN_COM_GPU_MEM_DEV want a positive whole number of its units"
)

// readMemory reads the limit: CONTAINER units out of DEV, or without DEV a size.
func readMemory(q *Quota, s *settings) error {
	container, err := q.used(s, memContainer)
	if err != nil {
		return err
	}
	unit, err := readUnit(q, s)
	if err != nil {
		return err
	}
	dev, err := q.used(s, memDev)
	if err != nil {
		return err
	}
	if !dev.set {
		return fixed(q, s, container, unit)
	}
	num, reason := parseWhole(container.value, wantUnits)
	if reason != "" {
		return container.bad(reason, "")
	}
	den, reason := parseWhole(dev.value, "want the positive whole number of units of one GPU")
	if reason != "" {
		return dev.bad(reason, "")
	}
	if num > den {
		return container.bad("is more than one whole GPU, "+dev.name+"="+show(dev.value),
			"ask for at most "+strconv.FormatUint(den, 10))
	}
	q.Memory = Memory{Num: num, Den: den}
	return nil
}

// fixed reads a limit that does not depend on the card.
func fixed(q *Quota, s *settings, container setting, unit Bytes) error {
	// A device plugin that annotates "3" and means 3 of 15 units must annotate the 15 too: the variable could be
	// the pod author's, and leaving it out would silently turn units into GiB.
	if dev := s.variables[memDev]; dev.set && s.annotated() && isDigits(container.value) {
		return container.bad("is an annotation, but "+dev.name+" is only a variable, which a pod can forge",
			"annotate "+names[memDev].annotation+" too, or give a size with a unit")
	}
	size, reason := parseSize(container.value, unit)
	if reason != "" {
		return container.bad(reason, "")
	}
	q.Memory = Memory{Fixed: size}
	return nil
}

// readUnit reads the unit of a CONTAINER without one; GiB unless said otherwise.
func readUnit(q *Quota, s *settings) (Bytes, error) {
	v, err := q.used(s, memUnit)
	if err != nil || !v.set {
		return GiB, err
	}
	unit := parseUnit(v.value)
	if unit == 0 {
		return 0, v.bad("want GiB or MiB", "")
	}
	return unit, nil
}

// readPod checks what the gpushare scheduler gave the whole pod. It is not used beyond that: a container asking for
// more than its pod has must be a mistake or a forgery.
func readPod(q *Quota, s *settings) error {
	pod, err := q.used(s, memPod)
	if err != nil || !pod.set {
		return err
	}
	total, reason := parseWhole(pod.value, "want the positive whole number of units of the pod")
	if reason != "" {
		return pod.bad(reason, "")
	}
	name, value := q.source(memContainer)
	if n, reason := parseWhole(value, ""); reason == "" && n > total {
		return &Error{name, value, "is more than the whole pod has, " + pod.name + "=" + show(pod.value), "ask for less"}
	}
	return nil
}

// Limit is m on a card of the given size, in whole MiB: a fraction is rounded down. It refuses a limit that is more
// than the card or less than MinMemory.
func (m Memory) Limit(card Bytes) (Bytes, error) {
	limit := m.Fixed
	if m.Den != 0 {
		if m.Fixed != 0 || m.Num > m.Den {
			return 0, m.bad("is more than one whole GPU", "")
		}
		// card × Num may need 128 bits; the quotient does not, and Div64 cannot panic, since Num ≤ Den.
		hi, lo := bits.Mul64(uint64(card), m.Num)
		quotient, _ := bits.Div64(hi, lo, m.Den)
		limit = Bytes(quotient)
	}
	limit = limit.FloorMiB()
	switch {
	case limit > card:
		return 0, m.bad("is more than the GPU's "+card.FloorMiB().String(),
			"ask for less (a number alone is GiB), or for a part of any GPU: 6 with ALIYUN_COM_GPU_MEM_DEV=15 is 6/15")
	case limit < MinMemory && m.Den != 0:
		return 0, &Error{
			Variable: names[memDev].variable, Value: m.String(), Reason: "is less than 64MiB of the GPU's " + card.FloorMiB().String(),
			Remedy: "set it to the units that one GPU has, or ask for more of them",
		}
	case limit < MinMemory:
		return 0, m.bad("is less than 64MiB", "ask for more")
	}
	return limit, nil
}

// Misfit is what Memory.Limit refused, in the words of the container: at fault is what it wrote, and not what that came to.
// on names the GPU; empty where none was named.
func (q *Quota) Misfit(refused *Error, on string) *Error {
	keys := []key{memContainer}
	if refused.Variable == names[memDev].variable {
		keys = []key{memDev, memContainer} // units that Kubernetes allocated are nobody's DEV
	}
	name, value := q.source(keys...)
	remedy, limit := refused.Remedy, refused.Value
	if n, _ := digits(value); isDigits(value) && n > 99 && q.Memory.Fixed == Bytes(n)*GiB {
		remedy, limit = "a number alone is GiB: write "+value+"MiB if that is meant", value+"GiB"
	}
	if _, foreign := q.from[memContainer]; foreign {
		remedy = "" // it is in cgpu's words, which would disagree with the dialect's
	}
	return &Error{name, value, on + "the limit " + limit + " " + refused.Reason, remedy}
}

// RefuseMemory makes the error for a limit that no GPU has room for.
func (q *Quota) RefuseMemory(reason, remedy string) error {
	return q.refuse(reason, remedy, memContainer)
}

// String writes a limit as it could be asked for: "6/15" or "6144MiB".
func (m Memory) String() string {
	if m.Den != 0 {
		return strconv.FormatUint(m.Num, 10) + "/" + strconv.FormatUint(m.Den, 10)
	}
	return m.Fixed.String()
}

func (m Memory) bad(reason, remedy string) error {
	return &Error{names[memContainer].variable, m.String(), reason, remedy}
}
