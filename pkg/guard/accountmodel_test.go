// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// model is the naive account: it counts anew from the references each time.
type model struct {
	reserved pools
	clients  map[uint32]map[uint32]modelObject
	files    map[uint32]*file
	others   map[*charge]int
	id       map[*charge]int
	sizes    []quota.Bytes
	spilled  []bool // for each of sizes
	managed  quota.Bytes
}

// pools is memory on the GPU and memory spilled to the host.
type pools struct{ used, spilled quota.Bytes }

func (p *pools) add(size quota.Bytes, spilled bool) {
	if spilled {
		p.spilled += size
	} else {
		p.used += size
	}
}

type modelObject struct {
	parent uint32
	charge int // index in sizes, -1: none
	kind   rm.ClassKind
}

func (m *model) live() (sum pools, zombies, objects int) {
	sum = m.reserved
	sum.used += m.managed
	handles := map[int]int{}
	for _, c := range m.clients {
		for _, o := range c {
			objects++
			if o.charge >= 0 {
				handles[o.charge]++
			}
		}
	}
	others := map[int]int{}
	for ch, n := range m.others {
		others[m.id[ch]] += n
	}
	for i, size := range m.sizes {
		if handles[i] > 0 || others[i] > 0 {
			sum.add(size, m.spilled[i])
		}
		if handles[i] == 0 && others[i] > 0 {
			zombies++
		}
	}
	return sum, zombies, objects
}

func (m *model) free(client, handle uint32) {
	c := m.clients[client]
	if handle == client {
		delete(m.clients, client)
		return
	}
	if _, ok := c[handle]; !ok {
		return
	}
	delete(c, handle)
	for h, o := range c {
		if o.parent == handle {
			m.free(client, h)
		}
	}
}

// TestAccountAgainstModel runs random calls against the account and the model, and compares all numbers after each.
func TestAccountAgainstModel(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { accountAgainstModel(t, seed, 1500) })
	}
}

