// SPDX-License-Identifier: Apache-2.0

// Cgpu-probe speaks NVIDIA's resource manager protocol by raw ioctls: it allocates, frees, shares and misbehaves, and
// says what came of it. It is a static program without any NVIDIA library, runs unchanged on a real driver (535 or newer)
// and on cgpu's simulated one, and is what the conformance suite starts in containers. Built with the tag libc it calls
// ioctl, mmap and munmap of the C library, so that a preload library sees what it does.
//
// Results are key=value lines on standard output; the exit status is 0 if everything was as it must be, else 1.
package main

import (
	"os"

	"github.com/opencgpu/cgpu/cmd/cgpu-probe/probe"
)

func main() { os.Exit(probe.Main(os.Args[1:])) }
