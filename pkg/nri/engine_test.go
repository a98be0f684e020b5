// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	validator "github.com/containerd/nri/plugins/default-validator/builtin"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
)

// engine is NRI as containerd and CRI-O have it: their own library, without the engine around it.
func engine(t *testing.T, socket string, options ...adaptation.Option) *adaptation.Adaptation {
	return engineOf(t, socket, nil, options...)
}

// engineOf has containers when it starts.
func engineOf(t *testing.T, socket string, containers []*api.Container, options ...adaptation.Option) *adaptation.Adaptation {
	t.Helper()
	synchronize := func(ctx context.Context, cb adaptation.SyncCB) error {
		_, err := cb(ctx, nil, containers)
		return err
	}
	update := func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
		return nil, nil
	}
	dir := t.TempDir()
	options = append(options, adaptation.WithSocketPath(socket), adaptation.WithPluginPath(dir), adaptation.WithPluginConfigPath(dir))
	e, err := adaptation.New("test", "1", synchronize, update, options...)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	return e
}

// relay takes connections on to a socket, until cut ends those that there are.
func relay(t *testing.T, from, to string) (cut func()) {
	t.Helper()
	l, err := net.Listen("unix", from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	var mu sync.Mutex
	var all []net.Conn
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("unix", to)
			if err != nil {
				in.Close()
				continue
			}
			mu.Lock()
			all = append(all, in, out)
			mu.Unlock()
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					_, _ = io.Copy(way[0], way[1])
					way[0].Close()
				}()
			}
		}
	}()
	return func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range all {
			c.Close()
		}
		all = nil
	}
}

// ask is a container that the engine creates; what NRI makes of its spec is in the answer.
func ask(e *adaptation.Adaptation, annotations map[string]string) ([]*api.Hook, error) {
	r, err := e.CreateContainer(context.Background(), &adaptation.CreateContainerRequest{
		Pod:       &api.PodSandbox{Id: "sandbox", Namespace: "ns", Name: "pod", Uid: "u1", Annotations: annotations},
		Container: &api.Container{Id: "id", PodSandboxId: "sandbox", Name: "main"}})
	return r.GetAdjust().GetHooks().GetCreateRuntime(), err
}

// Through the engine a container gets its share, or is not created; when the engine comes back, so does the plugin; and without the plugin
// nobody gets anything.
func TestEngine(t *testing.T) {
	h, server := newPlugin(t, "hami", decisions["hami"])
	o := h.p.o
	socket := filepath.Join(t.TempDir(), "nri.sock")
	e := engine(t, socket)
	cut := relay(t, socket+".relay", socket)
	o.Socket, o.Table = socket+".relay", tableOf(device.PodsAllocated)
	p, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	healthy := func() {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); p.Healthy() != nil; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(p.Healthy())
			}
		}
	}
	healthy()
	given := func() {
		t.Helper()
		hooks, err := ask(e, decisions["hami"])
		if err != nil || len(hooks) != 1 {
			t.Fatalf("%v, %v", hooks, err)
		}
		if s, ours, err := alloc.FromHookArgs(hooks[0].Args); err != nil || !ours || s.UUID != gpu0 {
			t.Errorf("%+v, %v", s, err)
		}
	}
	given()
	if hooks, err := ask(e, nil); err != nil || hooks != nil {
		t.Errorf("a pod without a decision: %v, %v", hooks, err)
	}
	policy := policyPath + "scheduler-hami.cgpu.io"
	kept := server.objects[policy]
	delete(server.objects, policy)
	if hooks, err := ask(e, decisions["hami"]); err == nil || hooks != nil || !strings.Contains(err.Error(), "is missing") {
		t.Errorf("without the policy: %v, %v", hooks, err)
	}
	if err := p.Healthy(); err == nil || !strings.Contains(err.Error(), "is missing") {
		t.Errorf("without the policy it is healthy: %v", err)
	}
	server.objects[policy] = kept

	// The engine's end is that of the connection.
	cut()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if hooks, err := ask(e, decisions["hami"]); err == nil && len(hooks) == 1 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%v, %v, %v", hooks, err, p.Healthy())
		}
	}
	healthy()
	p.Stop()
	// The engine may notice only by a request, which then fails.
	if hooks, _ := ask(e, decisions["hami"]); hooks != nil {
		t.Errorf("without the plugin: %v", hooks)
	}
	if hooks, err := ask(e, decisions["hami"]); err != nil || hooks != nil {
		t.Errorf("without the plugin: %v, %v", hooks, err)
	}
}

// An engine that cannot send all of its containers, because their environments are too large, does not take the plugin in, which at no time
// says that it serves.
func TestLargeEnvironments(t *testing.T) {
	h, _ := newPlugin(t, "hami", decisions["hami"])
	var log lockedBuffer
	o := h.p.o
	o.Socket, o.Table, o.Log = filepath.Join(t.TempDir(), "nri.sock"), tableOf(device.PodsAllocated), slog.New(slog.NewTextHandler(&log, nil))
	var containers []*api.Container
	for i := range 8 { // of more, and fewer pods than that, NRI 0.12 panics
		containers = append(containers, &api.Container{Id: fmt.Sprint(i), Env: []string{"A=" + strings.Repeat("x", 1200<<10)}})
	}
	engineOf(t, o.Socket, containers)
	p, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	told := func() bool { return strings.Contains(log.String(), "very large environments") }
	for deadline := time.Now().Add(time.Minute); !told(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%v:\n%s", p.Healthy(), log.String())
		}
	}
	if err := p.Healthy(); err == nil || strings.Contains(log.String(), "connected to the engine") {
		t.Errorf("healthy: %v\n%s", err, log.String())
	}
}

// lockedBuffer is what several write into.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// An engine that is told so creates no container without the plugin.
func TestRequiredPlugin(t *testing.T) {
	h, _ := newPlugin(t, "hami", decisions["hami"])
	o := h.p.o
	o.Socket, o.Table = filepath.Join(t.TempDir(), "nri.sock"), tableOf(device.PodsAllocated)
	required := &validator.DefaultValidatorConfig{Enable: true, RequiredPlugins: []string{"cgpu"}}
	e := engine(t, o.Socket, adaptation.WithDefaultValidator(required))
	if hooks, err := ask(e, nil); err == nil {
		t.Errorf("without the plugin: %v", hooks)
	}
	p, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	for deadline := time.Now().Add(time.Minute); p.Healthy() != nil && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	if hooks, err := ask(e, decisions["hami"]); err != nil || len(hooks) != 1 {
		t.Errorf("with it: %v, %v", hooks, err)
	}
}
