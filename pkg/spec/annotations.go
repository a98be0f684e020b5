// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
)

// applied is the prefix of the annotations that record what was done. Requests are cgpu.io/gpu-… and never begin so.
const applied = "cgpu.io/applied."

// editAnnotations records what was done, so that runc state, CRI and people can see it, and drops records of others.
func editAnnotations(doc *Document, p *Plan) error {
	annotations, err := doc.root.need("annotations", false)
	if err != nil {
		return err
	}
	var gpus []string
	for _, g := range p.GPUs {
		if g.Native {
			gpus = append(gpus, g.UUID+"=native")
		} else {
			gpus = append(gpus, g.UUID+"="+g.Limit.String())
		}
	}
	annotations.drop(func(key string) bool { return strings.HasPrefix(key, applied) })
	record := [][2]string{
		{"version", p.Version},
		{"nonce", p.Nonce},
		{"gpus", strings.Join(gpus, ",")},
	}
	if p.PageWritable {
		record = append(record, [2]string{"enforcement", device.EnforcePreload})
	}
	if p.DriverLimits {
		limits := device.LimitsBoth
		if p.Socket == "" && !p.PageWritable {
			limits = device.LimitsDriver
		}
		record = append(record, [2]string{"limits", limits})
	}
	if p.Socket != "" {
		record = append(record, [2]string{"socket", p.Socket})
	}
	for _, a := range record {
		annotations.set(applied+a[0], quote(a[1]))
	}
	if p.Socket == "" {
		return nil
	}
	size := 0
	for _, m := range annotations.members {
		value, err := unquote(m.value)
		if err != nil {
			return fmt.Errorf("%q: %w", m.key, err)
		}
		size += len(quote(m.key)) + len(quote(value))
	}
	if size > mostAnnotations {
		return fmt.Errorf("%d bytes of annotations as JSON: the low-level runtime hands them to the guard with the container's state, which "+
			"reads %d: make them shorter", size, mostAnnotations)
	}
	return nil
}

// mostAnnotations bounds what of the state that a guard gets (1 MiB: maxProcessState in pkg/guard) is not the runtime's own.
const mostAnnotations = 1<<20 - 64<<10

// drop removes the members whose key is unwanted.
func (o *object) drop(unwanted func(key string) bool) {
	var kept []member
	for _, m := range o.members {
		if unwanted(m.key) {
			continue
		}
		if len(kept) == 0 && len(m.lead) > 0 {
			m.lead = append(quote(m.key), ':') // without the comma it may have begun with
		}
		kept = append(kept, m)
	}
	if len(kept) < len(o.members) {
		o.members = kept
	}
}
