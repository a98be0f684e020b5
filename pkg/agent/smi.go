// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// fresh is how long an answer serves: whoever reaches the port makes the agent ask the guards, and write the answer, once in this time, no
// oftener.
const fresh = time.Second

// kept is what makes an answer, which then serves for a while. One at a time makes it, and who does not read his keeps nobody waiting.
func kept(answer func() ([]byte, error)) func() ([]byte, error) {
	var mu sync.Mutex
	var at time.Time
	var text []byte
	var failed error
	return func() ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		if at.IsZero() || time.Since(at) > fresh {
			text, failed = answer()
			at = time.Now()
		}
		return text, failed
	}
}

// smi answers GET /v1/smi with what `cgpu smi --json` says of the node, for `kubectl cgpu top`. It changes nothing. The processes
// of containers are left out, and nonces, by which sockets are named: they are not the cluster's business, and who reaches the
// port is not asked who he is. The NetworkPolicy in deploy/ says who does.
func smi(runDir string) http.HandlerFunc {
	names := new(snapshot.Names)
	answer := kept(func() ([]byte, error) { return snapshotText(runDir, names) })
	return func(w http.ResponseWriter, _ *http.Request) {
		body, err := answer()
		if err != nil {
			http.Error(w, tidy(err.Error(), 1024), http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body)
	}
}

func snapshotText(runDir string, names *snapshot.Names) ([]byte, error) {
	v, err := snapshot.Look(runDir, nil, names)
	if err != nil {
		return nil, err
	}
	n := v.JSON()
	for g := range n.GPUs {
		for i := range n.GPUs[g].VGPUs {
			n.GPUs[g].VGPUs[i].Processes, n.GPUs[g].VGPUs[i].Nonce = []schema.Process{}, ""
		}
	}
	return json.Marshal(n)
}
