// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestEngines(t *testing.T) {
	on, off := ptr(true), ptr(false)
	both := []string{"/etc/cdi", "/var/run/cdi"}
	for _, c := range []struct {
		engine
		dir, want string
	}{
		{engine{"containerd", "v2.4.2", nil, both, false}, "/var/run/cdi", ""},
		{engine{"containerd", "v2.4.2", nil, both, false}, "/run/cdi", ""},
		{engine{"containerd", "2.0.0-rc.1", nil, nil, false}, "/var/run/cdi", ""},
		{engine{"containerd", "v2.1.4", on, both, false}, "/etc/cdi", ""},
		{engine{"containerd", "v2.1.4", off, both, false}, "/var/run/cdi", "set enable_cdi = true"},
		{engine{"containerd", "v2.1.4", on, both, false}, "/srv/cdi", "reads CDI specs in /etc/cdi and /var/run/cdi, not in /srv/cdi"},
		{engine{"containerd", "1.7.27", on, both, false}, "/var/run/cdi", ""},
		{engine{"containerd", "1.7.27", off, both, false}, "/var/run/cdi", "containerd 1.7.27: enable_cdi is false"},
		{engine{"containerd", "1.7.27", nil, nil, false}, "/var/run/cdi", "deploy/components/cri-socket"},
		{engine{"containerd", "1.6.20~ds1", nil, nil, false}, "/var/run/cdi", "containerd 1.6.20~ds1: ignores CDI devices"},
		{engine{"containerd", "v1.6.38", on, both, false}, "/var/run/cdi", "ignores CDI devices"},
		{engine{"containerd", "unknown", on, both, false}, "/var/run/cdi", "want a version"},
		{engine{"cri-o", "1.34.1", nil, nil, false}, "/var/run/cdi", ""},
		{engine{"cri-o", "1.22.0", nil, nil, false}, "/var/run/cdi", "ignores CDI devices"},
		{engine{"docker", "28.0.1", nil, nil, false}, "/var/run/cdi", "is not known to take CDI devices"},
		{engine{}, "/var/run/cdi", "is not known"},
	} {
		err := c.check(c.dir)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, want %q", c.engine, err, c.want)
		}
	}
}

// criServer is a container runtime's CRI server.
type criServer struct {
	cri.UnimplementedRuntimeServiceServer
	name, version, config string
}

func (r criServer) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{RuntimeName: r.name, RuntimeVersion: r.version}, nil
}

func (r criServer) Status(_ context.Context, req *cri.StatusRequest) (*cri.StatusResponse, error) {
	if !req.Verbose {
		return &cri.StatusResponse{}, nil
	}
	return &cri.StatusResponse{Info: map[string]string{"config": r.config}}, nil
}

// serve lets r answer on a socket of its own.
func (r criServer) serve(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(shortDir(t), "cri.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(s, r)
	go s.Serve(l) //nolint:errcheck // ends with the test
	t.Cleanup(s.Stop)
	return socket
}

func TestAskEngine(t *testing.T) {
	nodes := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"},
		Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{ContainerRuntimeVersion: "containerd://1.6.20"}}})
	for _, r := range []struct {
		criServer
		want string
	}{
		{criServer{name: "containerd", version: "v2.4.2", config: `{"cdiSpecDirs":["/etc/cdi","/var/run/cdi"],"containerd":{"x":1}}`}, ""},
		{criServer{name: "containerd", version: "1.7.27", config: `{"enableCDI":false,"cdiSpecDirs":["/etc/cdi"]}`}, "enable_cdi is false"},
		{criServer{name: "containerd", version: "1.7.27", config: `{"enableCDI":true,"cdiSpecDirs":["/etc/cdi"]}`},
			"reads CDI specs in /etc/cdi, not"},
		{criServer{name: "containerd", version: "v1.6.38"}, "ignores CDI"},
		{criServer{name: "containerd", version: "v2.4.2", config: `[`}, "its configuration"},
		{criServer{name: "cri-o", version: "1.34.0"}, ""},
	} {
		e, err := askEngine(t.Context(), nodes, "node1", r.serve(t))
		if err == nil {
			err = e.check("/run/cdi")
		}
		if r.want == "" && err != nil || r.want != "" && (err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), "\n", " "), r.want)) {
			t.Errorf("%+v: %v, want %q", r.criServer, err, r.want)
		}
	}
	if _, err := askEngine(t.Context(), nodes, "node1", "/nowhere/cri.sock"); err == nil ||
		!strings.Contains(err.Error(), "/nowhere/cri.sock") {
		t.Error(err)
	}
	// One that was restarted since its socket was mounted, and one whose socket is not there.
	stale := criServer{name: "containerd", version: "1.7.27"}.serve(t)
	dead, err := net.Listen("unix", stale+"2")
	if err != nil {
		t.Fatal(err)
	}
	dead.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = dead.Close()
	if _, err := askEngine(t.Context(), nodes, "node1", stale+"2"); err == nil || !strings.Contains(err.Error(), "Delete the agent's pod") {
		t.Error(err)
	}
	for version, want := range map[string]string{"containerd://1.7.27": "deploy/components/cri-socket", "containerd://2.0.5": "",
		"cri-o://1.34.1": ""} {
		e, err := fromNode(version)
		if err == nil {
			err = e.check("/run/cdi")
		}
		if !e.believed || (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v", version, e, err)
		}
	}
	if e, err := fromNode("containerd://1.6.20"); err != nil || e.check("/run/cdi") == nil {
		t.Errorf("%+v, %v", e, err)
	}
	if _, err := fromNode(""); err == nil || !strings.Contains(err.Error(), "want such as containerd://") {
		t.Error(err)
	}
}
