// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/opencgpu/cgpu/pkg/connlimit"
	"github.com/opencgpu/cgpu/pkg/web"
)

// serveHealth answers /healthz, /readyz, /metrics, unless it is off /v1/smi, and where it is on /web/ until stop. It has no profiles and
// takes nothing in; answers are made one at a time, and few wait or watch the page, so that who may reach the port can cost the agent
// little.
func serveHealth(address string, a *agent) (stop func(), err error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("agent: --health-address %q: %w: want a free address such as :9470 or 127.0.0.1:9470", address, err)
	}
	s := &http.Server{Handler: healthHandler(a), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second,
		WriteTimeout: 20 * time.Second,
		IdleTimeout:  30 * time.Second, MaxHeaderBytes: 8 << 10}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(connlimit.Limit(s, l, 32))
	}()
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.Shutdown(ctx)
		_ = s.Close()
		<-done
	}, nil
}

func healthHandler(a *agent) http.Handler {
	mux := http.NewServeMux()
	verdict := func(path string, ask func() error) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			if err := ask(); err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				fmt.Fprintln(w, tidy(err.Error(), 1024))
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	verdict("/healthz", a.alive)
	verdict("/readyz", a.ready)
	if a.SMI {
		mux.Handle("GET /v1/smi", ownHosts(smi(a.RunDir)))
	}
	if a.page != nil {
		mux.Handle("GET /web/", http.StripPrefix("/web", a.page))
	}
	figures := kept(func() ([]byte, error) {
		var text bytes.Buffer
		if err := a.metrics.write(&text); err != nil {
			a.Log.Warn("metrics", "err", err)
		}
		return text.Bytes(), nil
	})
	mux.Handle("GET /metrics", ownHosts(func(w http.ResponseWriter, _ *http.Request) {
		text, _ := figures()
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = w.Write(text)
	}))
	return mux
}

// ownHosts: who asks from this machine, as through kubectl port-forward, may be a browser, in which another site's name can lead here
// (DNS rebinding).
func ownHosts(h http.HandlerFunc) http.Handler {
	checked := web.ForHosts(h, nil)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if peer, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && peer.Addr().Unmap().IsLoopback() {
			checked.ServeHTTP(w, r)
			return
		}
		h.ServeHTTP(w, r)
	})
}
