// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"

	"kernel.org/pub/linux/libs/security/libcap/cap"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
)

// rescueMain is cgpu-rescue: it waits until the guard that started it is gone, and lets the container's channels run again
// if the guard had paused them. It needs no capability.
func rescueMain() {
	runtime.GOMAXPROCS(1)
	ready := func() {
		if _, err := fmt.Println("ok"); err != nil { // the guard would wait for it
			os.Exit(1)
		}
	}
	err := cap.NewSet().SetProc()
	if err == nil && len(os.Args) != 2 {
		err = fmt.Errorf("%d arguments; it is started by cgpu-guard only", len(os.Args)-1)
	}
	if err == nil {
		err = gpusched.Rescue(os.Args[1], os.Stdin, driver.Open, ready, func(cfg guard.Config) *slog.Logger { return newLog(cfg.Log).Logger })
	}
	if err != nil {
		fmt.Println(gpusched.RescueName+":", err)
		os.Exit(1)
	}
}
