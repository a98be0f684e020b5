// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
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
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn,
		error) {
		return net.Dial("unix", socket)
	}}}
	defer client.CloseIdleConnections()
	var text []byte
	for range 6000 {
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

// TestExporterHost: a site whose name is made to lead to this machine reads nothing by a browser on it.
func TestExporterHost(t *testing.T) {
	nodetest.New(t)
	read, write := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	a := app()
	a.Writer, a.ErrWriter = write, io.Discard
	done := make(chan error, 1)
	go func() {
		done <- a.RunContext(ctx, []string{"cgpu", "exporter", "--no-nvml", "--listen", "127.0.0.1:0", "--host", "gpu.example"})
		write.Close()
	}()
	line, err := bufio.NewReader(read).ReadString('\n')
	if err != nil {
		t.Fatal(err, <-done)
	}
	url := "http://" + strings.TrimSpace(strings.TrimPrefix(line, "cgpu exporter: tcp ")) + "/metrics"
	for host, want := range map[string]int{"": 200, "localhost:9471": 200, "gpu.example": 200, "evil.example:9471": 421} {
		r, err := http.NewRequest("GET", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("%q: %d, want %d", host, answer.StatusCode, want)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestKMUnitIsHeld: what mounts for others has bounds, and none that would give it a mount namespace of its own.
func TestKMUnitIsHeld(t *testing.T) {
	text, err := os.ReadFile("../../configs/cgpu-km.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivileges=yes", "CapabilityBoundingSet=CAP_SYS_ADMIN ",
		"RestrictAddressFamilies=AF_UNIX", "MemoryMax="} {
		if !strings.Contains(string(text), "\n"+want) {
			t.Errorf("cgpu-km.service has no %s", want)
		}
	}
	// systemd.exec(5), "mount namespace".
	if m := regexp.MustCompile(`(?m)^(Protect(System|Home|KernelTunables|KernelModules|KernelLogs|ControlGroups|Proc)|Private(Tmp|Devices|Mounts|IPC)|`+
		`(ReadWrite|ReadOnly|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|TemporaryFileSystem|ProcSubset|Root\w+|MountFlags|DynamicUser)=`).
		FindAllString(string(text), -1); m != nil {
		t.Errorf("with %q nobody sees what cgpu-km.service mounts", m)
	}
}

// TestUnitsAreHeld: what stays, is root and reads what tenants made writes nowhere but in /run, and has bounds.
func TestUnitsAreHeld(t *testing.T) {
	for name, more := range map[string]string{"exporter": "CPUQuota=100%", "health": "RestrictAddressFamilies=AF_UNIX",
		"agent": "CapabilityBoundingSet="} {
		text, err := os.ReadFile("../../configs/cgpu-" + name + ".service")
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"NoNewPrivileges=yes", "ProtectSystem=strict", "ReadWritePaths=/run",
			"PrivateTmp=yes", "MemoryMax=", more} {
			if !strings.Contains(string(text), "\n"+want) {
				t.Errorf("cgpu-%s.service has no %s", name, want)
			}
		}
	}
}
