package quota

import "errors"

// ParseSize reads a size that names its unit, such as "13MiB" or "1.5GiB", for the node's configuration.
func ParseSize(s string) (Bytes, error) {
	if isDigits(s) {
		return 0, errors.New("has no unit; " + wantSize)
	}
	size, reason := parseSize(s, MiB)
	if reason != "" {
		return 0, errors.New(reason)
	}
	return size, nil
}
