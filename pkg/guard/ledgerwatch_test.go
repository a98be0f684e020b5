// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// inotifyEvent is one as the kernel writes it: the name is padded with zeroes.
func inotifyEvent(mask uint32, name string) []byte {
	padded := 0
	if name != "" {
		padded = (len(name) + 16) &^ 15
	}
	b := make([]byte, unix.SizeofInotifyEvent+padded)
	*(*unix.InotifyEvent)(unsafe.Pointer(&b[0])) = unix.InotifyEvent{Wd: 1, Mask: mask, Len: uint32(padded)}
	copy(b[unix.SizeofInotifyEvent:], name)
	return b
}

func TestMoved(t *testing.T) {
	join := func(list ...[]byte) (all []byte) {
		for _, b := range list {
			all = append(all, b...)
		}
		return all
	}
	file, other := inotifyEvent(unix.IN_MOVED_TO, "ledger.json"), inotifyEvent(unix.IN_MOVED_TO, "ledger.json.tmp")
	for _, c := range []struct {
		name   string
		events []byte
		want   bool
	}{
		{"none", nil, false},
		{"the file", file, true},
		{"another", other, false},
		{"a name that is longer than a block of 16", inotifyEvent(unix.IN_MOVED_TO, "0123456789abcdef"), false},
		{"the file after others", join(other, other, file), true},
		{"the file before another", join(file, other), true},
		{"too many to tell", inotifyEvent(unix.IN_Q_OVERFLOW, ""), true},
		{"the watch ends", inotifyEvent(unix.IN_IGNORED, ""), false},
		{"the file after the end of a watch", join(inotifyEvent(unix.IN_IGNORED, ""), file), true},
		{"cut off", other[:len(other)-1], true}, // who knows
		{"less than an event", file[:unix.SizeofInotifyEvent-1], false},
	} {
		if got := hasEventFor(c.events, "ledger.json"); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// Single changes are followed at once; one after the other without an end, they are followed four times a second.
func TestPace(t *testing.T) {
	start := time.Unix(1e9, 0)
	run := func(p *pace, from time.Time, every, length time.Duration) (reads, atOnce int, end time.Time) {
		now := from
		for now.Before(from.Add(length)) {
			wait := p.next(now)
			if reads++; wait == paceLeast {
				atOnce++
			}
			if wait > paceEvery {
				t.Fatalf("waits %v", wait)
			}
			now = now.Add(max(wait, every))
		}
		return reads, atOnce, now
	}
	var p pace
	reads, _, now := run(&p, start, 5*time.Millisecond, 60*time.Second)
	if most := paceBurst + int(60*time.Second/paceEvery) + 1; reads > most || reads < most-3 {
		t.Errorf("the ledger is read %d times in a minute of changes, want %d", reads, most)
	}
	reads, atOnce, _ := run(&p, now.Add(paceBurst*paceEvery), 3*time.Second, 60*time.Second)
	if reads != atOnce || reads != 20 {
		t.Errorf("%d of %d single changes are followed at once", atOnce, reads)
	}
}

// reserve puts a container into a ledger.
func reserve(t *testing.T, cfg Config, nonce string, v ledger.VGPU) {
	t.Helper()
	_, err := ledger.Open(cfg.RunDir).Reserve(ledger.Request{Record: ledger.Record{ID: cfg.ID, Nonce: nonce, VGPUs: []ledger.VGPU{v}},
		GPUs: []ledger.GPU{{UUID: v.UUID, Memory: 4 * quota.GiB}}, Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99}})
	if err != nil {
		t.Fatal(err)
	}
}

// TestDomainPlan: of a member of a trust domain the server's cap and pause hold; its share is its own.
func TestDomainPlan(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(0, nil)))
	uuid := g.cfg.GPUs[0].UUID
	record := func(nonce, domain string, server bool, percent, weight int) ledger.Record {
		return ledger.Record{ID: nonce, Nonce: nonce, Domain: domain, DomainServer: server, VGPUs: []ledger.VGPU{{UUID: uuid,
			Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: weight, Percent: percent}}}}}
	}
	records := []ledger.Record{record("other", "tea", true, 20, 1), record("server", "team", true, 30, 3),
		record("member", "team", false, 0, 1),
		record("stranger", "", false, 0, 1)}
	hard := sched.Card{Policy: sched.PolicyWeight, MaxInst: 20, PrioRatio: 99}
	plan := func(i int) sched.Plan { return g.plans(records, records[i], map[string]sched.Card{uuid: hard})[uuid] }
	server, member, stranger := plan(1), plan(2), plan(3)
	if server.Cap == 0 || member.Cap != server.Cap || member.Slot != server.Slot || member.Share.Weight != 1 || stranger.Cap != 0 {
		t.Errorf("server %+v\nmember %+v\nstranger %+v", server, member, stranger)
	}
	for _, paused := range []int{1, 2} {
		records[paused].Paused = true
		if !plan(2).Suspended || plan(3).Suspended || plan(1).Suspended != (paused == 1) {
			t.Errorf("%s is paused: %v %v %v", records[paused].ID, plan(1).Suspended, plan(2).Suspended, plan(3).Suspended)
		}
		records[paused].Paused = false
	}
}

