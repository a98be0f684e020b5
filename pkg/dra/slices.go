// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// The capacities of a device, of which each claim consumes a part.
const (
	capacityMemory     = "memory"
	capacityCores      = "cores"      // percent of the GPU's time
	capacityContainers = "containers" // how many may hold a vGPU at the same time
)

// WholeClass is the class of whole GPUs. A claim of any other class has a limit, even that of all memory.
const WholeClass = "gpu.cgpu.io"

// Place is where a GPU is in the machine; what is not known is empty.
type Place struct {
	NUMANode *int64
	PCIeRoot string // such as "pci0000:00"
}

// Resources are the GPUs as devices: one pool that has the node's name. Places are by PCI address, and cards, the settings of GPUs
// that have some of their own, by UUID.
func Resources(t *device.Table, node string, ours func(device.GPU) bool, places map[string]Place,
	cards map[string]sched.Card) resourceslice.DriverResources {
	var devices []resourceapi.Device
	for _, g := range t.GPUs {
		if ours == nil || ours(g) {
			devices = append(devices, deviceOf(t, g, places[g.BusID], cardOf(t.Config, g, cards)))
		}
	}
	pool := resourceslice.Pool{}
	for chunk := range slices.Chunk(devices, resourceapi.ResourceSliceMaxDevices) {
		pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: chunk})
	}
	if pool.Slices == nil {
		// A pool without a slice is one that nobody publishes: the claims of a node without GPUs must find none.
		pool.Slices = []resourceslice.Slice{{}}
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: pool}}
}

// takenOf is how much of each GPU's memory containers have, by UUID: of what was allocated that much, also where a container has less
// of it by now, or more. Its pod's author could have the slices written and read by every scheduler, for nothing, again and again.
func takenOf(records []ledger.Record) map[string]quota.Bytes {
	taken := map[string]quota.Bytes{}
	for _, r := range records {
		for _, v := range r.VGPUs {
			of := v.Limit
			for _, a := range r.Allocated {
				if a.UUID == v.UUID && a.Given.Limit > 0 {
					of = a.Given.Limit
				}
			}
			taken[v.UUID] += of
		}
		for _, uuid := range r.Native {
			taken[uuid] = math.MaxInt64
		}
	}
	return taken
}

// inOrder is the table with its GPUs in the order in which the scheduler is to try them: it takes the first that fits. That is the order
// of indices, so that claims gather on the first ones; or with placement = "spread" that of what is left, most first.
func inOrder(t *device.Table, taken map[string]quota.Bytes) *device.Table {
	if t.Config.Placement != ledger.PolicySpread {
		return t
	}
	left := func(g device.GPU) quota.Bytes { return g.Memory - min(taken[g.UUID], g.Memory) }
	ordered := *t
	ordered.GPUs = slices.Clone(t.GPUs)
	slices.SortStableFunc(ordered.GPUs, func(a, b device.GPU) int { return cmp.Compare(left(b), left(a)) })
	return &ordered
}

// deviceName is the same for the same GPU on every boot and in every order: a claim keeps its GPU where another is lost.
func deviceName(g device.GPU) string { return strings.ToLower(g.UUID) }

// cardOf is how a GPU is shared.
func cardOf(c device.Config, g device.GPU, cards map[string]sched.Card) sched.Card {
	if card, ok := cards[g.UUID]; ok {
		return card
	}
	return c.Card()
}

func deviceOf(t *device.Table, g device.GPU, p Place, card sched.Card) resourceapi.Device {
	shared := true
	attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"uuid":        text(g.UUID),
		"productName": text(g.Name),
		"index":       number(int64(g.Index)),
		"minor":       number(int64(g.Minor)),
		// cgpu-refresh leaves a GPU in MIG mode out of the table.
		"mig": {BoolValue: new(bool)},
		deviceattribute.StandardDeviceAttributePCIBusID: text(g.BusID),
	}
	if v := semver(t.DriverVersion); v != "" {
		attributes["driverVersion"] = resourceapi.DeviceAttribute{VersionValue: &v}
	}
	if g.Architecture != "" {
		attributes["architecture"] = text(g.Architecture)
	}
	if v := semver(g.ComputeCapability); v != "" {
		attributes["cudaComputeCapability"] = resourceapi.DeviceAttribute{VersionValue: &v}
	}
	if g.NVLink != "" {
		// Without the node's name: the devices of a claim are of one node.
		attributes["nvlinkDomain"] = text(g.NVLink)
	}
	if p.NUMANode != nil {
		attributes["numaNode"] = number(*p.NUMANode)
	}
	if p.PCIeRoot != "" {
		attributes[deviceattribute.StandardDeviceAttributePCIeRoot] = text(p.PCIeRoot)
	}
	return resourceapi.Device{
		Name:                     deviceName(g),
		AllowMultipleAllocations: &shared,
		Attributes:               attributes,
		Capacity:                 capacities(t.Config, g, card),
		Taints:                   taints(t.Config, g),
	}
}

