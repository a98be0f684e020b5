// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// smiFresh is how long an answer serves: whoever reaches the port makes the agent ask the guards once in this time, no oftener.
const smiFresh = time.Second

// smi answers GET /v1/smi with what `cgpu smi --json` says of the node, for `kubectl cgpu top`. It changes nothing. The processes
// of containers are left out, and nonces, by which sockets are named: they are not the cluster's business, and who reaches the
// port is not asked who he is. The NetworkPolicy in deploy/ says who does.
func smi(runDir string) http.HandlerFunc {
	var mu sync.Mutex
	var at time.Time
	var text []byte
	var failed error
	return func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		if text == nil && failed == nil || time.Since(at) > smiFresh {
			text, failed = snapshotText(runDir)
			at = time.Now()
		}
		body, err := text, failed
		mu.Unlock()
		if err != nil {
			http.Error(w, tidy(err.Error(), 1024), http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body)
	}
}

func snapshotText(runDir string) ([]byte, error) {
	v, err := snapshot.Look(runDir, nil)
	if err != nil {
		return nil, err
	}
	for g := range v.GPUs {
		for i := range v.GPUs[g].VGPUs {
			v.GPUs[g].VGPUs[i].Processes, v.GPUs[g].VGPUs[i].Nonce = []snapshot.Process{}, ""
		}
	}
	return json.Marshal(v)
}
