// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/opencgpu/cgpu/pkg/cluster"
)

var update = flag.Bool("update", false, "write the golden files anew")

// api answers like an API server that has the objects of testdata. Paths in forbidden are answered 403.
func api(t *testing.T, forbidden ...string) string {
	t.Helper()
	files := map[string]string{
		"/api/v1/nodes": "nodes.yaml", "/api/v1/pods": "pods.yaml", "/api/v1/namespaces/default/pods": "pods.yaml",
		"/apis/resource.k8s.io/v1/resourceslices": "slices.yaml", "/apis/resource.k8s.io/v1/resourceclaims": "claims.yaml",
		"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims": "claims.yaml", "/apis/resource.k8s.io/v1/deviceclasses": "classes.yaml",
		"/api/v1/namespaces/cgpu-system/pods":                                     "agents.yaml",
		"/api/v1/namespaces/cgpu-system/pods/http:cgpu-agent-a:9470/proxy/v1/smi": "smi.json",
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fail := func(code int, reason string) {
			w.WriteHeader(code)
			w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"` + reason + `","message":"` + reason + " " +
				r.URL.Path + `"}`))
		}
		for _, path := range forbidden {
			if path == r.URL.Path {
				fail(http.StatusForbidden, "Forbidden")
				return
			}
		}
		if r.Method != http.MethodGet {
			t.Errorf("%s %s: it must only read", r.Method, r.URL)
		}
		file, ok := files[r.URL.Path]
		if !ok {
			fail(http.StatusNotFound, "NotFound")
			return
		}
		text, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Error(err)
		}
		text, err = yaml.YAMLToJSON(text)
		if err != nil {
			t.Error(err)
		}
		w.Write(text)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// kubectl runs a command line against a server.
func kubectl(t *testing.T, server, line string) (out, warnings string, err error) {
	t.Helper()
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	var w, e bytes.Buffer
	args := append(strings.Fields(line), "--server", server)
	err = run(t.Context(), args, &w, &e)
	return w.String(), e.String(), err
}

func TestGolden(t *testing.T) {
	server := api(t)
	for name, line := range map[string]string{
		"inspect.txt":           "inspect",
		"inspect-details.txt":   "inspect -d",
		"inspect-node.txt":      "inspect gpu-b --details",
		"inspect-namespace.txt": "inspect -d -n web",
		"inspect-wide.txt":      "inspect -o wide",
		"inspect.json":          "inspect -o json",
		"top-pods.txt":          "top",
		"top-nodes.txt":         "top nodes gpu-a",
	} {
		out, warnings, err := kubectl(t, server, line)
		if err != nil {
			t.Errorf("%s: %v\n%s", line, err, warnings)
			continue
		}
		for _, r := range out {
			if r != '\n' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) {
				t.Errorf("%s: prints %q, on which a terminal acts", line, r)
			}
		}
		path := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(path, []byte(out), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), out); diff != "" {
			t.Errorf("%s: %s differs (-want +got); go test ./cmd/kubectl-cgpu -update writes it anew:\n%s", line, path, diff)
		}
	}
}

// What a user may not see is missing, with a warning, or an error that says what to do.
func TestForbidden(t *testing.T) {
	for name, tt := range map[string]struct {
		line      string
		forbidden []string
		warning   string
		err       string
	}{
		"nodes":               {"inspect", []string{"/api/v1/nodes"}, "nodes may not be listed", ""},
		"slices":              {"inspect", []string{"/apis/resource.k8s.io/v1/resourceslices"}, "resourceslices may not be listed", ""},
		"pods":                {"inspect", []string{"/api/v1/pods"}, "", "name a namespace of yours with -n"},
		"pods, a namespace":   {"inspect -n default", []string{"/api/v1/pods"}, "that of namespace default only", ""},
		"claims":              {"inspect", []string{"/apis/resource.k8s.io/v1/resourceclaims"}, "", "list resourceclaims"},
		"claims, a namespace": {"inspect -n default", []string{"/apis/resource.k8s.io/v1/resourceclaims"}, "that of namespace default only", ""},
		"an agent":            {"top", nil, "node gpu-b: its cgpu-agent has no /v1/smi: it was started with --smi off", ""},
		"proxy": {"top gpu-a", []string{"/api/v1/namespaces/cgpu-system/pods/http:cgpu-agent-a:9470/proxy/v1/smi"},
			"you need get on pods/proxy in namespace cgpu-system", "no cgpu-agent answered"},
	} {
		_, warnings, err := kubectl(t, api(t, tt.forbidden...), tt.line)
		if tt.warning == "" && warnings != "" || !strings.Contains(warnings, tt.warning) {
			t.Errorf("%s: warns %q, want %q", name, warnings, tt.warning)
		}
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		}
	}
}

func TestRefusals(t *testing.T) {
	server := api(t)
	for line, want := range map[string]string{
		"inspect -o yaml":                   `inspect: -o "yaml": want wide or json`,
		"inspect --unit 7x":                 `inspect: --unit "7x": want a size`,
		"inspect --unit 0MiB":               `inspect: --unit "0MiB": want a size`,
		"inspect plain":                     `node "plain": has no GPU`,
		"inspect --bogus":                   "--bogus: no such flag",
		"inspect --detials":                 "--detials: no such flag; did you mean --details?",
		"inspect -x":                        "unknown shorthand flag",
		"inpsect":                           `"inpsect": want inspect, top or version; did you mean inspect?`,
		"top -o wide":                       `top: -o "wide": want json`,
		"top nodes nowhere":                 `node "nowhere": no cgpu-agent runs there`,
		"top --agent-namespace elsewhere":   "list the pods of cgpu-agent",
		"frob":                              "want inspect, top or version",
		"inspect --kubeconfig /nonexistent": "kubeconfig",
	} {
		if _, _, err := kubectl(t, server, line); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", line, err, want)
		}
	}
}

func TestUnit(t *testing.T) {
	out, _, err := kubectl(t, api(t), "inspect gpu-mib --unit 256MiB")
	if err != nil || !strings.Contains(out, "384/20480") { // 1536 of 81920
		t.Errorf("%v\n%s", err, out)
	}
}

func TestManyWaiting(t *testing.T) {
	var b bytes.Buffer
	if err := printPending(&b, cluster.Cluster{Pending: make([]cluster.Waiting, mostWaiting+7)}); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(b.String(), "\n"); n != mostWaiting+4 || !strings.Contains(b.String(), "and 7 more") {
		t.Errorf("%d lines:\n%s", n, b.String())
	}
}

func TestComplete(t *testing.T) {
	for line, want := range map[string]string{"": "inspect\ntop\nversion\n:4\n", "i": "inspect\n:4\n", "top p": "pods\n:4\n",
		"inspect -o w": "wide\n:4\n"} {
		if got := complete(strings.Split(line, " ")); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
}
