// SPDX-License-Identifier: Apache-2.0

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
