// SPDX-License-Identifier: Apache-2.0

// Cgpu is the command line for people: what runs on this node's GPUs (smi), changes while it runs (set, policy, pause,
// resume), what the runtime would do with a container (spec), and upkeep (gc, refresh).
//
// It asks no daemon. The ledger says who holds what, each container's guard says what is used, node.json knows the GPUs.
package view

import (
	"fmt"
	"strings"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Label is a container's name for people, where it has one.
func Label(r ledger.Record) string {
	if r.Name == "" {
		return ""
	}
	return " (" + terminal.Printable(r.Name) + ")"
}

// Shares lists what a record reserves.
func Shares(r ledger.Record) string {
	var list []string
	for _, v := range r.VGPUs {
		list = append(list, fmt.Sprintf("%v of %s", v.Limit, ShortUUID(v.UUID)))
	}
	for _, uuid := range r.Native {
		list = append(list, "all of "+ShortUUID(uuid))
	}
	return strings.Join(list, ", ")
}

// ShortID is a container's ID as engines show it.
func ShortID(id string) string { return terminal.Printable(id[:min(len(id), 12)]) }

// ShortUUID is enough of a GPU's UUID to tell it from another, and is accepted in ALIYUN_COM_GPU_VISIBLE_DEVICES.
func ShortUUID(uuid string) string { return uuid[:min(len(uuid), len("GPU-xxxxxxxx"))] }
