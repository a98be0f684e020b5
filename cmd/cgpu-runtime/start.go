// SPDX-License-Identifier: Apache-2.0

// Go's runtime would read the machine's mount table, which grows with every container, to learn of a CPU limit, look at
// that limit again from a goroutine of its own, and name its memory mappings to the kernel. This program starts anew for
// each container, has a few milliseconds, and has no use for any of it.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0
//go:debug decoratemappings=0

package main

// Nobody looks into this process.
import _ "github.com/opencgpu/cgpu/pkg/nodump"
