// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/name"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func nameOf(r ledger.Record) string { return name.Of(r.Bundle, r.ID) }

func TestDockerName(t *testing.T) {
	mount := func(destination, source string) []map[string]string {
		return []map[string]string{{"destination": destination, "source": source}}
	}
	for what, tt := range map[string]struct {
		d    nodetest.Docker
		want string
	}{
		"docker":                  {nodetest.Docker{Name: "/web"}, "web"},
		"hosts":                   {nodetest.Docker{Name: "/web", Mounts: mount("/etc/hosts", "OWN/hosts")}, "web"},
		"resolv.conf":             {nodetest.Docker{Name: "/web", Mounts: mount("/etc/resolv.conf", "OWN/resolv.conf")}, "web"},
		"no name":                 {nodetest.Docker{Name: "/"}, ""},
		"long":                    {nodetest.Docker{Name: "/" + strings.Repeat("x", 257)}, ""},
		"another's record":        {nodetest.Docker{Name: "/web", About: "fedcba"}, ""},
		"a volume":                {nodetest.Docker{Name: "/web", Mounts: mount("/mnt/hostname", "OWN/hostname")}, ""},
		"a file of another kind":  {nodetest.Docker{Name: "/web", Mounts: mount("/etc/passwd", "OWN/passwd")}, ""},
		"another's folder":        {nodetest.Docker{Name: "/web", Mounts: mount("/etc/hostname", "OWN/../other/hostname")}, ""},
		"a relative path":         {nodetest.Docker{Name: "/web", Mounts: mount("/etc/hostname", "abcdef/hostname")}, ""},
		"a damaged bundle":        {nodetest.Docker{Name: "/web", Bundle: "{"}, ""},
		"a bundle without mounts": {nodetest.Docker{Name: "/web", Bundle: `{"mounts":null}`}, ""},
		"a bundle that is large":  {nodetest.Docker{Name: "/web", Bundle: `{"mounts":[]` + strings.Repeat(" ", name.MaxFile) + "}"}, ""},
	} {
		if got := nameOf(tt.d.Make(t, ledger.Record{ID: "abcdef"})); got != tt.want {
			t.Errorf("%s: %q, want %q", what, got, tt.want)
		}
	}
	for _, bundle := range []string{"", "relative", "/does/not/exist"} {
		if got := nameOf(ledger.Record{ID: "abcdef", Bundle: bundle}); got != "" {
			t.Errorf("bundle %q: %q", bundle, got)
		}
	}
	// What would keep a reader waiting, or is somewhere else, is not read.
	r := nodetest.Docker{Name: "/web"}.Make(t, ledger.Record{ID: "abcdef"})
	record := filepath.Join(filepath.Dir(r.Bundle), "containers", r.ID, "config.v2.json")
	for what, make := range map[string]func() error{
		"fifo": func() error { return unix.Mkfifo(record, 0o600) },
		"link": func() error { return os.Symlink(record+".away", record) },
	} {
		if what == "link" {
			if err := os.WriteFile(record+".away", []byte(`{"ID":"abcdef","Name":"/web"}`), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(os.Remove(record), make()); err != nil {
			t.Fatal(err)
		}
		if got := nameOf(r); got != "" {
			t.Errorf("%s: %q", what, got)
		}
	}
}

func TestAnnotatedName(t *testing.T) {
	const nerdctl = `"nerdctl/namespace":"default","nerdctl/state-dir":"/var/lib/nerdctl/1935db59/containers/default/abcdef"`
	for bundle, want := range map[string]string{
		`{"annotations":{"io.kubernetes.pod.name":"train-0","io.kubernetes.container.name":"main","io.kubernetes.pod.namespace":"ml"}}`: "ml/train-0/main",
		// the pod's own
		`{"annotations":{"io.kubernetes.pod.name":"train-0"}}`:                                             "",
		`{"annotations":{"nerdctl/name":"web",` + nerdctl + `}}`:                                           "web",
		`{"annotations":{"nerdctl/name":"` + strings.Repeat("x", name.MaxLength+1) + `",` + nerdctl + `}}`: "",
		`{"annotations":{"org.opencontainers.image.title":"web"}}`:                                         "",
	} {
		if got := nameOf(nodetest.Docker{Bundle: bundle}.Make(t, ledger.Record{ID: "abcdef"})); got != want {
			t.Errorf("%s: %q, want %q", bundle, got, want)
		}
	}
}

// Two engines, or two namespaces of containerd, may each have a container of one ID; each of them can be named.
func TestSameID(t *testing.T) {
	n := nodetest.New(t)
	for nonce, root := range map[string]string{"1111111111111111": "/run/a", "2222222222222222": "/run/b"} {
		n.Reserve(ledger.Record{ID: "web", Nonce: nonce, Root: root, Preload: true,
			VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	}
	for _, command := range []string{"set web --weight 2", "set we --weight 2", "pause web", "resume web", "inspect web"} {
		out := cgpu(command)
		for _, want := range []string{"may be ", `1111111111111111 (root "/run/a")`, " or ", `2222222222222222 (root "/run/b")`,
			": give one of these\n"} {
			if !strings.Contains(out, want) || strings.Count(out, "\n") != 1 {
				t.Errorf("%s: printed %s", command, out)
			}
		}
	}
	for command, want := range map[string][]string{
		"smi":                              {"\n1111111111111111  0 ", "  web (/run/a)\n", "\n2222222222222222  0 ", "  web (/run/b)\n"},
		"smi --container 11111111":         {"no container with a GPU has this ID or name"},
		"smi --container web":              {"\n1111111111111111  0 ", "\n2222222222222222  0 "},
		"smi --container 2222222222222222": {"\n2222222222222222  0 "}, // alone in the table it still has the ID with another
	} {
		for _, line := range want {
			if out := cgpu(command); !strings.Contains(out, line) {
				t.Errorf("%s: printed\n%swant %q", command, out, line)
			}
		}
	}
	if out := cgpu("set 2222222222222222 --weight 2"); out != "web, GPU 0: weight 1 → 2\n" {
		t.Errorf("printed %s", out)
	}
	for nonce, want := range map[string]int{"1111111111111111": 1, "2222222222222222": 2} {
		if r, err := n.Book.Get(nonce); err != nil || r.VGPUs[0].Weight != want {
			t.Errorf("%s: %+v, %v", nonce, r, err)
		}
		if out := cgpu("smi --json --container " + nonce); strings.Count(out, `"nonce": "`) != 1 || !strings.Contains(out, nonce) {
			t.Errorf("%s: printed %s", nonce, out)
		}
		if out := cgpu("inspect " + nonce); !strings.Contains(out, `"nonce": "`+nonce+`"`) {
			t.Errorf("%s: printed %s", nonce, out)
		}
		if out := cgpu("km --once"); !strings.Contains(out, fmt.Sprintf("0/%s/weight:%d\n", nonce, want)) {
			t.Errorf("%s: printed %s", nonce, out)
		}
	}
	for _, nonce := range []string{"3333333333333333", "4444444444444444"} { // with guards, which do not answer
		n.Reserve(ledger.Record{ID: "db", Nonce: nonce, Root: nonce,
			VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	}
	cgpu("pause 4444444444444444")
	for nonce, want := range map[string]bool{"3333333333333333": false, "4444444444444444": true} {
		if r, err := n.Book.Get(nonce); err != nil || r.Paused != want {
			t.Errorf("%s: %+v, %v", nonce, r, err)
		}
	}
	if out := cgpu("events --container 2222222222222222"); !strings.Contains(out, "weight 1 → 2") {
		t.Errorf("printed %s", out)
	}
	if out := cgpu("events --container 1111111111111111"); out != "" {
		t.Errorf("printed %s", out)
	}
}

// The name stands wherever people look for it.
func TestDockerNameShown(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(nodetest.Docker{Name: "/web\x1b[31m"}.Make(t,
		ledger.Record{ID: "abcdef", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}}))
	for args, want := range map[string]string{
		"smi":                "web?[31m\n",
		"smi --json":         `"name": "web\u001b[31m"`,
		"set abc --weight 2": "abcdef (web?[31m), GPU 0: weight 1 → 2\n",
		"pause web\x1b[31m":  "container abcdef (web?[31m): its guard is gone",
	} {
		if out := cgpu(args); !strings.Contains(out, want) {
			t.Errorf("%s: printed %s\nwant %s", args, out, want)
		}
	}
}
