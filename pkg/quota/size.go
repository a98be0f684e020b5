package quota

import (
	"errors"
	"strings"
)

// ParseSize reads a size that names its unit, such as "13MiB" or "1.5GiB", for the node's configuration. It is rounded
// down to a whole MiB.
func ParseSize(s string) (Bytes, error) {
	if isDigits(s) {
		return 0, errors.New("has no unit")
	}
	size, reason := parseSize(s, MiB)
	if reason == wantSize {
		return 0, errors.New("is no size")
	}
	if reason != "" {
		return 0, errors.New(strings.TrimSuffix(reason, "; "+wantSize))
	}
	return size, nil
}