// TestFollow: what is written to the ledger reaches the guard, however it comes there, until the container ends.
func TestFollow(t *testing.T) {
	c := newFakeContainer(t, 1)
	reserve(t, c.cfg, c.cfg.Nonce, ledger.VGPU{UUID: c.cfg.GPUs[0].UUID, Slice: quota.Slice{Limit: 2 * quota.GiB,
		Share: quota.Share{Weight: 2}}})
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		c.watchLedger(over)
		close(ended)
	}()
	plan := func() sched.Plan { return c.gpuTime.Plan(0) }
	eventually(t, "what is there already", func() bool { return plan().Share.Weight == 2 && c.account.usage(0).limit == 2*quota.GiB })
	l := ledger.Open(c.cfg.RunDir)
	for range 3 {
		for _, paused := range []bool{true, false} {
			if err := l.Update(c.cfg.Nonce, func(r *ledger.Record) error { r.Paused = paused; return nil }); err != nil {
				t.Fatal(err)
			}
			eventually(t, "a change", func() bool { return plan().Suspended == paused })
		}
	}
	if err := os.WriteFile(filepath.Join(c.cfg.RunDir, "junk"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(c.cfg.RunDir, "junk"), ledger.File(c.cfg.RunDir)); err != nil {
		t.Fatal(err)
	}
	c.readLedger()
	if plan().Share.Weight != 2 {
		t.Error("a damaged ledger changes shares")
	}
	close(over)
	eventually(t, "it ends", func() bool {
		select {
		case <-ended:
			return true
		default:
			return false
		}
	})
}

// TestFollowIsPaced: however often the ledger is written, a guard opens it no more often than that.
func TestFollowIsPaced(t *testing.T) {
	c := newFakeContainer(t, 1)
	reserve(t, c.cfg, c.cfg.Nonce, ledger.VGPU{UUID: c.cfg.GPUs[0].UUID, Slice: quota.Slice{Limit: 2 * quota.GiB,
		Share: quota.Share{Weight: 2}}})
	text, err := os.ReadFile(ledger.File(c.cfg.RunDir))
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, c.cfg.RunDir, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		c.watchLedger(over)
		close(ended)
	}()
	begin := time.Now()
	for range 200 {
		next := filepath.Join(c.cfg.RunDir, "next")
		if err := os.WriteFile(next, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, ledger.File(c.cfg.RunDir)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Millisecond)
	}
	most := 1 + paceBurst + int(time.Since(begin)/paceEvery) + 1
	close(over)
	<-ended
	opened := 0
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(fd, buf)
		if err != nil || n <= 0 {
			break
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			size := unix.SizeofInotifyEvent + int((*unix.InotifyEvent)(unsafe.Pointer(&b[0])).Len)
			if hasEventFor(b[:size], filepath.Base(ledger.File(c.cfg.RunDir))) {
				opened++
			}
			b = b[size:]
		}
	}
	if opened == 0 || opened > most {
		t.Errorf("the ledger is read %d times for 200 changes, want %d at most", opened, most)
	}
}

