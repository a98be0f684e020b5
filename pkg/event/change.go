// SPDX-License-Identifier: Apache-2.0

package event

import (
	"fmt"
	"strings"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Changes are the events that tell two records of one container apart. The GPUs in them have no index, which a record does not
// know, and the events no time.
func Changes(was, now ledger.Record) []Event {
	about := func(kind Kind, text string) Event {
		return Event{Kind: kind, Container: now.ID, Nonce: now.Nonce, Name: now.Name, Text: text}
	}
	var list []Event
	for i, v := range now.VGPUs {
		if i >= len(was.VGPUs) || was.VGPUs[i].UUID != v.UUID {
			continue
		}
		if text := difference(was.VGPUs[i], v); text != "" {
			e := about(Set, text)
			e.GPU = &GPU{UUID: v.UUID}
			list = append(list, e)
		}
	}
	if was.Threads != now.Threads {
		list = append(list, about(Set, fmt.Sprintf("threads of new programs %s → %s", orAll(was.Threads), orAll(now.Threads))))
	}
	switch {
	case now.Paused && !was.Paused:
		list = append(list, about(Paused, "all GPU work stops"))
	case was.Paused && !now.Paused:
		list = append(list, about(Resumed, "GPU work goes on"))
	}
	return list
}

// difference says what is different between two slices of a GPU; "" is nothing.
func difference(was, now ledger.VGPU) string {
	var list []string
	diff := func(what string, before, after any) {
		if before != after {
			list = append(list, fmt.Sprintf("%s %v → %v", what, before, after))
		}
	}
	diff("memory", was.Limit, now.Limit)
	diff("spill", was.Spill, now.Spill)
	diff("weight", was.Weight, now.Weight)
	diff("percent", orNone(was.Percent), orNone(now.Percent))
	diff("priority", was.Priority, now.Priority)
	return strings.Join(list, ", ")
}

// orAll is a part of the multiprocessors, of which 0 is all.
func orAll(percent int) string {
	if percent == 0 {
		return "all"
	}
	return fmt.Sprintf("%d%%", percent)
}

// orNone is a percentage, of which 0 is none.
func orNone(percent int) string {
	if percent == 0 {
		return "none"
	}
	return fmt.Sprint(percent)
}