func accountAgainstModel(t *testing.T, seed uint64, steps int) {
	r := rand.New(rand.NewPCG(seed, 1))
	const limit, spill = 64 * quota.MiB, 48 * quota.MiB
	a := testAccount(limit)
	a.setLimits(0, limit, spill)
	m := &model{clients: map[uint32]map[uint32]modelObject{}, files: map[uint32]*file{},
		others: map[*charge]int{}, id: map[*charge]int{}}
	files := []*file{{}, {}, {}}
	type reservation struct {
		size    quota.Bytes
		spilled bool
	}
	var pending []reservation // not yet settled
	unreserve := func(p reservation) {
		if p.spilled {
			a.unreserveSpill(0, p.size)
		} else {
			a.unreserve(cost{gpu: 0, size: p.size})
		}
	}
	client := func() uint32 { return testClient + r.Uint32N(3) }
	handle := func() uint32 { return 1 + r.Uint32N(24) } // few, so that they are used again
	newHandle := func(c uint32) (uint32, bool) {
		h := handle()
		_, taken := m.clients[c][h]
		return h, !taken // the driver grants no handle that is in use
	}
	// The parent of a new object exists or is the client, as the driver sees to.
	parent := func(c uint32) uint32 {
		h := handle()
		if _, ok := m.clients[c][h]; ok {
			return h
		}
		return c
	}
	chargeOf := func(c, h uint32) *charge {
		if o, ok := a.lookup(c, h); ok {
			return o.charge
		}
		return nil
	}
	kinds := []rm.ClassKind{rm.ClassPlain, rm.ClassTSG, rm.ClassChannel}
	for step := range steps {
		c := client()
		mc, known := m.clients[c]
		what := r.IntN(12)
		switch what {
		case 0: // a new client
			if !known {
				f := files[r.IntN(len(files))]
				a.addClient(c, 1, f)
				m.clients[c], m.files[c] = map[uint32]modelObject{}, f
			}
		case 1: // reserve
			size := quota.Bytes(1+r.Uint64N(12)) * quota.MiB
			before, _, _ := m.live()
			p := reservation{size, r.IntN(2) == 0}
			var ok, want bool
			if p.spilled {
				ok, want = a.reserveSpill(0, size), before.spilled+size <= spill
			} else {
				ok, want = a.reserve(cost{gpu: 0, size: size}, true), before.used+size <= limit
			}
			if ok != want {
				t.Fatalf("step %d: reserve of %+v at %+v: %v", step, p, before, ok)
			}
			if ok {
				m.reserved.add(size, p.spilled)
				pending = append(pending, p)
			}
		case 2: // the driver failed
			if n := len(pending); n > 0 {
				unreserve(pending[n-1])
				m.reserved.add(-pending[n-1].size, pending[n-1].spilled)
				pending = pending[:n-1]
			}
		case 3, 4: // memory
			if n := len(pending); n > 0 {
				size, spilled := pending[n-1].size, pending[n-1].spilled
				h, free := newHandle(c)
				if !free {
					continue
				}
				p := parent(c)
				pending = pending[:n-1]
				m.reserved.add(-size, spilled)
				took := size - quota.Bytes(r.Uint64N(2))*quota.MiB/2
				o := memoryObject(h, p)
				o.spilled = spilled
				if ok := a.addObject(c, o, 0, size, took); ok != known {
					t.Fatalf("step %d: addObject: %v", step, ok)
				}
				if known {
					m.sizes, m.spilled = append(m.sizes, took), append(m.spilled, spilled)
					m.id[chargeOf(c, h)] = len(m.sizes) - 1
					mc[h] = modelObject{p, len(m.sizes) - 1, rm.ClassVidmem}
				}
			}
		case 5: // something else
			h, free := newHandle(c)
			p := parent(c)
			kind := kinds[r.IntN(len(kinds))]
			if free {
				a.addObject(c, object{handle: h, parent: p, kind: kind, gpu: noGPU}, noGPU, 0, 0)
				if known {
					mc[h] = modelObject{p, -1, kind}
				}
			}
		case 6: // dup
			src, srcH := client(), handle()
			so, ok := m.clients[src][srcH]
			h, free := newHandle(c)
			p := parent(c)
			if !ok || !free || !known {
				continue // the driver says no
			}
			a.dupOf(c, p, h, src, srcH)
			mc[h] = modelObject{p, so.charge, so.kind}
		case 7: // free, rarely of the client
			h := handle()
			if r.IntN(20) == 0 {
				h = c
			}
			a.freeObject(c, h)
			m.free(c, h)
		case 8: // export or map
			if ch := a.holdOf(c, handle()); ch != nil {
				m.others[ch]++
			}
		case 9: // unmap, or import
			for ch, n := range m.others {
				h, free := newHandle(c)
				if r.IntN(2) == 0 && free && known {
					a.importObject(c, c, h, export{charge: ch})
					mc[h] = modelObject{c, m.id[ch], rm.ClassVidmem}
					break
				}
				a.dropReference(ch)
				if m.others[ch] = n - 1; n == 1 {
					delete(m.others, ch)
				}
				break
			}
		case 11: // managed memory
			size := quota.Bytes(1+r.Uint64N(12)) * quota.MiB
			if before, _, _ := m.live(); r.IntN(2) == 0 {
				ok := a.reserveManaged(size, true)
				if want := before.used+size <= limit; ok != want {
					t.Fatalf("step %d: managed %v at %+v: %v", step, size, before, ok)
				}
				if ok {
					m.managed += size
				}
			} else {
				size = min(size, m.managed)
				a.releaseManaged(size)
				m.managed -= size
			}
		case 10: // the last close of a file
			if r.IntN(8) == 0 {
				f := files[r.IntN(len(files))]
				a.dropFile(f)
				for h, mf := range m.files {
					if mf == f {
						delete(m.clients, h)
						delete(m.files, h)
					}
				}
			}
		}
		if m.clients[c] == nil {
			delete(m.files, c)
		}
		checkAgainst(t, a, m, fmt.Sprintf("seed %d, step %d, call %d", seed, step, what))
	}
	for c := range m.clients {
		a.freeObject(c, c)
	}
	for ch, n := range m.others {
		for range n {
			a.dropReference(ch)
		}
	}
	for _, p := range pending {
		unreserve(p)
	}
	a.releaseManaged(m.managed)
	if u := a.usage(0); u.used != 0 || u.spilled != 0 || u.managed != 0 || a.objects != 0 || u.counts != (counts{}) ||
		a.zombies != 0 || len(a.clients) != 0 {
		t.Errorf("left over: %v, %d objects, %d groups, %d channels, %d zombies", u.used, a.objects, u.tsgs, u.channels, a.zombies)
	}
}

