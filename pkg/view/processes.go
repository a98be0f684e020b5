// SPDX-License-Identifier: Apache-2.0

package view

import (
	"io"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Process is a process on one GPU. Its JSON form is an interface: fields may be added, none renamed.
type Process struct {
	Container string      `json:"container"`
	Nonce     string      `json:"nonce,omitempty"`
	Name      string      `json:"name,omitempty"` // of the container
	GPU       int         `json:"gpu"`
	UUID      string      `json:"uuid"`
	PID       int         `json:"pid"`   // on the host
	NSPID     int         `json:"nspid"` // in the container
	Used      quota.Bytes `json:"used"`
	Process   string      `json:"process"`

	of *snapshot.VGPU
}

// ProcessesOf lists what a view has, GPU by GPU.
func ProcessesOf(v snapshot.View) []Process {
	list := []Process{}
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			for _, p := range x.Processes {
				list = append(list, Process{x.ID, x.Nonce, x.Name, g.Index, g.UUID, p.PID, p.NSPID, p.Used, p.Name, &x})
			}
		}
	}
	return list
}

func PrintProcesses(w io.Writer, list []Process) error {
	t := newTable(w)
	t.row("CONTAINER", "GPU", "PID", "INSIDE", "USED", "PROCESS", "NAME")
	for _, p := range list {
		t.row(Handle(*p.of), p.GPU, p.PID, OrDash(p.NSPID), MiB(p.Used), terminal.Printable(p.Process), nameCell(*p.of))
	}
	return t.Flush()
}
