// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/node/nodetest"
)

// TestExporter: the command serves until it is told to end, and refuses to tell strangers.
func TestExporter(t *testing.T) {
	n := nodetest.New(t)
	socket := filepath.Join(n.Dir, "e.sock")
	ctx, cancel := context.WithCancel(context.Background())
	a := app()
	a.Writer, a.ErrWriter = io.Discard, io.Discard
	done := make(chan error, 1)
	go func() { done <- a.RunContext(ctx, []string{"cgpu", "exporter", "--listen", "unix:" + socket}) }()
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", socket) }}}
	defer client.CloseIdleConnections()
	var text []byte
	for range 500 {
		answer, err := client.Get("http://cgpu/metrics")
		if err != nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		text, _ = io.ReadAll(answer.Body)
		answer.Body.Close()
		break
	}
	if !bytes.Contains(text, []byte("\ncgpu_up 1\n")) {
		t.Errorf("%s", text)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	b := app()
	b.Writer, b.ErrWriter = io.Discard, io.Discard
	err := run(b, []string{"cgpu", "exporter", "--listen", ":0"})
	if _, usage := errors.AsType[usageError](err); !usage || !strings.Contains(err.Error(), "others reach it") {
		t.Error(err)
	}
}
