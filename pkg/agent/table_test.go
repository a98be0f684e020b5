// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func TestWatcher(t *testing.T) {
	dir := t.TempDir()
	w := newWatcher(dir)
	key, err := device.ReadKey(device.DriverSim, "", "", "")
	if err != nil {
		t.Fatal(err)
	}
	w.readKey = func(*device.Table) (device.Key, error) { return key, nil }
	look := func(what string, changed bool, wantErr string) *device.Table {
		t.Helper()
		table, did, err := w.load()
		if did != changed || (table == nil) != (err != nil) || wantErr == "" && err != nil || wantErr != "" &&
			(err == nil || !strings.Contains(err.Error(), wantErr)) {
			t.Errorf("%s: table %v, changed %v, error %v", what, table != nil, did, err)
		}
		return table
	}
	save := func(k device.Key) {
		t.Helper()
		table := tableOf("", device.GPU{UUID: "GPU-00000000-0000-0000-0000-000000000001", Name: "x", Memory: 1 << 30, BusID: "0000:01:00.0",
			Node: device.Node{Path: "/dev/nvidia0", HostPath: "/dev/null", Major: 1, Minor: 3}})
		table.Key = k
		table.Config.Policy, table.Config.PrioRatio = sched.PolicyPreempt, sched.DefaultPrioRatio
		if err := table.Save(dir); err != nil {
			t.Fatal(err)
		}
	}
	look("nothing there", true, "no node table")
	look("still nothing", false, "no node table")
	// A table that device.Load calls stale, since nothing of the host is here, is good enough: same boot, same driver.
	save(key)
	look("written", true, "")
	look("the same", false, "")
	// A reboot that kept the file, a driver that went, came back and was replaced.
	was := key
	key.BootID = "another"
	look("booted", true, "booted")
	look("booted", false, "booted")
	key = was
	key.DriverText = "NVRM 1"
	look("another driver", true, "another driver")
	save(key)
	look("refreshed", true, "")
	key.DriverText = ""
	look("unloaded", true, "not loaded")
	key.DriverText, key.DriverGPUs = "NVRM 1", []string{"0000:01:00.0"}
	look("another GPU", true, "had GPUs")
	key.DriverGPUs = nil
	look("as it was", true, "")
	if err := os.WriteFile(device.TableFile(dir), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.load(); err == nil || !errors.Is(err, device.ErrStale) {
		t.Errorf("garbage: %v", err)
	}
	if err := os.Remove(device.TableFile(dir)); err != nil {
		t.Fatal(err)
	}
	look("removed", true, "no node table")
	save(key)
	look("back", true, "")
}
