// SPDX-License-Identifier: Apache-2.0

package quota

// Share is what a container asked of a GPU's time.
type Share struct {
	Weight   int      `json:"weight"`            // 1 to MaxWeight
	Percent  int      `json:"percent,omitempty"` // 1 to MaxPercent; 0: none asked
	Priority Priority `json:"priority"`
}

// Slice is what a container has of a GPU. Whoever keeps or hands on one embeds it, and its form in JSON is that of the ledger's records,
// which outlive versions: what is added is left out where it is zero.
type Slice struct {
	Limit Bytes `json:"limit"`           // of memory
	Spill Bytes `json:"spill,omitempty"` // host memory beyond Limit, served as device memory
	Share
}

// WithWeight is the slice with the default weight where none was asked.
func (s Slice) WithWeight() Slice {
	s.Weight = max(s.Weight, 1)
	return s
}
