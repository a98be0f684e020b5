package main

import (
	"fmt"
	"io"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func psCommand() *cli.Command {
	return &cli.Command{
		Name:  "ps",
		Usage: "list the processes that use GPU memory, and whose they are",
		Description: "A line for each process and GPU. PID is the process on the host, INSIDE its number in the container. USED is what\n" +
			"cgpu charges it: memory that processes share counts for each of them. In preload mode nobody knows the processes.\n\n" +
			filterHelp + "\n\n" +
			"Examples:\n   cgpu ps\n   cgpu ps --gpu 0\n   cgpu ps --container web -o json | jq '.[].pid'",
		ArgsUsage: " ",
		Flags:     append(filterFlags(), outputFlag()),
		Before:    noArguments,
		Action: func(c *cli.Context) error {
			sel, err := selectionOf(c)
			if err != nil {
				return usageError{fmt.Errorf("ps: %w", err)}
			}
			inJSON, err := wantsJSON(c)
			if err != nil {
				return err
			}
			v, err := node.View(device.RunDir())
			if err != nil {
				return err
			}
			if v, err = sel.apply(v); err != nil {
				return fmt.Errorf("ps: %w", err)
			}
			list := processesOf(v)
			if inJSON {
				return terminal.EncodeJSON(c.App.Writer, list, "  ")
			}
			return printPS(c.App.Writer, list)
		},
	}
}

// gpuProcess is a process on one GPU. Its JSON form is an interface: fields may be added, none renamed.
type gpuProcess struct {
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

// processesOf lists what a view has, GPU by GPU.
func processesOf(v snapshot.View) []gpuProcess {
	list := []gpuProcess{}
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			for _, p := range x.Processes {
				list = append(list, gpuProcess{x.ID, x.Nonce, x.Name, g.Index, g.UUID, p.PID, p.NSPID, p.Used, p.Name, &x})
			}
		}
	}
	return list
}

func printPS(w io.Writer, list []gpuProcess) error {
	t := newTable(w)
	t.row("CONTAINER", "GPU", "PID", "INSIDE", "USED", "PROCESS", "NAME")
	for _, p := range list {
		t.row(handle(*p.of), p.GPU, p.PID, orDash(p.NSPID), mib(p.Used), terminal.Printable(p.Process), nameCell(*p.of))
	}
	return t.Flush()
}
