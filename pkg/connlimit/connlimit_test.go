// SPDX-License-Identifier: Apache-2.0

package connlimit

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// serve serves until the test's end, without any time limit.
func serve(t *testing.T, most int, secure bool, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Listener = Limit(s.Config, s.Listener, most)
	if secure {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

func get(t *testing.T, s *httptest.Server, path string) {
	t.Helper()
	answer, err := s.Client().Get(s.URL + path)
	if err != nil {
		t.Error(err)
		return
	}
	defer answer.Body.Close()
	if text, err := io.ReadAll(answer.Body); err != nil || string(text) != "ok" {
		t.Errorf("%q, %v", text, err)
	}
}

func dial(t *testing.T, s *httptest.Server, send string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, send); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestSilent: who says nothing, half of a request, or nothing more after one keeps nobody out.
func TestSilent(t *testing.T) {
	for _, secure := range []bool{false, true} {
		s := serve(t, 2, secure, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
		for _, text := range []string{"", "", "GET", "GET / HTTP/1.1\r\nHost: x\r\n", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03"} {
			for range 3 {
				dial(t, s, text)
			}
			get(t, s, "/")
		}
	}
}

// TestWorkGoesOn: a request that is being answered is not ended for who comes. He waits.
func TestWorkGoesOn(t *testing.T) {
	begun, goOn := make(chan struct{}), make(chan struct{})
	s := serve(t, 2, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			begun <- struct{}{}
			<-goOn
		}
		_, _ = io.WriteString(w, "ok")
	})
	var slow sync.WaitGroup
	for range 2 {
		slow.Go(func() { get(t, s, "/slow") })
		<-begun
	}
	for range 5 {
		dial(t, s, "GET")
	}
	var late sync.WaitGroup
	late.Go(func() { get(t, s, "/") })
	close(goOn)
	slow.Wait()
	late.Wait()
}

// TestDoesNotRead: whose answer is not read is not worked for.
func TestDoesNotRead(t *testing.T) {
	begun := make(chan struct{}, 2)
	s := serve(t, 2, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			begun <- struct{}{}
			_, _ = w.Write(make([]byte, 64<<20))
			return
		}
		_, _ = io.WriteString(w, "ok")
	})
	for range 2 {
		dial(t, s, "GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
		<-begun
	}
	get(t, s, "/")
}

// TestClose: who waits for a place is let go at the end.
func TestClose(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	lim := Limit(&http.Server{}, l, 1)
	for range 2 {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	first, err := lim.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c, _ := first.(*conn)
	c.count(&c.requests, 1)
	ended := make(chan error)
	go func() {
		for {
			if _, err := lim.Accept(); err != nil {
				ended <- err
				return
			}
		}
	}()
	lim.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
