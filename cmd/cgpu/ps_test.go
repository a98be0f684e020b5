// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
)

func TestPSCommand(t *testing.T) {
	n := nodetest.New(t)
	for _, id := range []string{"aaaa", "bbbb"} {
		r := n.Reserve(ledger.Record{ID: id, Name: "default/pod/" + id,
			VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
		s := nodetest.Status(r)
		s.Processes = []api.ProcessStatus{{PID: 100, NSPID: 1, Name: "python", Used: []quota.Bytes{quota.MiB}},
			{PID: 101, Name: "idle", Used: []quota.Bytes{0}}}
		nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, s))
	}
	const head = "CONTAINER  GPU  PID  INSIDE  USED  PROCESS  NAME\n"
	const a, b = "aaaa       0    100  1       1MiB  python   default/pod/aaaa\n",
		"bbbb       0    100  1       1MiB  python   default/pod/bbbb\n"
	for args, want := range map[string]string{
		"ps":                              head + a + b,
		"ps --container default/pod/bbbb": head + b,
		"ps --gpu 1":                      "CONTAINER  GPU  PID  INSIDE  USED  PROCESS  NAME\n",
		"ps --filter state=paused":        "CONTAINER  GPU  PID  INSIDE  USED  PROCESS  NAME\n",
		"ps -o json --gpu 1":              "[]\n",
		"ps -o wide":                      "error: ps: -o \"wide\": want table or json\n",
		"ps aaaa":                         "error: ps: \"aaaa\": want no arguments; see cgpu ps --help\n",
		"ps --container cccc":             "error: ps: --container \"cccc\": no container with a GPU has this ID or name; cgpu smi lists them\n",
	} {
		if out := cgpu(args); strings.Join(strings.Fields(out), " ") != strings.Join(strings.Fields(want), " ") {
			t.Errorf("%s: printed\n%s\nwant\n%s", args, out, want)
		}
	}
	var list []schema.GPUProcess
	if err := json.Unmarshal([]byte(cgpu("ps -o json --container bbbb")), &list); err != nil || len(list) != 1 ||
		list[0] != (schema.GPUProcess{Container: "bbbb", Nonce: "n-bbbb", Name: "default/pod/bbbb", UUID: nodetest.T4, PID: 100, NSPID: 1,
			Used: quota.MiB, Process: "python"}) {
		t.Errorf("%+v, %v", list, err)
	}
}
