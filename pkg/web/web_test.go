// SPDX-License-Identifier: Apache-2.0

package web

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// evil are names that tenants would choose. fine is what must be read of them.
var evil = []string{
	"<img src=x onerror=alert(1)>", "</script><script>document.title='taken'</script>", "\x1b[2Ja\nb\rc\x00", "\u202egnp.exe",
	"שלום עולם", "模型服务器",
	strings.Repeat("W", 256), strings.Repeat("a\u0301", 128), "&lt;b&gt; &amp;", "", "\xff\xfe", "${state.host} `x` \\u003c",
	"data: x\n\nevent: state\ndata: {}",
}

// nodeOf makes a node whose two GPUs are shared by so many containers, at a time since it was first looked at.
func nodeOf(n int, at time.Duration) snapshot.View {
	v := snapshot.View{Driver: device.DriverSim, DriverVersion: "580.159.04"}
	for i, name := range []string{"Tesla T4", "NVIDIA A10"} {
		v.GPUs = append(v.GPUs, snapshot.GPU{Index: i, UUID: fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i), Name: name,
			Total: 24 * quota.GiB, Policy: "weight", MaxInst: 64})
	}
	for i := range n {
		g := &v.GPUs[i%2]
		// What is got swings about a share.
		share, turn := 0.9/max(float64(n)/2, 1), (8+float64(i%7)*3)*60
		got := share * (at.Seconds() - 0.6*turn/2/math.Pi*math.Cos(2*math.Pi*at.Seconds()/turn+float64(i)))
		limit := quota.Bytes(i%5+1) * quota.GiB / 2
		x := snapshot.VGPU{ID: fmt.Sprintf("%064x", i+1), Nonce: fmt.Sprint(i), Name: fmt.Sprintf("job-%d", i),
			State: snapshot.StateRunning, Answered: true,
			Slice:   quota.Slice{Limit: limit, Share: quota.Share{Weight: i%4 + 1, Priority: quota.PriorityDefault}},
			Used:    limit * quota.Bytes(i%11) / 10,
			Compute: &api.ComputeStatus{Exact: true, GPUTime: time.Hour + time.Duration(got*1e9), Granted: time.Duration(share * float64(at))}}
		switch i % 9 {
		case 3:
			x.State, x.Answered, x.Compute = snapshot.StateGuardDead, false, nil
		case 5:
			x.Paused, x.Percent, x.Denied = true, 25, 3
		case 7:
			x.Spill, x.Spilled, x.Enforcement = quota.GiB, quota.GiB/3, device.EnforcePreload
		}
		g.Reserved += limit
		g.Used += x.Used
		g.VGPUs = append(g.VGPUs, x)
	}
	return v
}

// hourLater is a page that has looked for an hour.
func hourLater(look func(at time.Duration) snapshot.View) *Page {
	p := New(Options{Host: "gpu1", Version: "1.0"})
	now := time.Now()
	for at := time.Duration(0); at <= time.Hour; at += step {
		p.add(now.Add(at-time.Hour), look(at), nil)
	}
	return p
}

func get(t *testing.T, h http.Handler, path, host string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // an event, and no more
	r := httptest.NewRequestWithContext(ctx, "GET", path, nil)
	r.Host = host
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// TestHost: a page of somebody else's, whose name leads here, is refused; so are other methods and paths, and nothing is told to frames.
func TestHost(t *testing.T) {
	p := New(Options{Names: []string{"gpu1", "gpu1.example.com", ""}})
	for host, want := range map[string]int{
		"127.0.0.1:9472": 200, "localhost": 200, "LOCALHOST:80": 200, "localhost.": 200, "[::1]:9472": 200, "10.1.2.3": 200, "gpu1:9472": 200,
		"GPU1.example.com": 200,
		"evil.example":     421, "evil.example:9472": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421, "": 421,
		"gpu1.": 200, "gpu": 421,
	} {
		for _, path := range []string{"/", "/page.js"} {
			if got := get(t, p, path, host); got.Code != want {
				t.Errorf("%q for %s: %d, want %d", host, path, got.Code, want)
			} else if policy := got.Header().Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") ||
				!strings.Contains(policy, "frame-ancestors 'none'") || strings.Contains(policy, "unsafe") {
				t.Errorf("policy %q", policy)
			}
		}
	}
	for path, want := range map[string]int{"/page.css": 200, "/icon.svg": 200, "/web.go": 404, "/../web.go": 404, "/debug/pprof/": 404} {
		if got := get(t, p, path, "localhost"); got.Code != want && got.Code != http.StatusTemporaryRedirect &&
			got.Code != http.StatusMovedPermanently {
			t.Errorf("%s: %d, want %d", path, got.Code, want)
		}
	}
	r := httptest.NewRequest("POST", "http://localhost/", nil)
	w := httptest.NewRecorder()
	p.ServeHTTP(w, r)
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
	for from, want := range map[string]int{"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200, "": 200} {
		if got := get(t, p, "/events", "localhost", "Sec-Fetch-Site", from); got.Code != want {
			t.Errorf("events from %q: %d, want %d", from, got.Code, want)
		}
	}
	for origin, want := range map[string]int{"http://evil.example": 403, "http://localhost:3000": 403, "null": 403, "http://localhost": 200} {
		if got := get(t, p, "/events", "localhost", "Origin", origin); got.Code != want {
			t.Errorf("events from the origin %q: %d, want %d", origin, got.Code, want)
		}
	}
}

// TestHead: a request that is never answered with a line takes no place. Its viewer, who has sent another one and gone, would have it for
// ever.
func TestHead(t *testing.T) {
	s := httptest.NewServer(New(Options{}))
	defer s.Close()
	answer, err := http.Head(s.URL + "/events")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("HEAD: %d", answer.StatusCode)
	}
}

