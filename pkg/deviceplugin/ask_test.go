// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// hostileEnv has this program serve a hostile list at a socket, as a kubelet: in a process of its own, since what it needs for that
// would be counted here.
const hostileEnv = "CGPU_TEST_HOSTILE_LIST"

func TestMain(m *testing.M) {
	if path := os.Getenv(hostileEnv); path != "" {
		listener, err := net.Listen("unix", path)
		if err == nil {
			err = serveList(listener, answering{list: hostileList})
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// hostileList is what authors of pods can have the kubelet answer: 27 pods of 9000 containers; the last pod has a unit.
func hostileList(context.Context) (*podresources.ListPodResourcesResponse, error) {
	answer := &podresources.ListPodResourcesResponse{}
	for i := range 27 {
		p := &podresources.PodResources{Name: fmt.Sprint("hostile-", i), Namespace: "a"}
		for n := range 9000 {
			p.Containers = append(p.Containers, &podresources.ContainerResources{Name: fmt.Sprintf("%063d", n)})
		}
		answer.PodResources = append(answer.PodResources, p)
	}
	answer.PodResources = append(answer.PodResources, &podresources.PodResources{Name: "victim", Namespace: "b",
		Containers: []*podresources.ContainerResources{{Name: "main",
			Devices: []*podresources.ContainerDevices{{ResourceName: ResourceMemory, DeviceIds: []string{"unit"}}}}}})
	return answer, nil
}

// answering is a kubelet's PodResources.
type answering struct {
	podresources.UnimplementedPodResourcesListerServer
	list func(context.Context) (*podresources.ListPodResourcesResponse, error)
}

func (a answering) List(ctx context.Context, _ *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return a.list(ctx)
}

func serveList(listener net.Listener, a answering) error {
	g := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(g, a)
	return g.Serve(listener)
}

// listAt is a plugin whose kubelet answers at a socket, which does not exist yet.
func listAt(t *testing.T) (*Plugin, string) {
	t.Helper()
	root, err := os.MkdirTemp("", "dp") // t.TempDir may be longer than a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Mkdir(filepath.Join(root, "pod-resources"), 0o700); err != nil {
		t.Fatal(err)
	}
	return &Plugin{o: Options{KubeletDir: filepath.Join(root, "device-plugins")}}, filepath.Join(root, "pod-resources", kubeletSocket)
}

// However many containers authors of pods have the kubelet list, reading them needs no more memory, and what is at the end is found.
func TestHostileListCostsNoMemory(t *testing.T) {
	p, path := listAt(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	server := exec.Command(self)
	server.Env, server.Stderr = append(os.Environ(), hostileEnv+"="+path), os.Stderr
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	})
	for !answers(path) {
		time.Sleep(10 * time.Millisecond)
	}
	debug.FreeOSMemory()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	all, err := p.list(t.Context())
	runtime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 28 || len(all["b/victim"]["main"][ResourceMemory]) != 1 {
		t.Errorf("%d pods are known, and %v of the last", len(all), all["b/victim"])
	}
	// The answer has 17 MB, and is held whole by gRPC's own client. What the heap has never shrinks.
	had := before.HeapSys - before.HeapReleased
	has := after.HeapSys - after.HeapReleased
	if has > had+6<<20 {
		t.Errorf("the heap grew from %d to %d KiB", had>>10, has>>10)
	}
}

// What is no answer is an error, and the kubelet's own word is passed on.
func TestListErrors(t *testing.T) {
	for name, c := range map[string]struct {
		list func(context.Context) (*podresources.ListPodResourcesResponse, error)
		want string
	}{
		"refused": {func(context.Context) (*podresources.ListPodResourcesResponse, error) {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit\x1b[2J")
		}, `status "8" of gRPC: "rejected by rate limit`},
		"late": {func(ctx context.Context) (*podresources.ListPodResourcesResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, "deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			p, path := listAt(t)
			listener, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			go func() { _ = serveList(listener, answering{list: c.list}) }()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			if _, err := p.list(ctx); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	t.Run("another's socket", func(t *testing.T) {
		p, path := listAt(t)
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		go func() {
			if c, err := listener.Accept(); err == nil {
				_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"))
				c.Close()
			}
		}()
		if all, err := p.list(t.Context()); err == nil {
			t.Errorf("%v", all)
		}
	})
	t.Run("nobody", func(t *testing.T) {
		p, _ := listAt(t)
		if _, err := p.list(t.Context()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%v", err)
		}
	})
}
