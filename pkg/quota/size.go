// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"strings"
)

// ParseSize reads a size such as "13MiB", "1.5g" or "6", which is GiB, for flags and the node's configuration, as variables are read.
// It is rounded down to a whole MiB.
func ParseSize(s string) (Bytes, error) {
	size, reason := parseSize(s, GiB)
	if reason == wantSize {
		return 0, errors.New("is no size")
	}
	if reason != "" {
		return 0, errors.New(strings.TrimSuffix(reason, "; "+wantSize))
	}
	return size, nil
}
