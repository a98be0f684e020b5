// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestEnded: the words of a server are one line of bounded length, whatever its user writes or puts there.
func TestEnded(t *testing.T) {
	path := filepath.Join(t.TempDir(), page.Ended)
	ended := func() string {
		file, err := openWords(path)
		if err == nil {
			defer file.Close()
		}
		return Ended(file)
	}
	if got := ended(); got != "" {
		t.Errorf("nobody has said %q", got)
	}
	for words, want := range map[string]string{
		"":                             "",
		"it does not answer":           "it does not answer",
		"a\nb\x1b[31mc\xff":            "a b [31mc?",
		strings.Repeat("long ", 1<<16): strings.Repeat("long ", 60),
	} {
		if err := os.WriteFile(path, []byte(words), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := ended(); got != want {
			t.Errorf("%.20q: %q, want %q", words, got, want)
		}
	}
	for what, put := range map[string]func() error{
		"a link": func() error { return os.Symlink("/etc/passwd", path) },
		"a pipe": func() error { return unix.Mkfifo(path, 0o666) }, // nobody waits for a writer
		"folder": func() error { return os.Mkdir(path, 0o755) },
	} {
		if err := errors.Join(os.Remove(path), put()); err != nil {
			t.Fatal(err)
		}
		if got := ended(); got != "" {
			t.Errorf("by %s: %q", what, got)
		}
	}
}

// TestJoinRefused: who cannot be a member, or beside one, hears which variable is at fault. Nothing is read where a node has no domains.
func TestJoinRefused(t *testing.T) {
	const uuid = "GPU-1"
	slice := func(limit quota.Bytes, p quota.Priority) []ledger.VGPU {
		return []ledger.VGPU{{UUID: uuid, Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: 1, Priority: p}}}}
	}
	on := []device.Domain{{Name: "team"}}
	for name, c := range map[string]struct {
		domain  string
		domains []device.Domain
		limit   quota.Bytes
		own     quota.Priority
		other   ledger.Record // beside it
		want    string        // empty: nothing is wrong
	}{
		"an unknown domain":           {"tea", on, quota.GiB, quota.PriorityDefault, ledger.Record{}, `CGPU_DOMAIN (--domain) "tea"`},
		"a member without room":       {"team", on, 64 * quota.MiB, quota.PriorityDefault, ledger.Record{}, "a memory limit of 64MiB"},
		"a member of high priority":   {"team", on, quota.GiB, quota.PriorityHigh, ledger.Record{}, "a domain has no priority"},
		"high priority beside one":    {"", on, quota.GiB, quota.PriorityHigh, ledger.Record{Domain: "team"}, "high priority (cgpu.io/priority"},
		"high priority beside none":   {"", on, quota.GiB, quota.PriorityHigh, ledger.Record{}, ""},
		"the default beside one":      {"", on, quota.GiB, quota.PriorityDefault, ledger.Record{Domain: "team"}, ""},
		"high priority, domains off":  {"", nil, quota.GiB, quota.PriorityHigh, ledger.Record{Domain: "team"}, ""},
		"a member where they are off": {"team", nil, quota.GiB, quota.PriorityDefault, ledger.Record{}, "there is no such trust domain"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := guardcfg.Config{Nonce: "own", RunDir: t.TempDir(), Domain: c.domain, GPUs: make([]guardcfg.GPU, 1),
				Settings: device.Config{Domains: c.domains}}
			c.other.ID, c.other.Nonce, c.other.VGPUs = "other", "other", slice(quota.GiB, quota.PriorityDefault)
			for _, r := range []ledger.Record{{ID: "own", Nonce: "own", Domain: c.domain, VGPUs: slice(c.limit, c.own)}, c.other} {
				if _, err := ledger.Open(cfg.RunDir).Reserve(ledger.Request{Record: r, GPUs: []ledger.GPU{{UUID: uuid, Memory: 4 * quota.GiB}},
					Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: sched.DefaultPrioRatio}}); err != nil {
					t.Fatal(err)
				}
			}
			err := Join(cfg)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestJoinBesideDead: who was killed at its start has left a record, of which nothing lives: it keeps nobody off.
func TestJoinBesideDead(t *testing.T) {
	const uuid = "GPU-1"
	launcher := exec.Command("/bin/sleep", "100")
	if err := launcher.Start(); err != nil {
		t.Fatal(err)
	}
	start, err := ledger.ProcStart(launcher.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	cfg := guardcfg.Config{Nonce: "own", RunDir: t.TempDir(), GPUs: make([]guardcfg.GPU, 1),
		Settings: device.Config{Domains: []device.Domain{{Name: "team"}}}}
	for _, r := range []ledger.Record{
		{ID: "m", Nonce: "m", Domain: "team", LauncherPID: launcher.Process.Pid, LauncherStart: start},
		{ID: "own", Nonce: "own", LauncherPID: os.Getpid()},
	} {
		slice := quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}
		if r.Domain == "" {
			slice.Priority = quota.PriorityHigh
		}
		r.VGPUs = []ledger.VGPU{{UUID: uuid, Slice: slice}}
		if _, err := ledger.Open(cfg.RunDir).Reserve(ledger.Request{Record: r, GPUs: []ledger.GPU{{UUID: uuid, Memory: 4 * quota.GiB}},
			Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: sched.DefaultPrioRatio}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := Join(cfg); err == nil {
		t.Error("high priority beside a member that begins")
	}
	_, _ = launcher.Process.Kill(), launcher.Wait()
	if err := Join(cfg); err != nil {
		t.Errorf("high priority beside what was a member: %v", err)
	}
}
