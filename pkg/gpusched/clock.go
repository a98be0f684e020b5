// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"time"

	"golang.org/x/sys/unix"
)

// Monotonic is the machine's clock that all guards agree on.
func Monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}
