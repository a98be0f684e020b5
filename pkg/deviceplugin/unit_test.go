// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// What running pods may be raised into is no unit, and no percentage.
func TestHeadroom(t *testing.T) {
	tab := table(binpack, 16*quota.GiB)
	tab.Config.Headroom, tab.Config.HeadroomCores = device.Part{Bytes: 5*quota.GiB + quota.MiB}, 20
	k := newKubelet(t)
	k.start()
	k.begin(Options{Table: tab})
	k.until(ResourceMemory, 10, 0)
	k.until(ResourcePercent, 80, 0)
}

// A reboot takes the run dir with it, but not what the kubelet has booked. With another unit nothing is promised twice.
func TestUnitChangesOverReboot(t *testing.T) {
	for _, x := range [][2]quota.Bytes{{quota.GiB, 512 * quota.MiB}, {512 * quota.MiB, quota.GiB}, {256 * quota.MiB, 512 * quota.MiB}} {
		for _, silent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v to %v, silent=%v", x[0], x[1], silent), func(t *testing.T) {
				k := newKubelet(t)
				k.start()
				tab := table("binpack", t4)
				p := k.begin(Options{Table: tab, Unit: x[0]})
				k.until(ResourceMemory, int(t4/x[0]), 0)
				a := podOf("a", [2]int{int(6 * quota.GiB / x[0]), 0})
				k.mustAdmit(a)
				p.Stop()
				k.stop()
				if err := os.RemoveAll(k.runDir()); err != nil {
					t.Fatal(err)
				}
				k.start()
				if silent {
					if err := os.Remove(filepath.Join(k.dir, "..", "pod-resources", kubeletSocket)); err != nil {
						t.Fatal(err)
					}
				}
				p = k.begin(Options{Table: tab, Unit: x[1]})
				if silent {
					// It registers, and the kubelet looks whether it can admit its pods again.
					k.until(ResourceMemory, int(t4/x[1]), 0)
					if err := k.admit(a); err == nil {
						t.Error("a pod with units of another size is admitted again")
					}
				} else {
					eventually(t, func() string {
						if err := errorText(p.Healthy()); !strings.Contains(err, "1 containers of this node hold units of that") {
							return err
						}
						return ""
					})
					if n, _ := k.capacity(ResourceMemory); n != 0 {
						t.Errorf("%d units are served", n)
					}
					k.remove(a)
					k.until(ResourceMemory, int(t4/x[1]), 0)
				}
				for i := range 8 {
					_ = k.admit(podOf(fmt.Sprint(i), [2]int{int(3 * quota.GiB / x[1]), 0}))
				}
				if sum, _ := k.check(limits(tab)); sum[uuid(0)] != 12*quota.GiB {
					t.Errorf("%v are allocated", sum)
				}
			})
		}
	}
}

func TestIDs(t *testing.T) {
	for id, unit := range map[string]quota.Bytes{uuid(0) + "-_-13": quota.GiB, uuid(0) + "-_-512m13": 512 * quota.MiB, uuid(0) +
		"-_-1m13": quota.MiB, uuid(0) + "-_-2048m13": 2 * quota.GiB} {
		c := card{GPU: device.GPU{UUID: uuid(0)}, unit: unit}
		if got := c.id(ResourceMemory, 13); got != id {
			t.Errorf("%s, want %s", got, id)
		}
		if u, size, n, ok := parseID(id); !ok || u != uuid(0) || size != unit || n != 13 {
			t.Errorf("%s: %s %v %d %v", id, u, size, n, ok)
		}
		if got := c.id(ResourcePercent, 13); got != uuid(0)+"-_-13" {
			t.Errorf("%s", got)
		}
	}
	cards := []card{{GPU: device.GPU{UUID: uuid(0)}, unit: 512 * quota.MiB, units: 4, most: 4}}
	for _, id := range []string{"", "GPU", uuid(0), uuid(0) + "-_-", uuid(0) + "-_-1", uuid(0) + "-_-512m", uuid(0) +
		"-_-512m-1", uuid(0) + "-_-512m01", uuid(0) + "-_-512m4", uuid(0) + "-_-256m1",
		uuid(0) + "-_-99999999999999999999m1", uuid(1) + "-_-512m1"} {
		if _, _, err := count(cards, ResourceMemory, []string{id}); err == nil {
			t.Errorf("%s is taken", id)
		}
	}
}
