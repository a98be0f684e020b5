// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
)

// TestUnheld: a process without a container is started only where all that limits containers would limit it, too.
func TestUnheld(t *testing.T) {
	const held = "a process without a container is held by a guard or not at all"
	for _, tt := range []struct {
		enforcement string
		driver      bool
		want        string
	}{
		{device.EnforceGuard, false, ""},
		{device.EnforcePreload, false, `run: enforcement = "preload" in cgpu.toml: ` + held + `; set enforcement = "guard"`},
		{device.EnforcePreload, true, `run: enforcement = "preload"`},
		{device.EnforceDriver, true, `run: limits = "driver" in cgpu.toml: ` + held + `; set limits = "guard"`},
		{device.EnforceGuard, true, `run: limits = "both" in cgpu.toml: cgpu-hook has the driver limit containers only; set limits = "guard"`},
	} {
		err := unheld(device.Config{Enforcement: tt.enforcement, DriverLimits: tt.driver})
		if (err == nil) != (tt.want == "") || err != nil && !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}
