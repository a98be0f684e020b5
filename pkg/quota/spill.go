// SPDX-License-Identifier: Apache-2.0

package quota

import "strings"

const wantSpill = "want a positive number of GiB, a size such as 4GiB or 512MiB, or 0 for none"

// readSpill reads how much host memory the container may have as device memory beyond its limit. It is GiB or a size also
// where the limit is a fraction of the card: the host's memory has nothing to do with the units of a GPU.
func readSpill(q *Quota, s *settings) error {
	v, err := q.used(s, memSpill)
	if err != nil || !v.set || v.value == "0" {
		return err
	}
	size, reason := parseSize(v.value, GiB)
	if reason != "" {
		return v.bad(strings.Replace(reason, wantSize, wantSpill, 1), "")
	}
	q.Spill = size
	return nil
}

// RefuseSpill makes the error for spill that cannot be granted; nil when none was asked for.
func (q *Quota) RefuseSpill(reason, remedy string) error {
	if q.Spill == 0 {
		return nil
	}
	return q.refuse(reason, remedy, memSpill)
}
