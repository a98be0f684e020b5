// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
)

// TestDomainSilence: a server whose gate has not answered two questions in a row ends; while it begins it has longer.
func TestDomainSilence(t *testing.T) {
	r := newDomain(t, "team")
	g := r.guard
	pid := r.server.cmd.Process.Pid
	start, err := ledger.ProcStart(pid)
	if err != nil {
		t.Fatal(err)
	}
	g.initPID, g.initStart, g.silence = pid, start, -domainBeginning
	seat := page.Seat(filepath.Join(page.Pipes(g.cfg.RunDir, g.cfg.GPUs[0].UUID, "team"), page.Members), 0)
	if err := os.MkdirAll(seat, 0o755); err != nil {
		t.Fatal(err)
	}
	folder, err := unix.Open(seat, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(folder) })
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: "/proc/self/fd/" + strconv.Itoa(folder) + "/control", Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	ask := func(what string, hello, over bool) {
		t.Helper()
		go func() {
			if c, err := l.Accept(); err == nil {
				if hello {
					_, _ = c.Write([]byte("OUTBHELL\x00"))
				}
				_ = c.Close()
			}
		}()
		if g.askDomain(); g.domainIsOver() != over {
			t.Errorf("%s: over is %v", what, !over)
		}
	}
	for range domainBeginning + domainSilence - 1 {
		ask("it begins", false, false)
	}
	ask("it answers", true, false)
	ask("once not", false, false)
	ask("it answers again", true, false)
	ask("once not", false, false)
	ask("twice not", false, true)
}
