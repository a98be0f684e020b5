// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// memInfo is where the kernel tells the machine's memory.
const memInfo = "/proc/meminfo"

// hostMemory is the machine's memory, of which max_spill and spill_reserve are parts.
func hostMemory(path string) (quota.Bytes, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line) // MemTotal:  16384256 kB
		if len(fields) != 3 || fields[0] != "MemTotal:" || fields[2] != "kB" {
			continue
		}
		// 54 bits of KiB are more memory than there is, and stay below 2^64 bytes.
		n, err := strconv.ParseUint(fields[1], 10, 54)
		if err != nil {
			return 0, fmt.Errorf("%s: MemTotal: %w", path, err)
		}
		return quota.Bytes(n) * quota.KiB, nil
	}
	return 0, fmt.Errorf("%s: has no line MemTotal in kB", path)
}
