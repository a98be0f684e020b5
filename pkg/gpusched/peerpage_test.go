package gpusched

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const pageGPU = "GPU-0"

func newPeerPage(t *testing.T, dir string) *peerPage {
	t.Helper()
	done := make(chan *peerPage, 1)
	go func() {
		b, err := openPeerPage(dir, pageGPU)
		if err != nil {
			t.Error(err)
		}
		done <- b
	}()
	var b *peerPage
	eventually(t, "a place on the page: the file is locked", func() bool {
		select {
		case b = <-done:
			return true
		default:
			return false
		}
	})
	if b == nil {
		t.FailNow()
	}
	t.Cleanup(func() { _ = unix.Munmap(b.mem) })
	return b
}

// ended is the number of a process that is gone.
func ended(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

// TestPeerPage: guards see each other and nobody sees himself. That the second finds a place shows that the first holds no lock.
func TestPeerPage(t *testing.T) {
	dir := t.TempDir()
	a, b := newPeerPage(t, dir), newPeerPage(t, dir)
	if a.place() == b.place() {
		t.Fatalf("both have place %d", a.place())
	}
	if len(a.others()) != 0 {
		t.Errorf("who has published nothing is seen: %+v", a.others())
	}
	want := sched.Tenant{Share: sched.Share{Weight: 3, Percent: 40, Priority: quota.PriorityHigh}, Busy: 7, Pressing: true, Saturating: true}
	for _, change := range []func(t *sched.Tenant){
		func(*sched.Tenant) {}, func(t *sched.Tenant) { t.Pressing = false }, func(t *sched.Tenant) { t.Saturating = false },
		func(t *sched.Tenant) { t.Busy = 0; t.Lingers = true }, func(t *sched.Tenant) { t.Weight, t.Percent, t.Priority = 1, 0, quota.PriorityBestEffort },
	} {
		change(&want)
		b.publish(want)
		want.Place = b.place()
		if got := a.others(); !slices.Equal(got, []sched.Tenant{want}) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	if len(b.others()) != 0 {
		t.Errorf("a guard sees itself: %+v", b.others())
	}
	a.publish(sched.Tenant{Share: sched.Share{Weight: 1}})
	c := newPeerPage(t, dir)
	if n := len(c.others()); n != 2 {
		t.Errorf("a third one sees %d", n)
	}
	if other, err := openPeerPage(dir, "GPU-1"); err != nil || len(other.others()) != 0 || other.place() != 1 {
		t.Errorf("another GPU's page: %v", err)
	}
	st, err := os.Stat(filepath.Join(dir, "board", pageGPU))
	if err != nil || st.Mode().Perm() != 0o600 || st.Size() != pageSize {
		t.Errorf("%v, %v", st, err)
	}
}

// TestPeerPageWakes: a change wakes those who wait, and nothing else does.
func TestPeerPageWakes(t *testing.T) {
	dir := t.TempDir()
	a, b := newPeerPage(t, dir), newPeerPage(t, dir)
	share := sched.Tenant{Share: sched.Share{Weight: 1}, Busy: 1}
	b.publish(share)
	for _, x := range []struct {
		name   string
		change func()
	}{
		{"publish", func() { share.Busy++; b.publish(share) }},
		{"leave", b.leave},
	} {
		seen := a.generation()
		b.publish(share) // nothing new
		if a.generation() != seen {
			t.Errorf("%s: woken by nothing", x.name)
		}
		woken := make(chan struct{})
		go func() {
			a.await(seen)
			close(woken)
		}()
		time.Sleep(2 * time.Millisecond) // it most likely sleeps by now
		select {
		case <-woken:
			t.Errorf("%s: it does not wait", x.name)
		default:
		}
		x.change()
		eventually(t, x.name+" wakes", func() bool {
			select {
			case <-woken:
				return true
			default:
				return false
			}
		})
		a.await(seen) // what has been is not waited for
	}
}

// TestPeerPageOfTheDead: who is gone is not seen, and his place is used again.
func TestPeerPageOfTheDead(t *testing.T) {
	for _, x := range []struct {
		name string
		kill func(b *peerPage)
	}{
		{"he ended", func(b *peerPage) { b.u32(b.own + pageOwner).Store(uint32(ended(t))) }},
		{"his number is another's", func(b *peerPage) { b.u64(b.own + pageStart).Add(1) }},
		{"he left", func(b *peerPage) { b.leave() }},
	} {
		t.Run(x.name, func(t *testing.T) {
			dir := t.TempDir()
			a, b := newPeerPage(t, dir), newPeerPage(t, dir)
			b.publish(sched.Tenant{Share: sched.Share{Weight: 5}, Busy: 5, Pressing: true})
			x.kill(b)
			if o := a.others(); len(o) != 0 {
				t.Errorf("he is seen: %+v", o)
			}
			c := newPeerPage(t, dir)
			if c.place() != b.place() {
				t.Errorf("place %d is taken although %d is free", c.place(), b.place())
			}
			if o := a.others(); len(o) != 0 {
				t.Errorf("the new one has what the old one wrote: %+v", o)
			}
			if d := newPeerPage(t, dir); d.place() == a.place() || d.place() == c.place() {
				t.Errorf("place %d is taken", d.place())
			}
		})
	}
}

// TestPeerPageFormat: what another version has written is not believed.
func TestPeerPageFormat(t *testing.T) {
	for _, x := range []struct {
		name string
		text func(b []byte) []byte
	}{
		{"another version", func(b []byte) []byte { b[0]++; return b }},
		{"a short one", func(b []byte) []byte { b[0]++; return b[:100] }},
		{"an empty one", func([]byte) []byte { return nil }},
	} {
		t.Run(x.name, func(t *testing.T) {
			dir := t.TempDir()
			b := newPeerPage(t, dir)
			b.publish(sched.Tenant{Share: sched.Share{Weight: 5}, Busy: 5})
			text := x.text(slices.Clone(b.mem))
			dir = t.TempDir()
			if err := os.MkdirAll(filepath.Join(dir, "board"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "board", pageGPU), text, 0o600); err != nil {
				t.Fatal(err)
			}
			c := newPeerPage(t, dir)
			if c.place() != 1 || len(c.others()) != 0 {
				t.Errorf("place %d, others %+v", c.place(), c.others())
			}
			c.publish(sched.Tenant{Share: sched.Share{Weight: 1}})
			if d := newPeerPage(t, dir); d.place() != 2 || len(d.others()) != 1 {
				t.Errorf("the next one: place %d, others %+v", d.place(), d.others())
			}
		})
	}
}

// TestPeerPageFull: the last place can be had, and then none until somebody leaves.
func TestPeerPageFull(t *testing.T) {
	dir := t.TempDir()
	first := newPeerPage(t, dir)
	for i := 2; i < pageEntries; i++ { // as many of this process
		e := i * pageEntry
		copy(first.mem[e:e+pageEntry], first.mem[first.own:first.own+pageEntry])
		first.u32(e + pageWeight).Store(1)
	}
	last := newPeerPage(t, dir)
	if last.place() != pageEntries || len(last.others()) != pageEntries-2 {
		t.Errorf("place %d, %d others", last.place(), len(last.others()))
	}
	if b, err := openPeerPage(dir, pageGPU); err == nil {
		t.Fatalf("place %d", b.place())
	}
	first.leave()
	if b := newPeerPage(t, dir); b.place() != 1 {
		t.Errorf("place %d", b.place())
	}
}

// TestOtherChannels: others are told how many channels a container has, also of those that it had before it joined.
func TestOtherChannels(t *testing.T) {
	dir := t.TempDir()
	a, b := newFakeContainer(t, 1), newFakeContainer(t, 1)
	if _, ok := a.OtherChannels(0); ok {
		t.Error("somebody is known before there is a page")
	}
	for _, c := range []*fakeContainer{a, b} {
		c.Config.RunDir = dir
		c.TellChannels(0, 7)
		c.gpu().joinPage()
	}
	if n, ok := a.OtherChannels(0); n != 7 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	b.TellChannels(0, 9)
	if n, _ := a.OtherChannels(0); n != 9 {
		t.Errorf("%d", n)
	}
	b.gpu().leavePage()
	if n, _ := a.OtherChannels(0); n != 0 {
		t.Errorf("%d of who has left", n)
	}
	newPeerPage(t, dir) // has its place
	b.TellChannels(0, 11)
	if n, _ := a.OtherChannels(0); n != 0 {
		t.Errorf("%d of who has left, in the name of another", n)
	}
}
