// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// podOf are the annotations that containerd gives a pod's container; author is more, of the pod's.
func podOf(namespace, author string) string {
	return `"io.kubernetes.cri.container-type":"container","io.kubernetes.cri.sandbox-namespace":"` + namespace +
		`","io.kubernetes.cri.sandbox-name":"p","io.kubernetes.cri.container-name":"c"` + author
}

// TestDomain: a container is in the trust domain that it names, unless no guard would hold it there; a pod's in that of its namespace,
// where the node lets that have one.
func TestDomain(t *testing.T) {
	const crio = `"io.kubernetes.cri-o.ContainerType":"container","io.kubernetes.pod.namespace":"prod","io.kubernetes.pod.name":"p",` +
		`"io.kubernetes.container.name":"c"`
	for _, c := range []struct {
		name        string
		enforcement string
		annotations string
		env         []string
		share       string
		domain      string // that it is in
		refused     string
		threads     int
	}{
		{name: "a member", env: []string{"CGPU_DOMAIN=team"}, domain: "team"},
		{name: "none", env: []string{"CGPU_DOMAIN="}},
		{name: "no guard", enforcement: device.EnforcePreload, env: []string{"CGPU_DOMAIN=team"}, refused: "without a guard"},
		{name: "a part of the multiprocessors", env: []string{"CGPU_DOMAIN=team", "CGPU_THREADS=30"}, domain: "team", threads: 30},
		{name: "a pod", annotations: podOf("prod", ""), env: []string{"CGPU_DOMAIN=team"}, domain: "prod.team"},
		{name: "a pod by annotation", annotations: podOf("prod", `,"cgpu.io/gpu-mem-container":"1","cgpu.io/domain":"team"`),
			domain: "prod.team"},
		{name: "a pod of CRI-O", annotations: crio, env: []string{"CGPU_DOMAIN=team"}, domain: "prod.team"},
		{name: "a pod elsewhere", annotations: podOf("dev", ""), env: []string{"CGPU_DOMAIN=team"}, refused: "not for pods of namespace dev"},
		{name: "a pod of no namespace", annotations: `"io.kubernetes.cri.container-type":"container"`, env: []string{"CGPU_DOMAIN=any"},
			refused: "not for pods of namespace ;"},
		{name: "a domain for containers", annotations: podOf("prod", ""), env: []string{"CGPU_DOMAIN=host"}, refused: "not for pods of"},
		{name: "one that there is not", annotations: podOf("prod", ""), env: []string{"CGPU_DOMAIN=x"}, refused: "not for pods of"},
		{name: "one for all", annotations: podOf("dev", ""), env: []string{"CGPU_DOMAIN=any"}, domain: "any"},
		{name: "another namespace's", annotations: podOf("prod", ""), env: []string{"CGPU_DOMAIN=dev/team"},
			refused: "letters, digits and dashes"},
		{name: "by a claim", annotations: podOf("prod", ""), share: "team", domain: "prod.team"},
		{name: "by a claim, another by itself", annotations: podOf("prod", ""), env: []string{"CGPU_DOMAIN=any"}, share: "team", domain: "any"},
		{name: "by a claim elsewhere", annotations: podOf("dev", ""), share: "team", refused: "not for pods of namespace dev"},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := table()
			node.Config.Enforcement = c.enforcement
			node.Config.Domains = []device.Domain{{Name: "team", Namespaces: []string{"prod"}}, {Name: "host"},
				{Name: "any", Namespaces: []string{"*"}, Shared: true}}
			raw := `{"annotations":{` + c.annotations + `},"process":{"env":["CGPU_MEM=1","` + strings.Join(append(c.env, "A=1"), `","`) + `"]}}`
			a, err := Read([]byte(raw))
			if err == nil && a.fault != nil {
				err = a.fault
			}
			var req ledger.Request
			if err == nil {
				if c.share != "" {
					s := alloc.Share{ID: "s", UUID: node.GPUs[0].UUID, Containers: 1, Domain: c.share}
					s.Limit, s.Priority = quota.GiB, quota.PriorityDefault
					a.Shares = []Share{{s, false}}
				}
				req, err = a.Reservation(ledger.Record{ID: "x", Nonce: "n"}, node, "/run/cgpu")
			}
			r := req.Record
			switch {
			case c.refused == "" && (err != nil || r.Domain != c.domain || r.DomainServer || r.Threads != c.threads):
				t.Errorf("%+v, %v", r, err)
			case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused) || !strings.Contains(err.Error(), "CGPU_DOMAIN")):
				t.Errorf("%v, want %q", err, c.refused)
			}
		})
	}
}