// event is what a page reads.
type event struct{ kind, data string }

func read(t *testing.T, r *bufio.Reader) (e event) {
	t.Helper()
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		switch key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": "); key {
		case "event":
			e.kind = value
		case "data":
			e.data += value
		case "":
			return e
		default:
			t.Fatalf("line %q", line)
		}
	}
}

// TestEvents: each look is told at once, names are data, and what is secret is not told.
func TestEvents(t *testing.T) {
	p := New(Options{Host: "gpu1"})
	v := nodeOf(len(evil), 0)
	for i := range v.GPUs {
		for j := range v.GPUs[i].VGPUs {
			x := &v.GPUs[i].VGPUs[j]
			x.Name, x.Nonce = evil[i+2*j], fmt.Sprintf("secret-%d-%d", i, j)
			x.Processes = []snapshot.Process{{PID: 4711, Name: "secret"}}
		}
	}
	p.add(time.Now(), v, nil)
	s := httptest.NewServer(p)
	defer s.Close()
	answer, err := http.Get(s.URL + "/events")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	r := bufio.NewReader(answer.Body)
	first, second := read(t, r), read(t, r)
	if first.kind != "state" || second.kind != "hour" || strings.Contains(first.data+second.data, "secret") {
		t.Errorf("%.200v, %.200v", first, second)
	}
	var got state
	if err := json.Unmarshal([]byte(first.data), &got); err != nil {
		t.Fatal(err)
	}
	if got.GPUs[0].VGPUs[0].Name != evil[0] || got.GPUs[1].VGPUs[1].Name != "?gnp.exe" || len(got.GPUs[0].VGPUs) != 7 {
		t.Errorf("%+v", got.GPUs)
	}
	p.add(time.Now(), snapshot.View{}, errors.New("no\nledger"))
	if e := read(t, r); e.kind != "state" || !strings.Contains(e.data, `"error":"no?ledger"`) {
		t.Errorf("%+v", e)
	}
}

// TestViewers: so many at a time, whose places are given back, and all are let go at the end.
func TestViewers(t *testing.T) {
	p := New(Options{})
	ctx, stop := context.WithCancel(context.Background())
	p.Look = func() (snapshot.View, error) { return nodeOf(1, 0), nil }
	ran := make(chan struct{})
	go func() { p.Run(ctx); close(ran) }()
	s := httptest.NewServer(p)
	defer s.Close()
	var readers []*bufio.Reader
	var leave context.CancelFunc
	for i := range maxViewers {
		c, cancel := context.WithCancel(context.Background())
		defer cancel()
		r, err := http.NewRequestWithContext(c, "GET", s.URL+"/events", nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil || answer.StatusCode != 200 {
			t.Fatal(i, answer, err)
		}
		defer answer.Body.Close()
		readers = append(readers, bufio.NewReader(answer.Body))
		read(t, readers[i])
		leave = cancel
	}
	ask := func() int {
		answer, err := http.Get(s.URL + "/events")
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	if got := ask(); got != http.StatusServiceUnavailable {
		t.Errorf("one too many: %d", got)
	}
	leave()
	for i := 0; ask() != 200; i++ {
		if i == 3000 {
			t.Fatal("the place of one who left is not free")
		}
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	<-ran
	for {
		if _, err := readers[0].ReadString('\n'); err != nil {
			return
		}
	}
}

// TestSize: what 64 containers cost a viewer.
func TestSize(t *testing.T) {
	p := hourLater(func(at time.Duration) snapshot.View { return nodeOf(64, at) })
	if len(p.state) > 64<<10 || len(p.hour) > 512<<10 {
		t.Errorf("a look has %d bytes, the hour %d", len(p.state), len(p.hour))
	}
	t.Logf("a look has %d bytes, the hour %d", len(p.state), len(p.hour))
	var h hour
	if err := json.Unmarshal(p.hour, &h); err != nil || len(h.Lines) != 66 || len(h.Lines[1].Got) != points {
		t.Errorf("%d lines of %d, %v", len(h.Lines), len(h.Lines[1].Got), err)
	}
}
