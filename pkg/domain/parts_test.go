// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
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

// TestSettle: whoever looks at the ledger, is overtaken by another change, and writes, writes that change too.
func TestSettle(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), page.Parts))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(text string) {
		if _, err := f.WriteAt([]byte(text), 0); err != nil {
			t.Error(err)
		}
	}
	write("old")
	looks := 0
	if err := settle(f, func() ([]byte, error) {
		if looks++; looks == 1 {
			write("new") // by the other one, who has looked later
			return []byte("mid"), nil
		}
		return []byte("new"), nil
	}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(f.Name()); err != nil || string(got) != "new" || looks != 3 {
		t.Errorf("%q after %d looks, %v: want new after 3", got, looks, err)
	}
	if err := settle(f, func() ([]byte, error) { return []byte("longer"), nil }); err == nil {
		t.Error("a file that is too short is taken")
	}
	if err := settle(f, func() ([]byte, error) { return nil, fs.ErrInvalid }); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("without a ledger: %v", err)
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
