// SPDX-License-Identifier: Apache-2.0

package view

import (
	"io"

	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Process is a process on one GPU.
type Process struct {
	schema.GPUProcess
	of *snapshot.VGPU
}

// ProcessesOf lists what a view has, GPU by GPU.
func ProcessesOf(v snapshot.View) []Process {
	list := []Process{}
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			for _, p := range x.Processes {
				list = append(list, Process{schema.GPUProcess{Container: x.ID, Nonce: x.Nonce, Name: x.Name, GPU: g.Index, UUID: g.UUID,
					PID: p.PID, NSPID: p.NSPID, Used: p.Used, Process: p.Name}, &x})
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
