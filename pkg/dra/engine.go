// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/kubernetes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// defaultCRISocket is containerd's.
const defaultCRISocket = "/run/containerd/containerd.sock"

// engine is a node's container runtime. An engine without CDI starts a container without what its claim was promised and
// says nothing, so one that is not known to have CDI is refused.
type engine struct {
	name, version string // such as "containerd" and "v2.4.2"
	// cdi and cdiDirs are what containerd's configuration says; nil: not known.
	cdi     *bool
	cdiDirs []string
	// believed: the engine itself was not asked, so that it is taken to be as it is by default.
	believed bool
}

// check is nil if the engine takes CDI devices from dir.
func (e engine) check(dir string) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("dra: container runtime %s %s: %s", e.name, e.version, fmt.Sprintf(format, args...))
	}
	v, err := version.ParseGeneric(e.version)
	switch e.name {
	case "containerd":
		switch {
		case err != nil:
			return refuse("want a version such as 1.7.27")
		case v.LessThan(version.MajorMinor(1, 7)):
			// containerd 1.6 knows no CDIDevices in CRI.
			return refuse("ignores CDI devices, so a pod would start without its share: upgrade to 1.7 or newer, or use the device plugin")
		case e.cdi != nil && !*e.cdi:
			return refuse(`enable_cdi is false, so a pod would start without its share: set enable_cdi = true in the configuration of ` +
				`containerd's CRI plugin and restart containerd`)
		case e.cdi == nil && v.Major() == 1:
			// Off by default in 1.7 (pkg/cri/config/config_unix.go), on since 2.0, and without a switch since 2.4.
			return refuse("enable_cdi is off by default, and its socket was not there to ask: mount %s into the agent's pod "+
				"(deploy/components/cri-socket), or upgrade to 2.0 or newer",
				defaultCRISocket)
		}
	case "cri-o":
		if err != nil || v.LessThan(version.MajorMinor(1, 23)) {
			return refuse("ignores CDI devices, so a pod would start without its share: upgrade to 1.23 or newer, or use the device plugin")
		}
	default:
		return refuse("is not known to take CDI devices: use containerd, CRI-O or the device plugin")
	}
	if len(e.cdiDirs) > 0 && !slices.ContainsFunc(e.cdiDirs, func(d string) bool { return samePlace(d, dir) }) {
		return refuse("reads CDI specs in %s, not in %s: add it to cdi_spec_dirs and restart the runtime", strings.Join(e.cdiDirs, " and "), dir)
	}
	return nil
}

// samePlace compares two folders of the host. /var/run is a link to /run.
func samePlace(a, b string) bool {
	run := func(p string) string {
		p = filepath.Clean(p)
		if rest, ok := strings.CutPrefix(p, "/var/run/"); ok {
			return "/run/" + rest
		}
		return p
	}
	return run(a) == run(b)
}

// askEngine asks the runtime itself, and where its socket is not there the Node object.
func askEngine(ctx context.Context, client kubernetes.Interface, node, socket string) (engine, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	path := socket
	if path == "" {
		path = defaultCRISocket
	}
	_, statErr := os.Stat(path)
	if statErr == nil {
		return askCRI(ctx, path)
	}
	if socket != "" {
		return engine{}, fmt.Errorf("dra: container runtime's socket: %w", statErr)
	}
	n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return engine{}, fmt.Errorf("dra: node %s: %w", node, err)
	}
	return fromNode(n.Status.NodeInfo.ContainerRuntimeVersion)
}

// fromNode reads what the kubelet says of its runtime, such as "containerd://2.4.2".
func fromNode(s string) (engine, error) {
	name, version, ok := strings.Cut(s, "://")
	if !ok {
		return engine{}, fmt.Errorf("dra: nodeInfo.containerRuntimeVersion %q: want such as containerd://2.1.4: does a kubelet run on the "+
			"node?", s)
	}
	return engine{name: name, version: version, believed: true}, nil
}

func askCRI(ctx context.Context, socket string) (engine, error) {
	fault := func(err error) (engine, error) {
		return engine{}, fmt.Errorf("dra: container runtime at %s: %w", socket, err)
	}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fault(err)
	}
	defer conn.Close()
	client := cri.NewRuntimeServiceClient(conn)
	v, err := client.Version(ctx, &cri.VersionRequest{})
	if status.Code(err) == codes.Unavailable {
		// A socket that is mounted into a pod by itself is that of the runtime of then, and nobody listens at it after a restart.
		err = fmt.Errorf("%w: was it restarted since this pod began? Delete the agent's pod then", err)
	}
	if err != nil {
		return fault(err)
	}
	e := engine{name: v.RuntimeName, version: v.RuntimeVersion}
	if e.name != "containerd" {
		return e, nil
	}
	// containerd shows its CRI plugin's whole configuration to who asks for a verbose status.
	s, err := client.Status(ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		return fault(err)
	}
	if err := e.configured(s.Info["config"]); err != nil {
		return fault(err)
	}
	return e, nil
}

// configured reads the two settings that matter.
func (e *engine) configured(config string) error {
	if config == "" {
		return nil
	}
	var c struct {
		EnableCDI   *bool    `json:"enableCDI"`
		CDISpecDirs []string `json:"cdiSpecDirs"`
	}
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return errors.Join(errors.New("its configuration"), err)
	}
	e.cdi, e.cdiDirs = c.EnableCDI, c.CDISpecDirs
	return nil
}
