// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestMemoryOutside: cgpu smi shows what a program without a vGPU has of a GPU's memory beside a container.
func TestMemoryOutside(t *testing.T) {
	if lab.Driver != device.DriverSim {
		testenv.Skip(t, "on a GPU: others may use it")
	}
	holding(t, container{env: []string{"ALIYUN_COM_GPU_MEM_CONTAINER=1GiB", "NVIDIA_VISIBLE_DEVICES=0"}}, "300MiB")
	outside := func(want quota.Bytes) {
		t.Helper()
		eventually(t, 30*time.Second, func() string { // nobody knows it where a guard does not answer at once
			var smi struct {
				GPUs []struct {
					Outside *quota.Bytes `json:"outside"`
				} `json:"gpus"`
			}
			out := cgpu(t, "smi", "--json")
			if err := json.Unmarshal([]byte(out), &smi); err != nil || smi.GPUs[0].Outside == nil || *smi.GPUs[0].Outside != want {
				return fmt.Sprintf("want %d bytes used outside: %v: %s", want, err, out)
			}
			return ""
		})
	}
	outside(0)
	g := gpus(t)[0]
	d, err := driver.Open(guardcfg.Config{Driver: device.DriverSim, SimSocket: device.SimSocket(lab.RunDir), GPUs: []guardcfg.GPU{{GPU: g}}})
	if err != nil {
		t.Fatal(err)
	}
	abi, err := rm.ForDriver("580.159.04", false)
	if err != nil {
		t.Fatal(err)
	}
	address, err := rmclient.ParseAddress(g.BusID)
	if err != nil {
		t.Fatal(err)
	}
	c, err := rmclient.New(d, abi, "", []uint32{address.ID()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.CloseFile(c.File().File)
	params := make([]byte, 128)
	rm.PutU32(params, rm.MemoryOwner, 1)
	rm.PutU64(params, rm.MemorySize, uint64(2*quota.GiB))
	if _, err := c.Alloc(c.Device(0), 0x40, params); err != nil {
		t.Fatal(err)
	}
	outside(2 * quota.GiB)
	eventually(t, 30*time.Second, func() string {
		if out := cgpu(t, "smi"); !strings.Contains(out, "2048MiB") || !strings.Contains(out, "OUTSIDE") {
			return out
		}
		return ""
	})
}
