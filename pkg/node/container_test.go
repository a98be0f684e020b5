// SPDX-License-Identifier: Apache-2.0

package node

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestFindContainer(t *testing.T) {
	n := nodetest.New(t)
	add := func(id, name, docker string) {
		r := ledger.Record{ID: id, Name: name, VGPUs: []ledger.VGPU{{UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.MiB}}}}
		if docker != "" {
			r = nodetest.Docker{Name: "/" + docker}.Make(t, r)
		}
		n.Reserve(r)
	}
	add("aaaa1111", "", "web")
	add("aaaa2222", "default/pod/main", "hidden")
	add("bbbb1111", "", "cccc")     // its name is the beginning of another's ID
	add("cccc1111", "", "aaaa2222") // its name is another's whole ID
	add("dddd1111", "", "twin")
	add("eeee1111", "", "twin")
	add("ffff1111", "", "ffff") // its name is the beginning of its own ID
	add("0000", "", "web2")
	for container, want := range map[string]string{
		"web": "aaaa1111 (web)", "aaaa1": "aaaa1111 (web)", "default/pod/main": "aaaa2222 (default/pod/main)",
		"aaaa2222": "aaaa2222 (default/pod/main)",
		"b":        "bbbb1111 (cccc)", "ffff": "ffff1111 (ffff)", "web2": "0000 (web2)", "0000": "0000 (web2)",
	} {
		if r, err := FindContainer(n.Book, container); err != nil || r.ID+" ("+r.Name+")" != want {
			t.Errorf("%q: %s (%s), %v, want %s", container, r.ID, r.Name, err, want)
		}
	}
	for container, reason := range map[string]string{
		"cccc": `may be cccc1111 (aaaa2222) or bbbb1111 (cccc)`, "twin": `may be dddd1111 (twin) or eeee1111 (twin)`,
		"aaaa":   "may be aaaa1111 or aaaa2222 (default/pod/main)",
		"hidden": "no such container", "": "no such container", "we": "no such container",
	} {
		if r, err := FindContainer(n.Book, container); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %s, %v, want %s", container, r.ID, err, reason)
		}
	}
}
