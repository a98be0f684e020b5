// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"fmt"
	"strconv"
	"strings"
)

// Version is a driver version such as 580.159.04. Newer branches leave the last number out (580.142).
type Version struct{ Major, Minor, Patch int }

// ParseVersion reads a version as the driver reports it: two or three numbers with dots.
func ParseVersion(s string) (Version, error) {
	parts := strings.Split(s, ".")
	if len(parts) < 2 || len(parts) > 3 {
		return Version{}, badVersion(s)
	}
	var n [3]int
	for i, p := range parts {
		if len(p) == 0 || len(p) > 4 || strings.Trim(p, "0123456789") != "" {
			return Version{}, badVersion(s)
		}
		n[i], _ = strconv.Atoi(p) // at most four digits: cannot fail
	}
	return Version{n[0], n[1], n[2]}, nil
}

func badVersion(s string) error {
	return fmt.Errorf("rm: driver version %q: want two or three numbers such as 580.159.04; see /proc/driver/nvidia/version", s)
}

// Compare is negative if v is older than w, positive if it is newer.
func (v Version) Compare(w Version) int {
	if v.Major != w.Major {
		return v.Major - w.Major
	}
	if v.Minor != w.Minor {
		return v.Minor - w.Minor
	}
	return v.Patch - w.Patch
}

// String writes the last number with two digits, as NVIDIA does, and leaves it out when it is zero.
func (v Version) String() string {
	if v.Patch == 0 {
		return fmt.Sprintf("%d.%02d", v.Major, v.Minor)
	}
	return fmt.Sprintf("%d.%02d.%02d", v.Major, v.Minor, v.Patch)
}
