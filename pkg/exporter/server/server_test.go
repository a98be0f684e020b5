// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// gatherer is one that a test holds up.
type gatherer func() ([]*dto.MetricFamily, error)

func (g gatherer) Gather() ([]*dto.MetricFamily, error) { return g() }

func nothing() ([]*dto.MetricFamily, error) { return nil, nil }

// serve serves until the test's end.
func serve(t *testing.T, o Options, g gatherer) net.Addr {
	t.Helper()
	o.Log = slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(context.Background())
	at, done := make(chan net.Addr, 1), make(chan error, 1)
	go func() { done <- Serve(ctx, Metrics(g), o, func(a net.Addr) { at <- a }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case a := <-at:
		return a
	case err := <-done:
		done <- nil
		t.Fatal(err)
		return nil
	}
}

func status(t *testing.T, c *http.Client, url string, header ...string) int {
	t.Helper()
	r, err := http.NewRequest("GET", url, nil)
	must(t, err)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := c.Do(r)
	must(t, err)
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode
}

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	short, good := filepath.Join(dir, "short"), filepath.Join(dir, "good")
	must(t, os.WriteFile(short, []byte("secret\n"), 0o600))
	must(t, os.WriteFile(good, []byte("0123456789abcdef\n"), 0o600))
	for _, x := range []struct {
		o    Options
		want string
	}{
		{Options{Listen: "127.0.0.1:0"}, ""},
		{Options{Listen: "[::1]:0"}, ""},
		{Options{Listen: "localhost:9471"}, ""},
		{Options{Listen: "unix:/run/x"}, ""},
		{Options{Listen: ":9471"}, "others reach it"},
		{Options{Listen: "0.0.0.0:9471"}, "others reach it"},
		{Options{Listen: "node1:9471"}, "others reach it"},
		{Options{Listen: ":9471", Insecure: true}, ""},
		{Options{Listen: ":9471", TokenFile: good}, ""},
		{Options{Listen: ":9471", TokenFile: short}, "has 6 characters"},
		{Options{Listen: ":9471", TokenFile: short + "no"}, "--token-file"},
		{Options{Listen: "127.0.0.1:0", WebConfig: short}, "--web-config"},
		{Options{Listen: "9471"}, "want HOST:PORT"},
		{Options{Listen: "unix:x"}, "absolute"},
	} {
		if err := x.o.Check(); (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%+v: %v, want %q", x.o, err, x.want)
		}
	}
}

// TestAnonymous: of whom a browser on this machine would be told without a word.
func TestAnonymous(t *testing.T) {
	for _, x := range []struct {
		o    Options
		want bool
	}{
		{Options{Listen: "127.0.0.1:0"}, true}, {Options{Listen: "localhost:9471"}, true},
		{Options{Listen: "127.0.0.1:0", TokenFile: "t"}, false},
		{Options{Listen: "unix:/run/x"}, false}, {Options{Listen: ":9471", Insecure: true}, false},
	} {
		if got := x.o.Anonymous(); got != x.want {
			t.Errorf("%+v: %v", x.o, got)
		}
	}
}

// TestToken: without it nobody is told anything, and another one counts from the moment on in which it is written.
func TestToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600))
	url := "http://" + serve(t, Options{Listen: "127.0.0.1:0", TokenFile: file}, nothing).String()
	ask := func(header ...string) int { return status(t, http.DefaultClient, url+"/metrics", header...) }
	if got := []int{ask(), ask("Authorization", "Bearer "), ask("Authorization", "Bearer 0123456789abcdeF"),
		ask("Authorization", "0123456789abcdef"),
		ask("Authorization", "Bearer 0123456789abcdef"), ask("Authorization", basic("x", "0123456789abcdef")),
		ask("Authorization", basic("0123456789abcdef", "")), status(t, http.DefaultClient, url+"/healthz")}; !equal(got, 401, 401, 401,
		401, 200, 200, 401, 401) {
		t.Errorf("%v", got)
	}
	must(t, os.WriteFile(file, []byte("fedcba9876543210\n"), 0o600))
	if got := []int{ask("Authorization", "Bearer 0123456789abcdef"), ask("Authorization", "Bearer fedcba9876543210")}; !equal(got, 401, 200) {
		t.Errorf("after a change: %v", got)
	}
	must(t, os.WriteFile(file, nil, 0o600))
	if got := ask("Authorization", "Bearer "); got != 401 {
		t.Errorf("with an empty file: %d", got)
	}
}

func basic(name, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(name+":"+password))
}

func equal(got []int, want ...int) bool {
	for i := range want {
		if got[i] != want[i] {
			return false
		}
	}
	return true
}

