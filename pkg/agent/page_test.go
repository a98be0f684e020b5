// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/web"
)

// TestPage: the page is at the port where it is asked for, with what keeps it there: requests by an address or localhost alone, nobody's
// frame, nothing to write, so many viewers; and what others ask the port is as ever.
func TestPage(t *testing.T) {
	n := nodetest.New(t)
	serve := func(page *web.Page) *httptest.Server {
		a := &agent{Options: Options{Log: silent, RunDir: n.Dir, SMI: true}, metrics: NewMetrics(), page: page}
		a.looked.Store(time.Now())
		s := httptest.NewServer(healthHandler(a))
		t.Cleanup(s.Close)
		return s
	}
	page := pageOf(Options{Node: "node-1", RunDir: n.Dir})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		page.Run(ctx)
	}()
	off, on := serve(nil), serve(page)
	ask := func(s *httptest.Server, method, path, host string, code int) *http.Response {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if host != "" {
			r.Host = host
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { answer.Body.Close() })
		if answer.StatusCode != code {
			t.Errorf("%s %s for %q: %d, want %d", method, path, host, answer.StatusCode, code)
		}
		return answer
	}
	ask(off, "GET", "/web/", "", http.StatusNotFound)
	ask(off, "GET", "/v1/smi", "evil.example", http.StatusMisdirectedRequest) // by a browser here
	ask(off, "GET", "/metrics", "localhost:9470", 200)
	if policy := ask(on, "GET", "/web/", "", 200).Header.Get("Content-Security-Policy"); !strings.Contains(policy, "frame-ancestors 'none'") {
		t.Errorf("policy %q", policy)
	}
	ask(on, "GET", "/web/page.js", "localhost:9470", 200)
	ask(on, "GET", "/web/../page.go", "", http.StatusNotFound)
	for _, path := range []string{"/web/", "/web/events"} {
		ask(on, "GET", path, "evil.example", http.StatusMisdirectedRequest)
		ask(on, "POST", path, "", http.StatusMethodNotAllowed)
	}
	ask(on, "GET", "/healthz", "cgpu-agent.example", 200)

	events := bufio.NewScanner(ask(on, "GET", "/web/events", "", 200).Body)
	for events.Scan() && !strings.HasPrefix(events.Text(), "data: ") {
	}
	if text := events.Text(); !strings.Contains(text, `"host":"node-1"`) || !strings.Contains(text, nodetest.T4) {
		t.Errorf("%s, %v", text, events.Err())
	}
	for range 15 {
		ask(on, "GET", "/web/events", "", 200)
	}
	ask(on, "GET", "/web/events", "", http.StatusServiceUnavailable)
	ask(on, "GET", "/metrics", "", 200)
	stop() // the agent ends, and its viewers are told
	<-ended
	for events.Scan() {
	}
	if err := events.Err(); err != nil {
		t.Error(err)
	}
}
