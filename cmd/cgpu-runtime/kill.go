// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/opencgpu/cgpu/pkg/device"

// domainEnd is the command of cgpu's that does so (package domain, which is more than this program should link).
const domainEnd = "domain-end"

// endFirst has cgpu become the low-level runtime where that is to kill a member of a trust domain, after the domain's server has ended the
// work of the member's programs: killed in the middle of a kernel they would take along the contexts of all others. It comes back where
// there is nothing to end, or no cgpu.
func endFirst(c *call, low, runDir string) {
	n := len(c.rest)
	if n < 2 || c.rest[n-1] != "9" && c.rest[n-1] != "KILL" && c.rest[n-1] != "SIGKILL" {
		return
	}
	if r := c.record(c.rest[n-2], runDir); r != nil && r.IsMember() {
		if cgpu, err := device.Program("cgpu"); err == nil {
			_ = execute(cgpu, append([]string{domainEnd, "--", r.Nonce, low}, c.args...))
		}
	}
}
