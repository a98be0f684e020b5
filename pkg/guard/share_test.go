// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

func testPolicy(kind, rights, action, target int) []byte {
	b := make([]byte, rm.SharePolicySize)
	rm.PutU32(b, rm.SharePolicyTarget, uint32(target))
	rm.PutU32(b, rm.SharePolicyAccess, uint32(rights))
	b[rm.SharePolicyType], b[rm.SharePolicyAction] = byte(kind), byte(action)
	return b
}

// TestPoliciesInside: what a program shares its container's other processes get, no more, and nobody else while no call is under way.
func TestPoliciesInside(t *testing.T) {
	const memory, compute, all, none = 0, 1, accessDup | accessDebug, -1
	type policy struct{ on, kind, rights, action int }
	const client = none
	for _, test := range []struct {
		name        string
		policies    []policy
		dups, debug bool
	}{
		{"nothing", nil, false, false},
		{"the memory with everybody (CUDA IPC)", []policy{{memory, shareTypeAll, accessDup, shareActionCompose}}, true, false},
		{"the memory with everybody, and nobody else", []policy{{memory, shareTypeAll, accessDup, 0}}, true, false},
		{"all with the user (libcuda, for debuggers)", []policy{{client, shareTypeToken, all, shareActionCompose}}, true, true},
		{"all with the user, for debugging only", []policy{{client, shareTypeToken, accessDebug, shareActionCompose}}, false, true},
		{"all with everybody", []policy{{client, shareTypeAll, all, 0}}, true, true},
		{"shared and taken back", []policy{{memory, shareTypeAll, accessDup, shareActionCompose},
			{memory, shareTypeAll, accessDup, shareActionCompose | shareActionRevoke}}, false, false},
		{"taken back from one", []policy{{client, shareTypeAll, all, shareActionCompose},
			{memory, shareTypeAll, accessDup, shareActionCompose | shareActionRevoke}}, false, true},
		{"all, but an object with a policy of its own",
			[]policy{{client, shareTypeToken, all, shareActionCompose}, {compute, shareTypePID, accessDup, 0}}, true, false},
		{"required", []policy{{client, shareTypeAll, all, shareActionCompose | shareActionRequire}}, false, false},
		{"on the GPU", []policy{{client, shareTypeGPU, all, shareActionCompose}}, false, false},
		{"with the process itself", []policy{{client, shareTypePID, all, shareActionCompose}}, false, false},
		{"with a client of nobody's", []policy{{memory, shareTypeClient, all, shareActionCompose}}, false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			p, q := r.start(), r.start()
			open := p.do("open")
			a, handle := open[0], open[1]
			objects := []int{p.do("alloc", a, mib)[0], p.do("contextin", a, 0, engineGR)[2]}
			for _, x := range test.policies {
				if x.on == client {
					p.do("inherit", a, x.kind, x.rights, x.action, 0)
				} else {
					p.do("policy", a, objects[x.on], x.kind, x.rights, x.action, 0)
				}
			}
			b := q.do("open")[0]
			for range 2 { // the first leaves no trace
				if _, err := q.try("dupof", b, handle, objects[memory]); (err == nil) != test.dups {
					t.Errorf("a dup by another process: %v, want %v", err, test.dups)
				}
				if _, err := q.try("debug", b, handle, objects[compute]); (err == nil) != test.debug {
					t.Errorf("a debugger of another process: %v, want %v", err, test.debug)
				}
			}
			again := p.do("open")[0]
			if _, err := p.try("dupof", again, handle, objects[memory]); err != nil && !strings.Contains(test.name, "debugging") {
				t.Errorf("a dup by the owner's process: %v", err)
			}
			x := newUnguarded(r)
			if x.dups(handle, objects[memory]) {
				t.Error("the driver lets everybody have it")
			}
			x.s.Close()
			p.kill()
			q.kill()
			r.empty()
		})
	}
}

// TestPolicyOfClient: a policy for one client of the container is the driver's to keep.
func TestPolicyOfClient(t *testing.T) {
	r := newRig(t)
	p, q := r.start(), r.start()
	a, b := p.do("open"), q.do("open")
	memory := p.do("alloc", a[0], mib)[0]
	p.do("policy", a[0], memory, shareTypeClient, accessDup, shareActionCompose, b[1])
	q.do("dupof", b[0], a[1], memory)
	q.refused("INSUFFICIENT_PERMISSIONS", "dupof", q.do("open")[0], a[1], memory)
	x := newUnguarded(r)
	p.do("policy", a[0], memory, shareTypeClient, accessDup, shareActionCompose, int(x.client))
	if x.dups(a[1], memory) {
		t.Error("a client outside the container has it")
	}
}