// TestPlans: what the ledger says becomes the container's plan and limit.
func TestPlans(t *testing.T) {
	const gpu, other = "GPU-0", "GPU-9"
	card := func(p sched.Policy) map[string]sched.Card {
		return map[string]sched.Card{gpu: {Policy: p, MaxInst: 4, PrioRatio: 80}}
	}
	own := func(f func(v *ledger.VGPU)) ledger.Record {
		v := ledger.VGPU{UUID: gpu, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}
		if f != nil {
			f(&v)
		}
		return ledger.Record{ID: "c0ffee", Nonce: "n", VGPUs: []ledger.VGPU{v}}
	}
	beside := func(weight, percent int) ledger.Record {
		return ledger.Record{ID: "another", Nonce: "m",
			VGPUs: []ledger.VGPU{{UUID: gpu, Slice: quota.Slice{Limit: quota.GiB,
				Share: quota.Share{Weight: weight, Percent: percent, Priority: quota.PriorityDefault}}}}}
	}
	paused := own(nil)
	paused.Paused = true
	restarted, elsewhere := own(func(v *ledger.VGPU) { v.Weight = 9 }), own(func(v *ledger.VGPU) { v.UUID, v.Weight = other, 9 })
	restarted.Nonce = "later"
	for _, c := range []struct {
		name      string
		records   []ledger.Record
		cards     map[string]sched.Card
		ignored   bool
		effective sched.Policy
		weight    int
		cap       sched.Permille
		suspended bool
		limit     quota.Bytes
	}{
		{"no card", []ledger.Record{own(nil)}, nil, false, sched.PolicyPreempt, 1, 0, false, quota.GiB},
		{"a weight", []ledger.Record{own(func(v *ledger.VGPU) { v.Weight = 3 })}, nil, false, sched.PolicyWeight, 3, 0, false, quota.GiB},
		{"another's weight", []ledger.Record{own(nil), beside(2, 0)}, card(sched.PolicyPreempt), false, sched.PolicyWeight,
			1, 0, false, quota.GiB},
		{"fair", []ledger.Record{own(nil)}, card(sched.PolicyFair), false, sched.PolicyFair, 1, 250, false, quota.GiB},
		{"fixed", []ledger.Record{own(func(v *ledger.VGPU) { v.Weight = 2 })}, card(sched.PolicyFixed), false, sched.PolicyFixed, 2,
			500, false, quota.GiB},
		{"a percentage", []ledger.Record{beside(1, 0), own(func(v *ledger.VGPU) { v.Percent = 30 })}, card(sched.PolicyPreempt), false,
			sched.PolicyPreempt, 1, 300, false, quota.GiB},
		{"soft", []ledger.Record{own(func(v *ledger.VGPU) { v.Percent = 30 })}, card(sched.PolicySoft), false, sched.PolicySoft,
			1, 0, false, quota.GiB},
		{"native", []ledger.Record{own(nil)}, card(sched.PolicyNative), false, sched.PolicyNative, 1, 0, false, quota.GiB},
		{"paused", []ledger.Record{paused}, nil, false, sched.PolicyPreempt, 1, 0, true, quota.GiB},
		{"another limit", []ledger.Record{own(func(v *ledger.VGPU) { v.Limit = 3 * quota.GiB })}, nil, false, sched.PolicyPreempt, 1,
			0, false, 3 * quota.GiB},
		{"less than is used", []ledger.Record{own(func(v *ledger.VGPU) { v.Limit = quota.MiB })}, nil, false, sched.PolicyPreempt,
			1, 0, false, quota.MiB},
		{"of a later container", []ledger.Record{restarted}, nil, true, 0, 0, 0, false, 0},
		{"of another container", []ledger.Record{beside(7, 0)}, nil, true, 0, 0, 0, false, 0},
		{"of another GPU", []ledger.Record{elsewhere}, nil, true, 0, 0, 0, false, 0},
		{"empty", nil, nil, true, 0, 0, 0, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newFakeContainer(t, 1)
			before := g.gpuTime.Plan(0)
			g.applyLedger(c.records, c.cards)
			p := g.gpuTime.Plan(0)
			if c.ignored {
				if p != before || g.account.usage(0).limit != testLimit {
					t.Errorf("%+v", p)
				}
				return
			}
			if p.Effective != c.effective || p.Share.Weight != c.weight || p.Cap != c.cap || p.Suspended != c.suspended ||
				(p.Slot.Cycle > 0) != (c.cap > 0) {
				t.Errorf("%+v", p)
			}
			if p.Cap > 0 && p.Slot.On*time.Duration(sched.Whole) != p.Slot.Cycle*time.Duration(p.Cap) {
				t.Errorf("%+v for %v", p.Slot, p.Cap)
			}
			if l := g.account.usage(0).limit; l != c.limit {
				t.Errorf("limit %v", l)
			}
		})
	}
}

// TestPlansSlots: guards that read the same ledger agree, and their slots do not overlap, also where two engines chose one ID.
func TestPlansSlots(t *testing.T) {
	a, b := newFakeContainer(t, 1), newFakeContainer(t, 1)
	b.cfg.Nonce = "m"
	var records []ledger.Record
	for _, nonce := range []string{"n", "m"} {
		records = append(records, ledger.Record{ID: "c0ffee", Nonce: nonce, VGPUs: []ledger.VGPU{{UUID: "GPU-0",
			Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Percent: 50}}}}})
	}
	for _, c := range []*fakeContainer{a, b} {
		c.applyLedger(records, nil)
	}
	one, two := a.gpuTime.Plan(0).Slot, b.gpuTime.Plan(0).Slot
	if one.Cycle == 0 || one.Cycle != two.Cycle || one.Start+one.On > two.Start && two.Start+two.On > one.Start {
		t.Errorf("%+v and %+v", one, two)
	}
}