func checkAgainst(t *testing.T, a *account, m *model, when string) {
	t.Helper()
	want, zombies, objects := m.live()
	u := a.usage(0)
	if u.used != want.used || u.used > u.limit || u.peak > u.limit || u.peak < u.used {
		t.Fatalf("%s: used %v (peak %v), model %v", when, u.used, u.peak, want.used)
	}
	if u.spilled != want.spilled || u.spilled > u.spill || u.managed != m.managed {
		t.Fatalf("%s: spilled %v, managed %v, model %v and %v", when, u.spilled, u.managed, want.spilled, m.managed)
	}
	if a.zombies != zombies || a.hasZombies() != (zombies > 0) {
		t.Fatalf("%s: %d zombies, model %d", when, a.zombies, zombies)
	}
	tsgs, channels := 0, 0
	for c, objs := range m.clients {
		for h, o := range objs {
			got, ok := a.lookup(c, h)
			if !ok || got.parent != o.parent || (got.charge == nil) != (o.charge < 0) {
				t.Fatalf("%s: object %#x: %+v, model %+v", when, h, got, o)
			}
			children := 0
			for _, x := range objs {
				if x.parent == h {
					children++
				}
			}
			if n := a.clients[c].children[h]; n != children {
				t.Fatalf("%s: object %#x has %d children, model %d", when, h, n, children)
			}
			switch o.kind {
			case rm.ClassTSG:
				tsgs++
			case rm.ClassChannel:
				channels++
			}
		}
	}
	if a.objects != objects || u.tsgs != tsgs || u.channels != channels || a.clientCount() != len(m.clients) {
		t.Fatalf("%s: %d objects %d groups %d channels %d clients, model %d %d %d %d", when,
			a.objects, u.tsgs, u.channels, a.clientCount(), objects, tsgs, channels, len(m.clients))
	}
}

// TestAccountConcurrently is for -race, and ends at zero whatever the order.
func TestAccountConcurrently(t *testing.T) {
	const limit = 256 * quota.MiB
	a := testAccount(limit)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	watch := make(chan struct{})
	go func() {
		defer close(watch)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if u := a.usage(0); u.used > limit {
				t.Errorf("used %v", u.used)
				return
			}
			a.byProcess()
			a.hasZombies()
		}
	}()
	for w := range uint32(6) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 2))
			c := testClient + w
			f := &file{}
			for range 20 {
				a.addClient(c, int(w), f)
				var held []*charge
				for i := range uint32(60) {
					size := quota.Bytes(1+r.Uint64N(30)) * quota.MiB
					if a.reserve(cost{gpu: 0, size: size}, true) {
						a.addObject(c, memoryObject(i+1, c), 0, size, size)
					}
					if ch := a.holdOf(c, r.Uint32N(i+1)); ch != nil {
						held = append(held, ch)
					}
					a.dupOf(c, c, 1000+i, testClient+r.Uint32N(6), 1+r.Uint32N(60))
					a.freeObject(c, 1+r.Uint32N(60))
					a.gpuOf(c, i)
					a.roomForObject(rm.ClassTSG, 0, 64, 512)
				}
				if r.IntN(2) == 0 {
					a.dropFile(f)
				} else {
					a.freeObject(c, c)
				}
				for _, ch := range held {
					a.dropReference(ch)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	<-watch
	if u := a.usage(0); u.used != 0 || a.objects != 0 || a.zombies != 0 {
		t.Errorf("left over: %v, %d objects, %d zombies", u.used, a.objects, a.zombies)
	}
}
