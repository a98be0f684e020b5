// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestWebAddress: it listens on 127.0.0.1, and localhost is [::1] first, where anybody may listen.
func TestWebAddress(t *testing.T) {
	page, err := os.ReadFile("../../docs/web.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{cgpu("web --help"), string(page)} {
		if strings.Contains(text, "localhost:") || !strings.Contains(text, "ssh -L 9472:127.0.0.1:9472") {
			t.Errorf("sends people to whoever listens on [::1]: %s", text)
		}
	}
}

// TestWeb: the command serves the page and its events until it is told to end, to hosts that it is called by, and refuses to tell
// strangers.
func TestWeb(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: strings.Repeat("a", 64), Name: "web-1",
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 6 * quota.GiB}}}})
	nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, nodetest.Status(r)))
	socket := filepath.Join(n.Dir, "w.sock")
	ctx, cancel := context.WithCancel(context.Background())
	a := app()
	a.Writer, a.ErrWriter = io.Discard, io.Discard
	done := make(chan error, 1)
	go func() {
		done <- a.RunContext(ctx, []string{"cgpu", "web", "--listen", "unix:" + socket, "--host", "gpu.example"})
	}()
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn,
		error) {
		return net.Dial("unix", socket)
	}}}
	defer client.CloseIdleConnections()
	get := func(url string) *http.Response {
		for range 3000 {
			if answer, err := client.Get(url); err == nil {
				return answer
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatal("does not serve")
		return nil
	}
	for url, want := range map[string]int{"http://localhost/": 200, "http://gpu.example/page.js": 200, "http://evil.example/": 421} {
		answer := get(url)
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("%s: %d, want %d", url, answer.StatusCode, want)
		}
	}
	answer := get("http://localhost/events")
	defer answer.Body.Close()
	events := bufio.NewReader(answer.Body)
	for text := ""; !strings.Contains(text, `"name":"web-1"`); {
		var err error
		if text, err = events.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := io.Copy(io.Discard, events); err != nil {
		t.Error("a viewer is cut off: ", err)
	}
	b := app()
	b.Writer, b.ErrWriter = io.Discard, io.Discard
	err := run(b, []string{"cgpu", "web", "--listen", ":0"})
	if _, usage := errors.AsType[usageError](err); !usage || !strings.Contains(err.Error(), "web: --listen") ||
		!strings.Contains(err.Error(), "others reach it") {
		t.Error(err)
	}
}
