// SPDX-License-Identifier: Apache-2.0

// Package domain sees to it that a member of a trust domain finds the domain's MPS server (docs/space.md). Its guard asks, before the
// member begins; who starts the server is cgpu (package server), as a run of its own, which ends by itself after the last member.
package domain

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// StartName is the command of cgpu's that starts a server.
const StartName = "domain-start"

// Join returns when the domain's server is ready for the member that cfg is of, or with why it cannot be a member. Of a container in no
// domain it says whether it can be beside those that are.
func Join(cfg guardcfg.Config) error {
	if cfg.DomainServer || cfg.Domain == "" && len(cfg.Settings.Domains) == 0 {
		return nil
	}
	l := ledger.Open(cfg.RunDir)
	records, err := l.List()
	i := slices.IndexFunc(records, func(r ledger.Record) bool { return r.Nonce == cfg.Nonce })
	switch {
	case err != nil:
		return err
	case i < 0:
		return fmt.Errorf("nonce %q: %w", cfg.Nonce, ledger.ErrNotFound)
	}
	if refusal := records[i].BesideDomains(l.Living(records)); refusal != nil {
		return refusal
	}
	if cfg.Domain == "" {
		return nil
	}
	why := refuse(cfg, records[i])
	if why == "" {
		why = ensure(cfg)
	}
	if why == "" {
		if err := sit(page.Pipes(cfg.RunDir, cfg.GPUs[0].UUID, cfg.Domain), records[i].Seat); err != nil {
			why = fmt.Sprintf("its MPS server does not take seat %d: %v", records[i].Seat, err)
		}
	}
	if why != "" {
		return fmt.Errorf("CGPU_DOMAIN (--domain) %q: %s", cfg.Domain, why)
	}
	return WriteParts(cfg.RunDir, cfg.GPUs[0].UUID, cfg.Domain)
}

// leastMember is less than any CUDA program of a member's takes.
const leastMember = 256 * quota.MiB

// refuse says why a container cannot be in a domain, and the remedy: there the GPU's time is shared by who computes on it, so what needs a
// container to itself cannot be had.
func refuse(cfg guardcfg.Config, r ledger.Record) string {
	switch {
	case cfg.Settings.Domain(cfg.Domain) == nil:
		return "there is no such trust domain on this node; add it to cgpu.toml ([[domains]], name), or leave it out"
	case len(cfg.GPUs) != 1 || len(r.VGPUs) != 1:
		return "a domain's MPS server is for one GPU, and the container has others; ask for a slice of one GPU"
	case r.VGPUs[0].Limit < leastMember:
		return fmt.Sprintf("a memory limit of %s: a member takes some 150 MiB of it for the server's channel group alone; ask for %s at least",
			r.VGPUs[0].Limit, leastMember)
	}
	switch s := r.VGPUs[0].Share; {
	case s.Percent != 0 || s.Weight > 1:
		return "the GPU's time is shared by domains as a whole; set weight and percentage of the domain's server (cgpu set), and leave them " +
			"out here"
	case s.Priority != quota.PriorityDefault:
		return "a domain has no priority; leave the priority out"
	}
	return ""
}

// ensure has the server run; it says why it does not.
func ensure(cfg guardcfg.Config) string {
	uuid := cfg.GPUs[0].UUID
	if Ready(cfg.RunDir, uuid, cfg.Domain) {
		return ""
	}
	cgpu, err := device.Program("cgpu")
	if err != nil {
		return err.Error()
	}
	// The member's start waits so long at most.
	patience := cfg.Settings.GuardStartTimeout * 9 / 10
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Settings.GuardStartTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, cgpu, StartName, "--within", patience.String(), uuid, cfg.Domain)
	cmd.Dir = "/"
	var said bytes.Buffer
	cmd.Stderr = &said
	cmd.WaitDelay = time.Second / 10 // what it has started has another standard error
	if err := cmd.Run(); err != nil {
		text := strings.TrimPrefix(strings.TrimSpace(said.String()), "cgpu: ")
		if text == "" {
			text = err.Error()
		}
		return "its MPS server does not start: " + strings.ReplaceAll(text, "\n", "; ")
	}
	return ""
}

// Server finds the record of a domain's MPS server on a GPU. False: there is none.
func Server(runDir, uuid, name string) (ledger.Record, bool, error) {
	records, err := ledger.Open(runDir).List()
	for _, r := range records {
		if r.Serves(name, uuid) {
			return r, true, err
		}
	}
	return ledger.Record{}, false, err
}

// Ready reports a server that serves: one with a guard, that is not on its way out, and whose socket answers.
func Ready(runDir, uuid, name string) bool {
	r, ok, err := Server(runDir, uuid, name)
	return err == nil && ok && !r.Retired && r.GuardLives() && Answers(runDir, uuid, name)
}

// Answers reports a server's gate that answers guards.
func Answers(runDir, uuid, name string) bool {
	return answers(page.Seat(filepath.Join(page.Pipes(runDir, uuid, name), page.Members), 0))
}

// greeting is what MPS's control daemon says to whoever connects.
const greeting = "OUTBHELL"

// answers connects to the socket in a folder of pipes as a member does.
func answers(dir string) bool {
	conn, err := dial(dir)
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	said := make([]byte, 64)
	n, _ := conn.Read(said)
	return strings.HasPrefix(string(said[:n]), greeting)
}

// Words opens the file in which a domain's server, of a process or thread that has its mounts, writes why it ends. It goes with the server,
// and Ended reads it then. Whoever is the server's user can put something else there.
func Words(pid int) (*os.File, error) {
	return openWords(filepath.Join("/proc", strconv.Itoa(pid), "root", page.PipesPath, page.Daemon, page.Ended))
}

func openWords(path string) (*os.File, error) {
	return os.OpenFile(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
}

// Ended is why a server has ended, in its own words; empty: it did not say.
func Ended(file *os.File) string {
	words := make([]byte, 300)
	n, _ := file.ReadAt(words, 0)
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(string(words[:max(n, 0)]), "?"), unicode.IsControl), " ")
}
