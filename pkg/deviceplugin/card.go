// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// The resources. The count is no device plugin's resource: gpushare's extender wants it in the node's status, and whole
// GPUs by their number would be a second booking beside that of the memory.
const (
	ResourceMemory  = "aliyun.com/gpu-mem"
	ResourcePercent = "aliyun.com/gpu-core.percentage"
	ResourceCount   = "aliyun.com/gpu-count"
)

// card is one GPU as the plugin promises it.
type card struct {
	device.GPU
	// position is what gpushare calls the index: 0, 1, … in the order of minor numbers among the plugin's GPUs. It is kept
	// as long as RunDir is, so that a GPU that falls off the bus does not rename its neighbours.
	position int
	// units are for sale, most is what one container may have: overcommitment sells a GPU twice, but no container gets more
	// memory than the GPU has.
	units, most int
	percent     int // for sale of its time
	unit        quota.Bytes
	gone        bool // from the table
	place       place
}

// amount is how many units of a resource the card has.
func (c card) amount(resource string) int {
	if resource == ResourcePercent {
		return c.percent
	}
	return c.units
}

// makeCards lists the GPUs of a table that are the plugin's, by position. known are the UUIDs of an earlier list, by
// position: they stay, and those that the table has no more are gone.
func makeCards(table *device.Table, ours func(device.GPU) bool, unit quota.Bytes, known []string) ([]card, error) {
	byUUID := map[string]device.GPU{}
	var fresh []device.GPU
	for _, g := range table.GPUs {
		if ours != nil && !ours(g) {
			continue
		}
		byUUID[g.UUID] = g
		if !slices.Contains(known, g.UUID) {
			fresh = append(fresh, g)
		}
	}
	slices.SortFunc(fresh, func(a, b device.GPU) int { return cmp.Compare(a.Minor, b.Minor) })
	uuids := slices.Clone(known)
	for _, g := range fresh {
		uuids = append(uuids, g.UUID)
	}
	var cards []card
	for i, uuid := range uuids {
		g, here := byUUID[uuid]
		if !here {
			cards = append(cards, card{GPU: device.GPU{UUID: uuid, Index: -1}, position: i, unit: unit, gone: true})
			continue
		}
		c := card{GPU: g, position: i, unit: unit, units: int(device.Promised(table.Config, g) / unit), most: int(g.Memory / unit),
			percent: quota.MaxPercent - table.Config.HeadroomCores}
		if min(c.units, c.most) == 0 {
			return nil, fmt.Errorf("deviceplugin: unit %v: GPU %d has only %v to give: choose a smaller unit of %s",
				unit, g.Index, device.Promised(table.Config, g), ResourceMemory)
		}
		cards = append(cards, c)
	}
	return cards, nil
}

// separator stands between the UUID and the number, as in gpushare's ids.
const separator = "-_-"

// id names one unit of a resource. Which units of a GPU a container has means nothing; how many of which GPU is its share.
//
// Units of memory tell how large they are, where they are no GiB: the kubelet keeps ids over its restarts and the machine's,
// and would count six old ones for six of another size.
func (c card) id(resource string, n int) string {
	if resource == ResourceMemory && c.unit != quota.GiB {
		return c.UUID + separator + strconv.FormatUint(uint64(c.unit/quota.MiB), 10) + unitSign + strconv.Itoa(n)
	}
	return c.UUID + separator + strconv.Itoa(n)
}

// unitSign stands between the size of a unit in MiB and the number.
const unitSign = "m"

// parseID is the inverse of card.id; unit is that of memory.
func parseID(id string) (uuid string, unit quota.Bytes, n int, ok bool) {
	uuid, number, ok := strings.Cut(id, separator)
	unit = quota.GiB
	if size, rest, other := strings.Cut(number, unitSign); other {
		mib, err := strconv.ParseUint(size, 10, 40)
		if err != nil {
			return uuid, 0, 0, false
		}
		unit, number = quota.Bytes(mib)*quota.MiB, rest
	}
	n, err := strconv.Atoi(number)
	return uuid, unit, n, ok && err == nil
}

// devices are the ids of a resource for the kubelet. Those of a GPU that is gone stay, unhealthy, as many as were told
// before (last): a container may have them.
//
// They say nothing of NUMA nodes. The kubelet's topology manager would align single units by them, before it asks which
// ones the plugin prefers, and so would cut a container's units in two; the plugin looks at NUMA itself.
func devices(resource string, cards []card, last map[string]int) []*pluginapi.Device {
	var all []*pluginapi.Device
	for _, c := range cards {
		n, health := c.amount(resource), pluginapi.Healthy
		switch {
		case c.gone:
			n, health = last[c.UUID], pluginapi.Unhealthy
		case c.Fault != "":
			health = pluginapi.Unhealthy
		}
		for i := range n {
			all = append(all, &pluginapi.Device{ID: c.id(resource, i), Health: health})
		}
	}
	return all
}

// maxList bounds the list of devices. The kubelet receives messages of 4 MiB, gRPC's default, which it does not change;
// what is longer ends the stream, and the node has no GPU memory at all.
const maxList = 4<<20 - 64<<10

// fits refuses a list that the kubelet would not take.
func fits(list []*pluginapi.Device, cards []card, unit quota.Bytes) error {
	size := proto.Size(&pluginapi.ListAndWatchResponse{Devices: list})
	if size <= maxList {
		return nil
	}
	least := unit
	for float64(size)*float64(unit)/float64(least) > maxList {
		least *= 2
	}
	return fmt.Errorf("deviceplugin: unit %v: the %d GPUs have %d units of %s, a list of %d bytes, and the kubelet takes no message "+
		"above %d: choose a unit of at least %v",
		unit, len(cards), len(list), ResourceMemory, size, 4<<20, least)
}