// TaintUnhealthy is the key of the taint of an unhealthy GPU.
const TaintUnhealthy = DriverName + "/unhealthy"

// taints keep new pods from a GPU that is unhealthy, and end those that have it only where cgpu.toml says so.
func taints(c device.Config, g device.GPU) []resourceapi.DeviceTaint {
	if g.Fault == "" {
		return nil
	}
	t := resourceapi.DeviceTaint{Key: TaintUnhealthy, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	if c.Health == device.HealthEvict {
		t.Effect = resourceapi.DeviceTaintEffectNoExecute // which is NoSchedule too
	}
	return []resourceapi.DeviceTaint{t}
}

// capacities say what can be promised of a GPU. Each has a range with a minimum and a maximum: without one the scheduler
// takes a negative request as it is, and the claim would give capacity to the next.
func capacities(c device.Config, g device.GPU, card sched.Card) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	memory := int64(device.Promised(c, g).FloorMiB())
	instances := int64(max(card.MaxInst, 1))
	cores := coresOf(card, c)
	policy := func(value, least, preset, most int64, format resource.Format, step bool) resourceapi.DeviceCapacity {
		r := &resourceapi.CapacityRequestPolicyRange{Min: resource.NewQuantity(least, format), Max: resource.NewQuantity(most, format)}
		// A step that leads beyond the value is refused by the API server.
		if step && least < most {
			r.Step = resource.NewQuantity(1, format)
		}
		return resourceapi.DeviceCapacity{
			Value:         *resource.NewQuantity(value, format),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: resource.NewQuantity(preset, format), ValidRange: r},
		}
	}
	return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		// Who does not say how much gets the whole GPU, and nobody else a part of it. There is no step: the scheduler of
		// Kubernetes 1.36 rounds a request near 2^63 up to a negative amount (roundUpRange in the allocator's
		// consumable_capacity.go), which fits everywhere and makes room for others. cgpu rounds down to MiB on the node.
		capacityMemory:     policy(memory, int64(quota.MiB), memory, memory, resource.BinarySI, false),
		capacityCores:      policy(int64(quota.MaxPercent-c.HeadroomCores), cores.least, cores.preset, cores.most, resource.DecimalSI, true),
		capacityContainers: policy(instances, 1, 1, instances, resource.DecimalSI, true),
	}
}

// coreRange is what a claim can have of a GPU's time, in percent. preset is for one that does not say.
type coreRange struct{ least, preset, most int64 }

// coresOf says what the ledger will grant, so that the scheduler counts what the node promises and nothing else.
func coresOf(card sched.Card, c device.Config) coreRange {
	all := int64(quota.MaxPercent - c.HeadroomCores)
	place := min(int64(max(quota.MaxPercent/max(card.MaxInst, 1), 1)), all)
	switch {
	case c.Unguarded() != "", card.Policy == sched.PolicyNative:
		return coreRange{} // nobody enforces a percentage
	case card.Policy == sched.PolicyFair:
		return coreRange{most: place}
	case card.Policy == sched.PolicyFixed:
		// Everybody has a hard cap, which the others cannot have: a claim that asks for none has a place.
		return coreRange{least: 1, preset: place, most: all}
	}
	// Who does not ask for time competes by weight, which takes nothing from those who reserved some.
	return coreRange{most: all}
}

func number(n int64) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: &n} }

func text(s string) resourceapi.DeviceAttribute {
	if len(s) > resourceapi.DeviceAttributeMaxValueLength {
		s = strings.ToValidUTF8(s[:resourceapi.DeviceAttributeMaxValueLength], "")
	}
	return resourceapi.DeviceAttribute{StringValue: &s}
}

// semver writes a driver's version as CEL compares versions: three numbers without leading zeros ("580.159.04" is
// 580.159.4). It is empty where the version is none.
func semver(version string) string {
	v, err := rm.ParseVersion(version)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch)
}
