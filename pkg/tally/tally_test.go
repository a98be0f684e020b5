// SPDX-License-Identifier: Apache-2.0

package tally

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
)

const gpu = "GPU-00000000-0000-0000-0000-000000000001"

const childEnv = "CGPU_TEST_TALLY"

// TestMain: as a child it counts like a guard until it is killed.
func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		f, err := Create(dir, "aaaa", []string{gpu})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		count(f.Page)
		fmt.Println("ok")
		select {}
	}
	os.Exit(m.Run())
}

func count(p *Page) {
	p.Calls.Add(3)
	p.KilledProcesses.Add(1)
	p.On(0).Exact.Store(1)
	Raise(&p.On(0).Time, 7)
	Raise(&p.On(0).Time, 5)
	p.On(0).Denied.Add(2)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// expect compares what the node has of all containers, so many of which have counted, of which so many have files.
func expect(t *testing.T, dir string, containers, files int) {
	t.Helper()
	n, err := Read(dir)
	must(t, err)
	c := uint64(containers)
	if g := n.Sum.GPUs[gpu]; n.Sum.Calls != 3*c || n.Sum.KilledProcesses != c || g.Time != 7*c || g.Denied != 2*c || g.Exact != (c > 0) || len(n.Containers) != files {
		t.Fatalf("%+v, want the counts of %d containers and %d files", n, containers, files)
	}
}

// TestKilled: what a guard counted is there after it was killed, before and after its file is folded.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ok\n" {
		t.Fatal(line)
	}
	expect(t, dir, 1, 1)
	must(t, Fold(dir)) // it lives
	expect(t, dir, 1, 1)
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	expect(t, dir, 1, 1)
	must(t, Fold(dir))
	expect(t, dir, 1, 0)
	must(t, Fold(dir))
	expect(t, dir, 1, 0)
}

// TestReleased: a guard that ends leaves its counters to the node, and may still count then.
func TestReleased(t *testing.T) {
	dir := t.TempDir()
	expect(t, dir, 0, 0)
	must(t, Fold(dir))
	for i := range 3 {
		f, err := Create(dir, fmt.Sprint("aaa", i), []string{gpu})
		must(t, err)
		count(f.Page)
		f.Release()
		must(t, Fold(dir))
		f.Calls.Add(1)
		expect(t, dir, i+1, 0)
	}
}

// TestHalfFolded: who is killed after the node's file is written, and before the container's is removed, makes nothing count twice.
func TestHalfFolded(t *testing.T) {
	dir := t.TempDir()
	f, err := Create(dir, "aaaa", []string{gpu})
	must(t, err)
	count(f.Page)
	f.Release()
	was, err := os.ReadFile(file(dir, "aaaa"))
	must(t, err)
	must(t, Fold(dir))
	must(t, os.WriteFile(file(dir, "aaaa"), was, 0o600))
	expect(t, dir, 1, 0)
	must(t, Fold(dir))
	if _, err := os.Stat(file(dir, "aaaa")); err == nil {
		t.Error("the file is still there")
	}
	expect(t, dir, 1, 0)
}

// TestForeign: a file that is none of ours counts nothing and goes; one of the same name, made at that moment, counts.
func TestForeign(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(file(dir, ""), 0o700))
	for name, text := range map[string]string{"aaaa": "", "bbbb": "x", "cccc": string(make([]byte, size)), totalName: "{"} {
		must(t, os.WriteFile(file(dir, name), []byte(text), 0o600))
	}
	expect(t, dir, 0, 0)
	must(t, Fold(dir))
	f, err := Create(dir, "aaaa", []string{gpu})
	must(t, err)
	count(f.Page)
	expect(t, dir, 1, 1)
	f.Release()
	must(t, Fold(dir))
	expect(t, dir, 1, 0)
	if names, _ := list(dir); len(names) != 0 {
		t.Errorf("%q are left", names)
	}
}

// TestAtOnce: while containers come and go and their counters are folded, the node's never go back, and nothing is lost.
func TestAtOnce(t *testing.T) {
	dir := t.TempDir()
	const guards, each = 4, 50
	var work, readers sync.WaitGroup
	done := make(chan struct{})
	for range 2 {
		readers.Go(func() {
			for last := uint64(0); ; {
				n, err := Read(dir)
				if err != nil || n.Sum.Calls < last {
					t.Errorf("%d calls after %d: %v", n.Sum.Calls, last, err)
					return
				}
				last = n.Sum.Calls
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	for i := range guards {
		work.Go(func() {
			for j := range each {
				f, err := Create(dir, fmt.Sprintf("%d0%d", i, j), []string{gpu})
				if err != nil {
					t.Error(err)
					return
				}
				count(f.Page)
				f.Release()
				if err := Fold(dir); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	close(done)
	readers.Wait()
	must(t, Fold(dir))
	expect(t, dir, guards*each, 0)
}

func BenchmarkRead(b *testing.B) {
	dir := b.TempDir()
	for i := range 64 {
		f, err := Create(dir, fmt.Sprint("aaa", i), []string{gpu})
		must(b, err)
		count(f.Page)
	}
	for b.Loop() {
		if _, err := Read(dir); err != nil {
			b.Fatal(err)
		}
	}
}