// TestPolicyTold: what takes rights away the driver is told as it is, and of a client outside the container it never hears.
func TestPolicyTold(t *testing.T) {
	for _, x := range []struct {
		name         string
		kind, action int
		ours         bool
		want         byte
	}{
		{"everybody", shareTypeAll, shareActionCompose, true, shareTypePID},
		{"the user", shareTypeToken, 0, true, shareTypePID},
		{"the partition", shareTypeSMC, 0, true, shareTypePID},
		{"fabric managers", shareTypeFM, 0, true, shareTypePID},
		{"the process", shareTypePID, 0, true, shareTypePID},
		{"one of the container's", shareTypeClient, 0, true, shareTypeClient},
		{"another one", shareTypeClient, 0, false, shareTypePID},
		{"another one is required", shareTypeClient, shareActionRequire, false, shareTypePID},
		{"no longer another one", shareTypeClient, shareActionRevoke, false, shareTypeAll},
		{"no longer everybody", shareTypeAll, shareActionRevoke, true, shareTypeAll},
		{"no longer the user", shareTypeToken, shareActionRevoke | shareActionCompose, true, shareTypeToken},
		{"the GPU is required", shareTypeGPU, shareActionRequire, true, shareTypeGPU},
		{"unknown", 8, 0, true, 8},
	} {
		if got := inContainer(testPolicy(x.kind, accessDup, x.action, 1), x.ours); got != x.want {
			t.Errorf("%s: %d, want %d", x.name, got, x.want)
		}
	}
}

// TestOtherUser: what is shared with the user is not shared with another one.
func TestOtherUser(t *testing.T) {
	a := newAccount(testConfig("/dev").GPUs)
	from, to := a.addClient(testClient, 1, nil), a.addClient(testClient+1, 2, nil)
	a.addObject(testClient, object{handle: 1, parent: testClient, gpu: noGPU}, noGPU, 0, 0)
	a.setPolicy(testClient, testClient, testPolicy(shareTypeToken, accessDup, shareActionCompose, 0))
	for _, x := range []struct {
		from, to int
		want     bool
	}{{1000, 1000, true}, {0, 0, true}, {0, 1000, false}, {1000, 0, false}, {-1, -1, false}, {-1, 0, false}} {
		a.setMaker(from, x.from, place{})
		a.setMaker(to, x.to, place{})
		if a.policiesLet(from, 1, to, accessDup) != x.want {
			t.Errorf("user %d to user %d: want %v", x.from, x.to, x.want)
		}
	}
	a.freeObject(testClient, 1)
	if a.policiesLet(from, 1, to, accessDup) {
		t.Error("a freed object is shared")
	}
}

// TestWhileShared: an object that two calls have open, one in the other or side by side, is open until both have ended, and no longer.
func TestWhileShared(t *testing.T) {
	var open, changes atomic.Int64
	d := answering(0, func(call *rm.Call) {
		if call.NR() == rm.EscShare {
			changes.Add(1)
			if call.Outer[rm.SharePolicy+rm.SharePolicyAction]&shareActionRevoke == 0 {
				open.Add(1)
			} else {
				open.Store(0) // however often it was opened
			}
		}
	})
	g := withClient(newFakeGuard(t, d))
	memory := openRight{fakeMemory, accessDup}
	while := func(what openRight, f func()) {
		t.Helper()
		if s, e := g.whileShared(Target{}, fakeClient, []openRight{what}, f); s != rm.StatusOK || e != 0 {
			t.Error(s, e)
		}
	}
	while(memory, func() {
		while(memory, func() {})
		if open.Load() != 1 || changes.Load() != 1 {
			t.Errorf("inside: open %d, %d calls", open.Load(), changes.Load())
		}
	})
	if open.Load() != 0 || changes.Load() != 2 {
		t.Errorf("outside: open %d, %d calls", open.Load(), changes.Load())
	}
	entered, leave, left := make(chan bool), make(chan bool), make(chan bool)
	go func() {
		while(memory, func() { entered <- true; <-leave })
		left <- true
	}()
	<-entered
	while(memory, func() {})
	if open.Load() != 1 {
		t.Error("closed while another call has it open")
	}
	leave <- true
	<-left
	if open.Load() != 0 || len(g.account.client(fakeClient).open.calls) != 0 {
		t.Error("open when all calls have ended")
	}
	if s, _ := g.whileShared(Target{}, 0xc1d0ffff, []openRight{memory}, func() { t.Error("of a client that is gone") }); s == rm.StatusOK {
		t.Error("opened an object of no client")
	}
}
