// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/tally"
)

// TestTally: what the guard says of its container is in the node's counters at that moment, and when it is gone.
func TestTally(t *testing.T) {
	r := newRig(t)
	release := r.guard.keepTally()
	c := r.start()
	a := c.do("open")[0]
	c.do("alloc", a, 100*mib)
	c.refused("NV_ERR_NO_MEMORY", "alloc", a, int(testLimit/quota.MiB)*mib)
	c.kill()
	r.empty()
	look := func() tally.Values {
		n, err := tally.Read(r.nodes)
		if err != nil {
			t.Fatal(err)
		}
		return n.Sum
	}
	s, v := r.guard.Status(), look()
	if g := v.GPUs[s.VGPUs[0].UUID]; v.Calls == 0 || v.Calls != s.Calls.Trapped || v.CPU == 0 || g.Denied != 1 ||
		g.Denied != s.VGPUs[0].Denied {
		t.Errorf("%+v, the guard says %+v", v, s)
	}
	release()
	if err := tally.Fold(r.nodes); err != nil {
		t.Fatal(err)
	}
	if got := look(); got.Calls != v.Calls || got.GPUs[s.VGPUs[0].UUID] != v.GPUs[s.VGPUs[0].UUID] {
		t.Errorf("%+v, was %+v", got, v)
	}
}

// TestTallyRefused: a container is served where nothing can be counted for the node.
func TestTallyRefused(t *testing.T) {
	r := newRig(t)
	if err := os.WriteFile(filepath.Join(r.nodes, "counters"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	release := r.guard.keepTally()
	c := r.start()
	c.do("open")
	if n := r.guard.Status().Calls.Trapped; n == 0 {
		t.Error("nothing is counted")
	}
	release()
}
