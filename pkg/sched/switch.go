// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// Switch is one context switch of a GPU's graphics engine, as the driver's FECS context-switch records tell it
// (NV_EVENT_BUFFER_FECS_RECORD_V2, class/cl90cdfecs.h).
type Switch struct {
	At      time.Duration // the GPU's clock
	PID     int           // who made the context, in the initial pid namespace
	Context uint32        // the channel group; unique among those of the process
	On      bool          // switched in; else out
}
