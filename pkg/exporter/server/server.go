// SPDX-License-Identifier: Apache-2.0

// Package server is what `cgpu exporter` and `cgpu web` answer by: it bounds who may ask and what that costs. cgpu-agent has a server of
// its own, and must not link this one: exporter-toolkit brings text/template, with which the linker keeps all of Kubernetes' types.
package server

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/exporter-toolkit/web"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/connlimit"
)

// Options of Serve.
type Options struct {
	// Listen is HOST:PORT, or unix: and a path.
	Listen string
	// WebConfig is a file of exporter-toolkit's, for TLS, certificates of clients and passwords; empty: none.
	WebConfig string
	// TokenFile has a token that a request must bear; empty: none is asked for.
	TokenFile string
	// Insecure lets everybody who reaches a port of the network ask.
	Insecure bool
	Log      *slog.Logger
}

const (
	// maxScrapes at a time are answered, others with 503; maxConnections are held, of which each may have maxStreams requests with HTTP/2: an
	// answer that nobody reads waits in memory.
	maxScrapes     = 4
	maxConnections = 32
	maxStreams     = 4
	scrapeTimeout  = 10 * time.Second
	maxBody        = 4 << 10
	maxToken       = 4 << 10
	// leastToken keeps out what can be guessed, such as an empty file.
	leastToken = 16
)

// Check refuses what would tell more than its author may think.
func (o Options) Check() error {
	if path, ok := strings.CutPrefix(o.Listen, "unix:"); ok {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("--listen %q: want an absolute path behind the colon", o.Listen)
		}
	} else if host, _, err := net.SplitHostPort(o.Listen); err != nil {
		return fmt.Errorf("--listen %q: want HOST:PORT, or unix: and a path", o.Listen)
	} else if !local(host) && o.TokenFile == "" && !o.Insecure && !asksWho(o.WebConfig) {
		return fmt.Errorf("--listen %q: others reach it, and it tells names of containers and what they use: want --token-file, --web-config "+
			"with users or clients' certificates, or --insecure", o.Listen)
	}
	if o.WebConfig != "" {
		if err := web.Validate(o.WebConfig); err != nil {
			return fmt.Errorf("--web-config %q: %w", o.WebConfig, err)
		}
	}
	if o.TokenFile != "" {
		if _, err := token(o.TokenFile); err != nil {
			return err
		}
	}
	return nil
}

// asksWho reports that a file of exporter-toolkit's asks for a password or a client's certificate. What cannot be read does not.
func asksWho(webConfig string) bool {
	var c struct {
		Users map[string]string `yaml:"basic_auth_users"`
		TLS   struct {
			ClientAuth string `yaml:"client_auth_type"`
		} `yaml:"tls_server_config"`
	}
	b, err := os.ReadFile(webConfig)
	return err == nil && yaml.Unmarshal(b, &c) == nil && (len(c.Users) > 0 || c.TLS.ClientAuth == "RequireAndVerifyClientCert")
}

// Anonymous: this machine's browsers reach it, and nobody is asked who he is.
func (o Options) Anonymous() bool {
	host, _, err := net.SplitHostPort(o.Listen)
	return err == nil && local(host) && o.TokenFile == "" && !asksWho(o.WebConfig)
}

// local: only this machine reaches the address.
func local(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Serve answers by h until ctx ends. ready, if not nil, is told where.
func Serve(ctx context.Context, h http.Handler, o Options, ready func(net.Addr)) error {
	if err := o.Check(); err != nil {
		return err
	}
	l, err := listen(o.Listen)
	if err != nil {
		return fmt.Errorf("--listen %q: %w", o.Listen, err)
	}
	if ready != nil {
		ready(l.Addr())
	}
	s := &http.Server{Handler: http.MaxBytesHandler(o.authorized(h), maxBody), ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout: 5 * time.Second, WriteTimeout: 2 * scrapeTimeout, IdleTimeout: 10 * time.Second,
		// whoever reaches the port may make errors
		MaxHeaderBytes: 8 << 10, HTTP2: &http.HTTP2Config{MaxConcurrentStreams: maxStreams}, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	stop := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.Shutdown(ctx)
		_ = s.Close()
	})
	defer stop()
	err = web.Serve(connlimit.Limit(s, l, maxConnections), s, &web.FlagConfig{WebConfigFile: &o.WebConfig}, o.Log)
	if errors.Is(err, http.ErrServerClosed) && ctx.Err() != nil {
		return nil
	}
	return err
}

// listen makes a socket that root alone may connect to, in the place of one that nobody listens at.
func listen(address string) (net.Listener, error) {
	path, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		return net.Listen("tcp", address)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		if conn, err := net.Dial("unix", path); err == nil {
			conn.Close()
			return nil, errors.New("somebody listens there")
		}
		_ = os.Remove(path)
	}
	old := unix.Umask(0o177)
	defer unix.Umask(old)
	return net.Listen("unix", path)
}

// Metrics answers at /metrics, and at /healthz.
func Metrics(g prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(g,
		promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout, ErrorHandling: promhttp.ContinueOnError,
			DisableCompression: true}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	return mux
}

// authorized asks for the token, which is read each time: it may be changed while this runs. A browser, which bears none, may give it as a
// password.
func (o Options) authorized(next http.Handler) http.Handler {
	if o.TokenFile == "" {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		want, err := token(o.TokenFile)
		given, is := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !is {
			_, given, is = r.BasicAuth()
		}
		if a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(want)); err != nil || !is || subtle.ConstantTimeCompare(a[:], b[:]) != 1 {
			w.Header().Add("WWW-Authenticate", "Bearer")
			w.Header().Add("WWW-Authenticate", `Basic realm="cgpu: any name, the token as password"`)
			http.Error(w, "unauthorized", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// token reads the token's file.
func token(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxToken))
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	text := strings.TrimSpace(string(b))
	if len(text) < leastToken {
		return "", fmt.Errorf("--token-file %q: has %d characters: want %d or more", path, len(text), leastToken)
	}
	return text, nil
}
