// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// PrintChange tells what is different, a line for each slice.
func PrintChange(w io.Writer, t *device.Table, old, changed ledger.Record, req ledger.ChangeRequest) error {
	for i, now := range changed.VGPUs {
		if !req.Changes(now.UUID) {
			continue
		}
		was := now
		if i < len(old.VGPUs) && old.VGPUs[i].UUID == now.UUID {
			was = old.VGPUs[i]
		}
		var diffs []string
		diff := func(what, before, after string) {
			if before != after {
				diffs = append(diffs, fmt.Sprintf("%s %s → %s", what, before, after))
			}
		}
		diff("memory", MiB(was.Limit), MiB(now.Limit))
		diff("spill", amount(was.Spill), amount(now.Spill))
		diff("weight", strconv.Itoa(was.Weight), strconv.Itoa(now.Weight))
		diff("percent", OrNone(was.Percent), OrNone(now.Percent))
		diff("priority", was.Priority.String(), now.Priority.String())
		diff("threads of new programs", orAll(old.Threads), orAll(changed.Threads))
		if len(diffs) == 0 {
			diffs = []string{"nothing to change"}
		}
		gpu := ShortUUID(now.UUID)
		for _, g := range t.GPUs {
			if g.UUID == now.UUID {
				gpu = strconv.Itoa(g.Index)
			}
		}
		if _, err := fmt.Fprintf(w, "%s%s, GPU %s: %s\n", ShortID(changed.ID), Label(changed), gpu, strings.Join(diffs, ", ")); err != nil {
			return err
		}
	}
	return nil
}

func OrNone(n int) string {
	if n == 0 {
		return "none"
	}
	return strconv.Itoa(n)
}

// orAll is a part of the multiprocessors.
func orAll(percent int) string {
	if percent == 0 {
		return "all"
	}
	return fmt.Sprintf("%d%%", percent)
}

// amount is one that may be nothing.
func amount(b quota.Bytes) string {
	if b == 0 {
		return "none"
	}
	return MiB(b)
}