// TestTLS: exporter-toolkit's file is obeyed.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	must(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	must(t, err)
	for name, block := range map[string]*pem.Block{"cert": {Type: "CERTIFICATE", Bytes: der}, "key": {Type: "PRIVATE KEY", Bytes: private}} {
		must(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	config := filepath.Join(dir, "web.yml")
	must(t, os.WriteFile(config, []byte("tls_server_config: {cert_file: cert, key_file: key}\n"), 0o600))
	address := serve(t, Options{Listen: "127.0.0.1:0", WebConfig: config}, nothing).String()
	roots := x509.NewCertPool()
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	roots.AddCert(cert)
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	defer c.CloseIdleConnections()
	if got := status(t, c, "https://"+address+"/metrics"); got != 200 {
		t.Errorf("over TLS: %d", got)
	}
	if got := status(t, http.DefaultClient, "http://"+address+"/metrics"); got != 400 {
		t.Errorf("without TLS: %d", got)
	}
	if got := streams(t, address, roots); got != maxStreams {
		t.Errorf("a connection may have %d requests, want %d", got, maxStreams)
	}
}

// streams is how many requests at a time a server takes on a connection of HTTP/2, by its first frame.
func streams(t *testing.T, address string, roots *x509.CertPool) uint32 {
	t.Helper()
	c, err := tls.Dial("tcp", address, &tls.Config{RootCAs: roots, NextProtos: []string{"h2"}})
	must(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	must(t, err)
	head := make([]byte, 9)
	_, err = io.ReadFull(c, head)
	must(t, err)
	settings := make([]byte, int(head[1])<<8|int(head[2]))
	_, err = io.ReadFull(c, settings)
	must(t, err)
	for s := range slices.Chunk(settings, 6) {
		if binary.BigEndian.Uint16(s) == 3 { // SETTINGS_MAX_CONCURRENT_STREAMS
			return binary.BigEndian.Uint32(s[2:])
		}
	}
	t.Fatalf("no bound in % x", settings)
	return 0
}

// TestSilent: who connects and says nothing keeps no scrape waiting.
func TestSilent(t *testing.T) {
	address := serve(t, Options{Listen: "127.0.0.1:0"}, nothing).String()
	for range 10 * maxConnections {
		c, err := net.Dial("tcp", address)
		must(t, err)
		defer c.Close()
	}
	// Less than if each had to wait for those before, who have 5 s.
	if got := status(t, &http.Client{Timeout: 30 * time.Second}, "http://"+address+"/metrics"); got != 200 {
		t.Error(got)
	}
}

// TestBounds: many scrapes at a time, long headers, other methods and other paths cost little.
func TestBounds(t *testing.T) {
	begun, goOn := make(chan struct{}, maxScrapes), make(chan struct{})
	url := "http://" + serve(t, Options{Listen: "127.0.0.1:0"}, func() ([]*dto.MetricFamily, error) {
		begun <- struct{}{}
		<-goOn
		return nil, nil
	}).String()
	var scrapes sync.WaitGroup
	for range maxScrapes {
		scrapes.Go(func() {
			if got := status(t, http.DefaultClient, url+"/metrics"); got != 200 {
				t.Error(got)
			}
		})
	}
	for range maxScrapes {
		<-begun
	}
	if got := status(t, http.DefaultClient, url+"/metrics"); got != 503 {
		t.Errorf("one too many: %d", got)
	}
	close(goOn)
	scrapes.Wait()
	if got := status(t, http.DefaultClient, url+"/metrics", "X", strings.Repeat("x", 32<<10)); got != 431 {
		t.Errorf("a long header: %d", got)
	}
	if got := status(t, http.DefaultClient, url+"/debug/pprof/"); got != 404 {
		t.Errorf("another path: %d", got)
	}
	answer, err := http.Post(url+"/metrics", "text/plain", bytes.NewReader(make([]byte, 1<<10)))
	must(t, err)
	answer.Body.Close()
	if answer.StatusCode != 405 {
		t.Errorf("POST: %d", answer.StatusCode)
	}
}

// TestSocket: root's alone, and in the place of one that was left behind, but not of one that is in use.
func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	left.SetUnlinkOnClose(false)
	left.Close()
	serve(t, Options{Listen: "unix:" + path}, nothing)
	info, err := os.Stat(path)
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Error(info.Mode())
	}
	if err := Serve(context.Background(), Metrics(gatherer(nothing)), Options{Listen: "unix:" + path, Log: slog.New(slog.DiscardHandler)},
		nil); err == nil || !strings.Contains(err.Error(), "listens there") {
		t.Error(err)
	}
}

// TestAsksWho: a web config protects what others reach only if it asks who they are.
func TestAsksWho(t *testing.T) {
	for text, want := range map[string]bool{
		"":                                  false,
		"basic_auth_users: {}":              false,
		"basic_auth_users: {prom: $2y$10$}": true,
		"tls_server_config: {cert_file: c, key_file: k}":                                                                  false,
		"tls_server_config: {cert_file: c, key_file: k, client_auth_type: RequestClientCert}":                             false,
		"tls_server_config: {cert_file: c, key_file: k, client_auth_type: RequireAndVerifyClientCert, client_ca_file: a}": true,
		"no yaml: [": false,
	} {
		path := filepath.Join(t.TempDir(), "web.yml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := asksWho(path); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	if asksWho("") {
		t.Error("no file asks nobody")
	}
}
