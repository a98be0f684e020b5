// SPDX-License-Identifier: Apache-2.0

// Package connlimit bounds the connections that an HTTP server holds, so that who sends nothing, or does not read what he is sent, keeps nobody out: where
// there are as many as may be, the oldest that nobody works for is closed for the one that comes. golang.org/x/net/netutil has who comes wait for those.
package connlimit

import (
	"context"
	"net"
	"net/http"
	"slices"
	"sync"
)

// Limit has s, not started yet, hold at most so many connections of l, and returns what s is to serve.
func Limit(s *http.Server, l net.Listener, most int) net.Listener {
	lim := &limiter{Listener: l, most: most}
	lim.changed.L = &lim.mu
	next := s.Handler
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(key{}).(*conn)
		c.count(&c.requests, 1)
		defer c.count(&c.requests, -1)
		next.ServeHTTP(w, r)
	})
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if t, ok := c.(interface{ NetConn() net.Conn }); ok { // TLS
			c = t.NetConn()
		}
		return context.WithValue(ctx, key{}, c)
	}
	return lim
}

// key finds the connection of a request.
type key struct{}

type limiter struct {
	net.Listener
	most int

	mu      sync.Mutex
	changed sync.Cond
	conns   []*conn // in the order in which they came
	closed  bool
}

// conn is a connection. It is worked for while a request of it is answered and no answer is waiting to be read.
type conn struct {
	net.Conn
	of                *limiter
	requests, writing int
}

func (l *limiter) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, of: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.closed && len(l.conns) >= l.most {
		i := slices.IndexFunc(l.conns, func(c *conn) bool { return c.requests == 0 })
		if i < 0 {
			i = slices.IndexFunc(l.conns, func(c *conn) bool { return c.writing > 0 })
		}
		if i < 0 {
			l.changed.Wait()
			continue
		}
		l.conns[i].Conn.Close()
		l.conns = slices.Delete(l.conns, i, i+1)
	}
	l.conns = append(l.conns, c)
	return c, nil
}

func (l *limiter) Close() error {
	l.mu.Lock()
	l.closed = true
	l.changed.Broadcast()
	l.mu.Unlock()
	return l.Listener.Close()
}

func (c *conn) count(what *int, by int) {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	*what += by
	c.of.changed.Broadcast()
}

func (c *conn) Write(b []byte) (int, error) {
	c.count(&c.writing, 1)
	defer c.count(&c.writing, -1)
	return c.Conn.Write(b)
}

func (c *conn) Close() error {
	c.of.mu.Lock()
	c.of.conns = slices.DeleteFunc(c.of.conns, func(o *conn) bool { return o == c })
	c.of.changed.Broadcast()
	c.of.mu.Unlock()
	return c.Conn.Close()
}
