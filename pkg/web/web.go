// SPDX-License-Identifier: Apache-2.0

// Package web is the page of `cgpu web` and of cgpu-agent: the node's GPUs, who shares them, and what each got in the last hour. It looks
// at the node by itself, so what it costs does not depend on who looks at the page, and it changes nothing.
package web

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/history"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

const (
	interval = 2 * time.Second // between looks
	step     = 10 * time.Second
	points   = 360 // an hour
	// maxViewers are told of each look; others are told to come again.
	maxViewers = 16
	// patience is for a viewer who does not read.
	patience = 10 * time.Second
)

//go:embed page
var files embed.FS

// Options of New.
type Options struct {
	// Host is what the node is called on the page.
	Host    string
	Version string
	Names   []string // for ForHosts
	Look    func() (snapshot.View, error)
}

// Page is an http.Handler. Run must run for it to show anything.
type Page struct {
	Options
	mux http.ServeMux

	mu      sync.Mutex
	past    *history.History
	state   []byte // the last look, as JSON
	hour    []byte // history, as JSON
	hours   int    // how often it was made
	step    time.Time
	changed chan struct{} // closed at the next look
	viewers int
	over    bool
}

// New makes a page.
func New(o Options) *Page {
	p := &Page{Options: o, past: history.New(step, points), changed: make(chan struct{})}
	page, err := fs.Sub(files, "page")
	if err != nil {
		panic(err) // it is in the program
	}
	p.mux.Handle("GET /", http.FileServerFS(page))
	p.mux.HandleFunc("GET /events", p.events)
	return p
}

// policy lets the page load its own script, style and icon and nothing else, and be nobody's frame.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; " +
	"form-action 'none'; " +
	"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	ForHosts(&p.mux, p.Names).ServeHTTP(w, r)
}

// ForHosts answers requests for addresses, localhost and the hosts that are named. Another's is refused: a page of somebody else's, whose
// name is made to lead here (DNS rebinding), could read what a browser sees.
func ForHosts(h http.Handler, names []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !known(r.Host, names) {
			http.Error(w, "not called so: use an address or localhost, or start it with --host", http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// known: the host of a request is one of ours. An address is nobody else's name.
func known(host string, names []string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(host, ".")
	if strings.EqualFold(host, "localhost") || net.ParseIP(strings.Trim(host, "[]")) != nil {
		return true
	}
	for _, n := range names {
		if n != "" && strings.EqualFold(host, n) {
			return true
		}
	}
	return false
}

// Run looks at the node until ctx ends. Then it takes leave of the viewers.
func (p *Page) Run(ctx context.Context) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		v, err := p.Look()
		p.add(time.Now(), v, err)
		select {
		case <-tick.C:
		case <-ctx.Done():
			p.mu.Lock()
			defer p.mu.Unlock()
			p.over = true
			close(p.changed)
			p.changed = make(chan struct{})
			return
		}
	}
}

// add takes a look, and tells the viewers.
func (p *Page) add(at time.Time, v snapshot.View, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := state{Host: p.Host, Version: p.Version, At: at}
	if err != nil {
		s.Error = text(err.Error())
	} else {
		p.past.Add(at, v)
		p.describe(&s, v)
		if p.hours == 0 || at.Sub(p.step) >= step {
			p.hours, p.step, p.hour = p.hours+1, at, encode(p.hourOf(v))
		}
	}
	p.state = encode(s)
	close(p.changed)
	p.changed = make(chan struct{})
}

func encode(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // of our own types
	}
	return text
}

// events tells of each look, and every ten seconds of the last hour, as server-sent events.
func (p *Page) events(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet { // HEAD: nothing would ever be written, and so a viewer who has gone not be noticed
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	if elsewhere(r) {
		http.Error(w, "for this page only", http.StatusForbidden)
		return
	}
	if !p.enter() {
		w.Header().Set("Retry-After", "10")
		http.Error(w, fmt.Sprintf("%d others look at it", maxViewers), http.StatusServiceUnavailable)
		return
	}
	defer p.leave()
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Time{}) // the server's is for requests
	w.Header().Set("Content-Type", "text/event-stream")
	hours := 0
	for {
		p.mu.Lock()
		state, hour, made, changed, over := p.state, p.hour, p.hours, p.changed, p.over
		p.mu.Unlock()
		if over {
			return
		}
		var b bytes.Buffer
		if state != nil {
			fmt.Fprintf(&b, "event: state\ndata: %s\n\n", state)
		}
		if made > hours {
			hours = made
			fmt.Fprintf(&b, "event: hour\ndata: %s\n\n", hour)
		}
		if c.SetWriteDeadline(time.Now().Add(patience)) != nil {
			return
		}
		if _, err := w.Write(b.Bytes()); err != nil || c.Flush() != nil {
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// elsewhere: another site's page asks. It could not read the events, but take the viewers' places. Without TLS browsers send no
// Sec-Fetch-Site but to localhost; an EventSource of another site's has its origin.
func elsewhere(r *http.Request) bool {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	if site != "" {
		return site != "same-origin" && site != "none"
	}
	_, host, _ := strings.Cut(origin, "://")
	return origin != "" && !strings.EqualFold(host, r.Host)
}

func (p *Page) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.viewers >= maxViewers {
		return false
	}
	p.viewers++
	return true
}

func (p *Page) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.viewers--
}
