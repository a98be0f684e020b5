// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// probed starts the socket of an agent that is alive and ready.
func probed(t *testing.T) (*agent, string) {
	t.Helper()
	a := &agent{Options: Options{Log: silent}, metrics: NewMetrics()}
	a.looked.Store(time.Now())
	a.state = State{Table: tableOf("", device.GPU{})}
	name := ProbeSocket(t.Name(), "uid")
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		serveProbe(ctx, name, a)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if c, err := net.Dial("unix", name); err == nil {
			c.Close()
			return a, name
		}
		if time.Now().After(deadline) {
			t.Fatal("nobody listens")
		}
	}
}

func TestProbe(t *testing.T) {
	a, name := probed(t)
	ask := func(wantAlive, wantReady string) {
		t.Helper()
		alive, ready := AskProbe(name)
		for _, v := range []struct {
			got  error
			want string
		}{{alive, wantAlive}, {ready, wantReady}} {
			if v.want == "" && v.got != nil || v.want != "" && (v.got == nil || !strings.Contains(v.got.Error(), v.want)) {
				t.Errorf("%v, want %q", v.got, v.want)
			}
		}
	}
	ask("", "")
	a.mu.Lock()
	a.state.Fronts = []FrontState{{Name: "dra", Err: errors.New("no kubelet\x1b")}}
	a.mu.Unlock()
	ask("", "dra: no kubelet?")
	a.looked.Store(time.Now().Add(-stuck - time.Second))
	ask("has not looked", "no kubelet")
	if alive, ready := AskProbe(ProbeSocket(t.Name(), "another")); alive == nil || ready == nil ||
		!strings.Contains(alive.Error(), "--pod-uid") {
		t.Errorf("%v, %v", alive, ready)
	}
}

// Whoever connects to the port or to the socket and says nothing keeps nobody from being answered.
func TestProbeBesideSilentConnections(t *testing.T) {
	a, name := probed(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	stop, err := serveHealth(address, a)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for range 600 { // of which 32 are served at a time
		for network, to := range map[string]string{"tcp": address, "unix": name} {
			c, err := net.Dial(network, to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
	}
	client := http.Client{Timeout: time.Minute} // less than if each had to wait for those before, who have 5 s
	r, err := client.Get("http://" + address + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	if alive, ready := AskProbe(name); alive != nil || ready != nil { // it does not wait for long
		t.Errorf("%v, %v", alive, ready)
	}
}

// Another user is told nothing, and a socket of another user's is not believed.
func TestProbeOfOthers(t *testing.T) {
	if name := os.Getenv("CGPU_TEST_ASK"); name != "" { // as that user, below
		if alive, _ := AskProbe(name); alive == nil || !strings.Contains(alive.Error(), "user 0's") {
			t.Fatalf("%v", alive)
		}
		c, err := net.Dial("unix", name)
		if err != nil {
			t.Fatal(err)
		}
		if n, _ := c.Read(make([]byte, 16)); n > 0 {
			t.Fatal("was told something")
		}
		return
	}
	testenv.NeedsRoot(t, "another user's process")
	_, name := probed(t)
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	// Where that user may run it.
	dir, err := os.MkdirTemp("/tmp", "probe")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(dir+"/t", text, 0o755)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(dir+"/t", "-test.run=^TestProbeOfOthers$")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGPU_TEST_ASK="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
