// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// TestDomain: a container is in the trust domain that it names, unless no guard would hold it there, or its author is not the node's.
func TestDomain(t *testing.T) {
	const pod = `"io.kubernetes.cri.container-type":"container"`
	for _, c := range []struct {
		name        string
		enforcement string
		annotations string
		env         []string
		refused     string
		threads     int
	}{
		{name: "a member"},
		{name: "no guard", enforcement: device.EnforcePreload, refused: "without a guard"},
		{name: "a pod", annotations: pod, refused: "not for pods"},
		{name: "a part of the multiprocessors", env: []string{"CGPU_THREADS=30"}, threads: 30},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := table()
			node.Config.Enforcement = c.enforcement
			a := read(t, c.annotations, append(c.env, "CGPU_MEM=1", "CGPU_DOMAIN=team")...)
			req, err := a.Reservation(ledger.Record{ID: "x", Nonce: "n"}, node, "/run/cgpu")
			switch {
			case c.refused == "" && (err != nil || req.Record.Domain != "team" || req.Record.DomainServer || req.Record.Threads != c.threads):
				t.Errorf("%+v, %v", req.Record, err)
			case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused) || !strings.Contains(err.Error(), "CGPU_DOMAIN")):
				t.Errorf("%v, want %q", err, c.refused)
			}
		})
	}
}
