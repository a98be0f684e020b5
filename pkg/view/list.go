// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"io"

	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// PrintList lists GPUs as nvidia-smi -L does.
func PrintList(w io.Writer, v snapshot.View) error {
	for _, g := range v.GPUs {
		if _, err := fmt.Fprintf(w, "GPU %d: %s (UUID: %s)\n", g.Index, terminal.Printable(g.Name), g.UUID); err != nil {
			return err
		}
	}
	return nil
}
