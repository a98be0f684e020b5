// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const gpu = "GPU-1"

// reserve has members in a run dir, with the file of their domain.
func reserve(t *testing.T, runDir string, members ...ledger.Record) []ledger.Record {
	t.Helper()
	dir := page.Pipes(runDir, gpu, "team")
	if err := errors.Join(os.MkdirAll(dir, 0o711), MakeParts(dir)); err != nil {
		t.Fatal(err)
	}
	var list []ledger.Record
	for i, r := range members {
		r.ID, r.Nonce, r.LauncherPID = strconv.Itoa(i), strconv.Itoa(i), os.Getpid()
		r.VGPUs = []ledger.VGPU{{UUID: gpu, Slice: quota.Slice{Limit: quota.GiB}}}
		got, err := ledger.Open(runDir).Reserve(ledger.Request{Record: r, GPUs: []ledger.GPU{{UUID: gpu, Memory: 64 * quota.GiB}},
			Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: sched.MaxMaxInst, PrioRatio: sched.DefaultPrioRatio}})
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, got)
	}
	return list
}

// has reads the file as the gate does.
func has(t *testing.T, runDir string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(page.Pipes(runDir, gpu, "team"), page.Parts))
	if err != nil || len(text) != page.Seats+1 {
		t.Fatalf("%d bytes, %v", len(text), err)
	}
	return text
}

func change(runDir string, r ledger.Record, percent int) error {
	if _, err := ledger.Open(runDir).Change(r.Nonce, ledger.ChangeRequest{Threads: &percent}); err != nil {
		return err
	}
	return WriteParts(runDir, gpu, r.Domain)
}

// TestParts: the file has what the ledger says of each member, and nothing for who is none.
func TestParts(t *testing.T) {
	runDir := t.TempDir()
	all := reserve(t, runDir, ledger.Record{Domain: "team", DomainServer: true}, ledger.Record{Domain: "team", Threads: 30},
		ledger.Record{Domain: "team"}, ledger.Record{Domain: "tea", Threads: 7}, ledger.Record{})
	want := func(parts ...byte) {
		t.Helper()
		if got := has(t, runDir); string(got) != string(append(parts, make([]byte, len(got)-len(parts))...)) {
			t.Errorf("%v, want %v", got, parts)
		}
	}
	want()
	if err := WriteParts(runDir, gpu, "team"); err != nil {
		t.Fatal(err)
	}
	want(0, 30, 100)
	if err := change(runDir, all[1], 60); err != nil {
		t.Fatal(err)
	}
	want(0, 60, 100)
	// Who changes the ledger is killed before he writes: whoever looks writes it.
	percent := 0
	if _, err := ledger.Open(runDir).Change(all[1].Nonce, ledger.ChangeRequest{Threads: &percent}); err != nil {
		t.Fatal(err)
	}
	want(0, 60, 100)
	if err := WriteParts(runDir, gpu, "team"); err != nil {
		t.Fatal(err)
	}
	want(0, 100, 100)
	if err := errors.Join(ledger.Open(runDir).Release(all[1].Nonce), WriteParts(runDir, gpu, "team")); err != nil {
		t.Fatal(err)
	}
	want(0, 0, 100)
	info, err := os.Stat(filepath.Join(page.Pipes(runDir, gpu, "team"), page.Parts))
	if err != nil || info.Mode() != 0o644 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := WriteParts(runDir, gpu, "tea"); err != nil {
		t.Errorf("of a domain that has no folder: %v", err)
	}
	if _, err := os.Stat(page.Pipes(runDir, gpu, "tea")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder of a domain that nobody serves: %v", err)
	}
}

// TestPartsAtOnce: of changes that are made at the same time the file has in the end what the ledger has.
func TestPartsAtOnce(t *testing.T) {
	runDir := t.TempDir()
	all := reserve(t, runDir, ledger.Record{Domain: "team"}, ledger.Record{Domain: "team"}, ledger.Record{Domain: "team"})
	var at sync.WaitGroup
	for i := range 60 {
		at.Go(func() {
			if err := change(runDir, all[i%len(all)], 1+rand.IntN(100)); err != nil {
				t.Error(err)
			}
		})
	}
	at.Wait()
	records, err := ledger.Open(runDir).List()
	if err != nil {
		t.Fatal(err)
	}
	got := has(t, runDir)
	for _, r := range records {
		if int(got[r.Seat]) != r.Threads {
			t.Errorf("seat %d has %d %%, want %d", r.Seat, got[r.Seat], r.Threads)
		}
	}
}

// TestSeatsAreEnough: no more containers share a GPU than a domain has seats.
func TestSeatsAreEnough(t *testing.T) {
	if page.Seats < sched.MaxMaxInst {
		t.Errorf("%d seats for %d containers", page.Seats, sched.MaxMaxInst)
	}
	list := make([]ledger.Record, page.Seats)
	for i := range list {
		list[i] = ledger.Record{Domain: "team", Seat: i + 1, VGPUs: []ledger.VGPU{{UUID: gpu}}}
	}
	list = append(list, ledger.Record{Domain: "team", Seat: page.Seats + 1, VGPUs: []ledger.VGPU{{UUID: gpu}}})
	for seat, percent := range parts(list, "team", gpu) {
		if (percent == page.AllParts) != (seat > 0) {
			t.Errorf("seat %d has %d", seat, percent)
		}
	}
}
