// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Memory limits of the driver's own: of a cgroup, on a GPU. The soft one is what others have to leave to it. It is always 0: the ledger
// promises no more than there is, and one that is not is added to all cgroups above and stays there when the cgroup is removed.

// What a library lacks kills the process that calls it.
const (
	setLimits = "nvmlDeviceSetMemoryLimits_v1"
	getLimits = "nvmlDeviceGetMemoryLimits_v1"
)

// limitCgroup is cgpu-refresh -limit. cgroups is where they are.
func limitCgroup(t *device.Table, cgroups, cgroup string, limits []string) error {
	lib, _, shutdown, err := openNVML(t.DriverRoot)
	if err != nil {
		return err
	}
	defer shutdown()
	if err := hasLimits(lib, t.Config.Limits(), lib.Extensions().LookupSymbol, cgroups); err != nil {
		return err
	}
	for _, l := range limits {
		if err := setLimit(lib, cgroup, l); err != nil {
			return err
		}
	}
	return nil
}

// hasLimits says why the driver, or the machine, has no such limits. setting is what cgpu.toml says under limits.
func hasLimits(lib nvml.Interface, setting string, has func(symbol string) error, cgroups string) error {
	setting = fmt.Sprintf("limits = %q in cgpu.toml: ", setting)
	for _, symbol := range []string{setLimits, getLimits} {
		if has(symbol) != nil {
			version, _ := lib.SystemGetDriverVersion()
			return fmt.Errorf(setting+`driver %s has no memory limits of its own: want 615 or newer, or limits = "guard"`, version)
		}
	}
	if err := nvmlclient.Unified(cgroups); err != nil {
		return fmt.Errorf(setting+"%w", err)
	}
	return nil
}

// setLimit sets one, UUID=BYTES, and looks whether it is there: what was not set would be no limit at all.
func setLimit(lib nvml.Interface, cgroup, limit string) error {
	uuid, number, _ := strings.Cut(limit, "=")
	bytes, err := strconv.ParseUint(number, 10, 64)
	if err != nil || bytes == 0 || bytes == nvml.DEVICE_MEMORY_LIMIT_MAX {
		return fmt.Errorf("limit %q: want UUID=BYTES", limit)
	}
	fault := func(what string, err error) error {
		return fmt.Errorf("GPU %s, cgroup %s: %s: %w", uuid, cgroup, what, err)
	}
	d, ret := lib.DeviceGetHandleByUUID(uuid)
	if ret != nvml.SUCCESS {
		return fault("handle", ret)
	}
	// With its last user the driver forgets all about a GPU, limits too, and that may be this process.
	if mode, ret := d.GetPersistenceMode(); ret != nvml.SUCCESS || mode != nvml.FEATURE_ENABLED {
		return fault("persistence mode", errors.New("it is off, or not known, and the driver forgets limits when nobody uses the GPU: "+
			"start nvidia-persistenced, or nvidia-smi -pm 1"))
	}
	if ret := d.SetMemoryLimits_v1(cgroup, 0, bytes); ret != nvml.SUCCESS {
		return fault("limit", fmt.Errorf("%d bytes are refused: %w", bytes, ret))
	}
	switch is, ret := d.GetMemoryLimits_v1(cgroup); {
	case ret != nvml.SUCCESS:
		return fault("the limit cannot be read back", ret)
	case is.HardLimit > bytes:
		return fault("limit", fmt.Errorf("%d bytes were set, and %d are in force", bytes, is.HardLimit))
	}
	return nil
}

// limited is what is used of limits, asked for by UUID=CGROUP below the folder of all cgroups. What cannot be told is left out.
func limited(lib nvml.Interface, has func(symbol string) error, cgroups, asked string) (map[string]device.Hardware, error) {
	var list []string
	if err := json.Unmarshal([]byte(asked), &list); err != nil {
		return nil, err
	}
	all := map[string]device.Hardware{}
	if has(getLimits) != nil {
		return all, nil
	}
	for _, name := range list {
		uuid, cgroup, _ := strings.Cut(name, "=")
		d, ret := lib.DeviceGetHandleByUUID(uuid)
		if ret != nvml.SUCCESS {
			continue
		}
		if l, ret := d.GetMemoryLimits_v1(filepath.Join(cgroups, cgroup)); ret == nvml.SUCCESS {
			all[name] = device.Hardware{Used: new(quota.Bytes(l.CurrentUsed))}
		}
	}
	return all, nil
}
