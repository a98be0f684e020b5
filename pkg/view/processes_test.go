// SPDX-License-Identifier: Apache-2.0

package view

import (
	"bytes"
	"testing"

	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
)

func TestPS(t *testing.T) {
	var b bytes.Buffer
	if err := PrintProcesses(&b, ProcessesOf(nodetest.Busy(t))); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "ps.txt", b.Bytes())
}
