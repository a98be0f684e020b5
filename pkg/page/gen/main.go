// SPDX-License-Identifier: Apache-2.0

// Command gen writes limiter/page.h: the vGPU page (package page) and the few layouts of the driver interface (package rm)
// that the limiter needs, so that each is written down once. `go generate ./pkg/page` runs it.
package main

import (
	"fmt"
	"os"

	"github.com/opencgpu/cgpu/pkg/page"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: gen FILE")
		os.Exit(2)
	}
	if err := os.WriteFile(os.Args[1], page.CHeader(), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}
