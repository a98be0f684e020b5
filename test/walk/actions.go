// SPDX-License-Identifier: Apache-2.0

package walk

// actions are what a walk does next, each as often as its weight says. do adds it and returns true, if there is what it needs.
var actions = []struct {
	weight int
	alone  bool // needs no process
	do     func(*generator, *gproc) bool
}{
	{weight: 10, do: newClient},
	{weight: 40, do: newMemory},
	{weight: 14, do: newOther},
	{weight: 14, do: newChannel},
	{weight: 30, do: freeSomething},
	{weight: 16, do: dupSomething},
	{weight: 4, do: shareSomething},
	{weight: 12, do: exportSomething},
	{weight: 10, do: importSomething},
	{weight: 10, do: newSpace},
	{weight: 24, do: mapSomething},
	{weight: 12, do: unmapSomething},
	{weight: 10, do: registerChannel},
	{weight: 4, do: ask},
	{weight: 14, do: mapByRM},
	{weight: 10, do: passSomething},
	{weight: 4, do: forkOne},
	{weight: 3, do: execOne},
	{weight: 4, do: endOne},
	{weight: 3, alone: true, do: startOne},
	{weight: 8, do: closeSomething},
	{weight: 2, do: lendIdentity},
}

// newClient makes an RM client with device and subdevice, as every user of a GPU does.
func newClient(g *generator, p *gproc) bool {
	if len(g.clients) > 12 {
		return false
	}
	g.uses(p)
	f, gpu := g.open(p, "ctl"), g.open(p, "gpu")
	c := &gclient{id: g.name(), made: g.step, file: f}
	f.rooted = true
	g.clients = append(g.clients, c)
	// One after the other: each needs what the one before has made.
	g.nextStep()
	g.add(p, "root", f, c)
	if g.Real {
		g.nextStep()
		g.add(p, "cards", c)
		g.nextStep()
		g.add(p, "register", gpu, f)
		g.nextStep()
		g.add(p, "attach", c)
		g.nextStep()
		g.add(p, "instance", c)
	} else if g.r.IntN(2) == 0 {
		g.nextStep()
		g.add(p, "register", gpu, f)
	}
	g.nextStep()
	c.device = g.object(c, nil, classDevice, 0)
	g.add(p, "alloc", c, c.device, c, "0x80")
	g.nextStep()
	c.sub = g.object(c, c.device, classSubdevice, 0)
	g.add(p, "alloc", c, c.sub, c.device, "0x2080")
	if !g.uuid {
		g.uuid = true
		g.nextStep()
		g.add(p, "uuid", c, c.sub)
	}
	return true
}

func newMemory(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	g.uses(p, c)
	size := g.size()
	o := g.object(c, c.device, classVidmem, size)
	switch n := g.r.IntN(10); {
	case n < 6:
		g.add(p, "alloc", c, o, c.device, "0x40", size)
	case n < 8:
		fn := []int{2, 14, 6}[g.r.IntN(3)]
		if g.Real {
			fn = 2
		}
		g.add(p, "heap", c, o, c.device, fn, size)
	default:
		o.class = classSystem
		if g.Real {
			size = min(size, 16<<20) // of the host
		}
		g.add(p, "alloc", c, o, c.device, "0x3e", size)
	}
	return true
}

func newOther(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	g.uses(p, c)
	switch g.r.IntN(5) {
	case 0, 1: // an address space of RM's, or for UVM (IS_EXTERNALLY_OWNED, ENABLE_PAGE_FAULTING)
		o := g.object(c, c.device, classVASpace, 0)
		flags := uint64(0)
		if o.external = g.r.IntN(2) == 0; o.external {
			flags = 1<<3 | 1<<6
		}
		g.add(p, "alloc", c, o, c.device, "0x90f1", flags)
	case 2: // addresses
		vas := pick(g, c.objs, of(classVASpace), func(o *gobj) bool { return !o.external })
		if vas == nil {
			vas = g.object(c, c.device, classVASpace, 0)
			g.add(p, "alloc", c, vas, c.device, "0x90f1", uint64(0))
			g.nextStep()
			g.uses(p, c)
		}
		size := uint64(1+g.r.IntN(64)) << 21
		o := g.object(c, c.device, classVirtual, size)
		g.add(p, "alloc", c, o, c.device, "0x50a0", size, vas)
	case 3:
		gpu := pick(g, g.files, held(p, "gpu"))
		if gpu == nil || g.Real {
			return false
		}
		o := g.object(c, c.device, classSystem, 1<<12)
		g.add(p, "pin", c, o, c.device, gpu, 1<<12)
	case 4: // the file may have a client, or be closed before the memory is freed
		gpu, ctl := pick(g, g.files, held(p, "gpu")), pick(g, g.files, held(p, "ctl"))
		if gpu == nil || ctl == nil || g.Real {
			return false
		}
		size := uint64(1+g.r.IntN(16)) << 20
		g.add(p, "hostmap", c, g.object(c, c.device, classSystem, size), c.device, gpu, ctl, size)
	}
	return true
}

// newChannel makes a channel group, or something in one.
func newChannel(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	g.uses(p, c)
	group := pick(g, c.objs, of(classGroup))
	channel := pick(g, c.objs, of(classChannel))
	switch n := g.r.IntN(8); {
	case n < 3 || group == nil:
		engine := []uint64{1, 1, 11, 0}[g.r.IntN(4)]
		if g.Real {
			engine = 1
		}
		o := g.object(c, c.device, classGroup, 0)
		o.engine = engine
		g.add(p, "alloc", c, o, c.device, "0xa06c", engine)
	case g.Real: // the rest needs memory of its own, and buffers
		g.add(p, "timeslice", c, group)
	case n < 5 || channel == nil:
		o := g.object(c, group, classChannel, 0)
		o.engine = group.engine
		g.add(p, "alloc", c, o, group, "0xc86f", group.engine)
	case n < 6:
		g.add(p, "alloc", c, g.object(c, channel, classCompute, 0), channel, "0xcbc0")
	case n < 7:
		g.add(p, "alloc", c, g.object(c, group, classShare, 0), group, "0x9067")
	default:
		g.add(p, []string{"schedule", "timeslice"}[g.r.IntN(2)], c, group)
	}
	return true
}

func freeSomething(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	o := pick(g, c.objs)
	if o == nil || (o == c.device || o == c.sub) && g.r.IntN(10) > 0 {
		return false
	}
	g.uses(p, c)
	switch n := g.r.IntN(20); {
	case n == 0:
		g.add(p, "drop", c)
		for i, x := range g.clients {
			if x == c {
				g.clients = append(g.clients[:i:i], g.clients[i+1:]...)
				break
			}
		}
		return true
	case n < 3 && o.class == classVidmem:
		g.add(p, "heapfree", c, o, c.device)
	default:
		g.add(p, "free", c, o)
	}
	c.drop(o)
	return true
}

func dupSomething(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	from := pick(g, g.clients, func(x *gclient) bool { return x.device != nil && (!g.Real || x.file.holders[p]) })
	if from == nil {
		return false
	}
	classes := []uint32{classVidmem, classSystem}
	if g.Malformed {
		classes = append(classes, classGroup, classChannel, classVASpace, classDevice, classCompute)
	}
	src := pick(g, from.objs, of(classes...))
	if src == nil {
		return false
	}
	g.uses(p, c, from)
	g.add(p, "dup", c, g.object(c, c.device, src.class, src.size), c.device, from, src)
	return true
}

func shareSomething(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	o := pick(g, c.objs, of(classVidmem))
	if o == nil {
		return false
	}
	g.uses(p, c)
	kind, action := 1, 0
	if g.Malformed {
		kind, action = g.r.IntN(6), g.r.IntN(6)
	}
	g.add(p, "share", c, o, kind, action)
	return true
}

func exportSomething(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	o := pick(g, c.objs, of(classVidmem))
	if o == nil {
		return false
	}
	g.uses(p, c)
	f := pick(g, g.files, held(p, "ctl"), func(f *gfile) bool { return f.used && g.Malformed })
	if f == nil || g.r.IntN(3) > 0 {
		f = g.open(p, "ctl")
		g.nextStep()
		g.uses(p, c)
	}
	f.used = true
	g.add(p, "export", c, o, c.device, f)
	return true
}

func importSomething(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	f := pick(g, g.files, held(p, "ctl"), func(f *gfile) bool { return f.used || g.Malformed && g.r.IntN(8) == 0 })
	if f == nil {
		return false
	}
	g.uses(p, c)
	g.add(p, "import", c, g.object(c, c.device, classVidmem, 1<<16), c.device, f)
	return true
}

// newSpace makes an address space of UVM's, and ties it to one of RM's.
func newSpace(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	g.uses(p, c)
	f := pick(g, g.files, held(p, "uvm"))
	if f == nil || g.r.IntN(3) == 0 {
		f = g.open(p, "uvm")
		g.nextStep()
		g.add(p, "uvm", f)
		if !g.Real {
			return true
		}
	}
	if f.registered {
		return false
	}
	f.registered = true
	g.nextStep()
	g.add(p, "uvmgpu", f, c)
	vas := g.object(c, c.device, classVASpace, 0)
	vas.external, f.on = true, vas
	g.nextStep()
	g.add(p, "alloc", c, vas, c.device, "0x90f1", uint64(1<<3|1<<6))
	g.nextStep()
	g.add(p, "uvmspace", f, c, vas)
	return true
}

func mapSomething(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	f := pick(g, g.files, held(p, "uvm"), func(f *gfile) bool { return f.registered || !g.Real })
	if c == nil || f == nil {
		return false
	}
	o := pick(g, c.objs, of(classVidmem, classSystem))
	if o == nil || o.size == 0 || o.size > g.Limit {
		return false
	}
	g.uses(p, c, f)
	const most = 32 << 20
	size := min((o.size+0xffff)&^0xffff, most)
	if o.class == classSystem {
		size = min(o.size, most)
	}
	offset := uint64(0)
	if g.Malformed && g.r.IntN(3) == 0 {
		size = max(size/uint64(1+g.r.IntN(4))&^0xffff, 1<<16)
		offset = uint64(g.r.IntN(2)) << 16
	}
	if len(f.maps) > 0 && g.Malformed && g.r.IntN(4) == 0 { // over another one
		m := f.maps[g.r.IntN(len(f.maps))]
		at := m.base + uint64(g.r.IntN(3))<<16
		g.add(p, "uvmmap", f, at, size, c, o, offset)
		f.maps = append(f.maps, gmap{at, size, g.step})
		return true
	}
	const piece = 2 << 20
	if len(f.maps) > 0 && g.r.IntN(4) == 0 { // over a part of another one, with which it ends
		m := f.maps[g.r.IntN(len(f.maps))]
		if m.made < g.step && m.size >= piece && size >= piece {
			g.add(p, "uvmmap", f, m.base+uint64(g.r.IntN(int(m.size/piece)))*piece, uint64(piece), c, o, uint64(0))
			return true
		}
	}
	at := f.next
	f.next += 2 * most
	if own := map[int]string{0: "uvmregion", 1: "uvmpool"}[g.r.IntN(16)]; own != "" && !g.Real { // nothing can be mapped in it
		g.add(p, own, f, at, uint64(piece))
		f.maps = append(f.maps, gmap{at, piece, g.step})
		return true
	}
	g.add(p, "uvmrange", f, at, size)
	g.nextStep()
	g.uses(p, c, f)
	if g.r.IntN(8) == 0 { // nothing is behind it but page tables
		g.add(p, "uvmsparse", f, at, size)
	} else {
		g.add(p, "uvmmap", f, at, size, c, o, offset)
	}
	f.maps = append(f.maps, gmap{at, size, g.step})
	return true
}

func unmapSomething(g *generator, p *gproc) bool {
	f := pick(g, g.files, held(p, "uvm"), func(f *gfile) bool { return len(f.maps) > 0 })
	if f == nil {
		return false
	}
	i := g.r.IntN(len(f.maps))
	m := f.maps[i]
	if m.made >= g.step {
		return false
	}
	g.uses(p, f)
	if g.Malformed && g.r.IntN(3) == 0 { // a part of it, or more
		m.base += uint64(g.r.IntN(2)) << 16
		m.size = max(uint64(g.r.IntN(4))<<15, m.size/uint64(1+g.r.IntN(3)))
	}
	switch n := g.r.IntN(10); {
	case n == 0 && g.Malformed:
		g.add(p, "uvmnospace", f)
		f.maps, f.registered = nil, false
		return true
	case n < 6:
		g.add(p, "uvmunmap", f, m.base, m.size)
		if g.Real { // the range is free again only then
			g.nextStep()
			g.uses(p, f)
			g.add(p, "uvmfree", f, m.base, m.size)
		}
	default:
		g.add(p, "uvmfree", f, m.base, m.size)
	}
	f.maps = append(f.maps[:i:i], f.maps[i+1:]...)
	return true
}

// registerChannel gives a channel of an address space to the UVM file that has this, which holds it from then on.
func registerChannel(g *generator, p *gproc) bool {
	f := pick(g, g.files, held(p, "uvm"), func(f *gfile) bool { return f.on != nil && f.on.c.file.holders[p] })
	if g.Real || f == nil || !free(g, f.on.c) || f.on.c.device == nil {
		return false
	}
	c := f.on.c
	g.uses(p, c, f)
	if len(f.channels) > 0 && g.r.IntN(2) == 0 {
		ch := f.channels[g.r.IntN(len(f.channels))]
		g.add(p, "uvmnochannel", f, ch.c, ch)
		return true
	}
	ch := pick(g, c.objs, of(classChannel), func(o *gobj) bool { return o.parent.on == f.on || g.Malformed && g.r.IntN(4) == 0 })
	if ch == nil {
		group := g.object(c, c.device, classGroup, 0)
		group.engine, group.on = 1, f.on
		g.add(p, "alloc", c, group, c.device, "0xa06c", group.engine, f.on)
		g.nextStep()
		ch = g.object(c, group, classChannel, 0)
		g.add(p, "alloc", c, ch, group, "0xc86f", group.engine)
		g.nextStep()
		g.uses(p, c, f)
	}
	f.channels = append(f.channels, ch)
	f.next += 64 << 20
	g.add(p, "uvmchannel", f, c, ch, f.next, uint64(32<<20))
	return true
}

func ask(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil || c.sub == nil || !free(g, c.sub) {
		return false
	}
	g.uses(p, c)
	g.add(p, "info", c, c.sub)
	return true
}

// mapByRM maps memory at addresses of RM's, or lets the processor see it.
func mapByRM(g *generator, p *gproc) bool {
	c := g.clientOf(p)
	if c == nil {
		return false
	}
	m, v := pick(g, c.objs, of(classVidmem)), pick(g, c.objs, of(classVirtual))
	if m == nil || m.size == 0 {
		return false
	}
	g.uses(p, c)
	if v == nil || g.r.IntN(5) == 0 {
		f := g.open(p, "gpu")
		g.nextStep()
		g.uses(p, c)
		if g.Real {
			g.add(p, "register", f, c.file)
			g.nextStep()
			g.uses(p, c)
		}
		g.add(p, "bar", c, m, c.device, f, min(m.size, 1<<16))
		return true
	}
	// Addresses hold one thing at a time.
	if v.on != nil && (!g.Malformed || g.r.IntN(3) == 0) {
		g.add(p, "unmapdma", c, v.on, c.device, v)
		v.on = nil
		return true
	}
	v.on = m
	g.add(p, "mapdma", c, m, c.device, v, min(m.size, v.size))
	return true
}

func passSomething(g *generator, p *gproc) bool {
	f := pick(g, g.files, func(f *gfile) bool { return f.holders[p] })
	if f == nil {
		return false
	}
	if g.r.IntN(4) == 0 { // nobody reads it
		g.uses(p, f)
		f.parked = true
		delete(f.holders, p)
		g.add(p, "park", f)
		return true
	}
	to := pick(g, g.procs, func(q *gproc) bool { return q != p })
	if to == nil {
		return false
	}
	g.uses(p, to, f)
	f.holders[to] = true
	g.add(p, "pass", f, to)
	g.nextStep()
	return true
}

func forkOne(g *generator, p *gproc) bool {
	if len(g.procs) >= g.Procs+2 {
		return false
	}
	g.nextStep()
	q := &gproc{id: g.name(), made: g.step}
	g.add(p, "fork", q)
	g.procs = append(g.procs, q)
	for _, f := range g.files {
		if f.holders[p] {
			f.holders[q] = true
		}
	}
	g.nextStep()
	return true
}

func execOne(g *generator, p *gproc) bool {
	g.nextStep()
	var kept []any
	for _, f := range append([]*gfile(nil), g.files...) {
		if !f.holders[p] {
			continue
		}
		if g.r.IntN(2) == 0 {
			kept = append(kept, f)
		} else {
			g.lost(f, p)
		}
	}
	g.add(p, "exec", kept...)
	g.nextStep()
	return true
}

// endOne ends a process, in the middle of calls if they need not be well-formed.
func endOne(g *generator, p *gproc) bool {
	if len(g.procs) < 2 {
		return false
	}
	if !g.Malformed {
		g.nextStep()
	}
	do := []string{"kill", "kill", "exit"}[g.r.IntN(3)]
	g.add(p, do)
	g.ended(p)
	g.nextStep()
	return true
}

func startOne(g *generator, _ *gproc) bool {
	if len(g.procs) >= g.Procs {
		return false
	}
	g.nextStep()
	g.start()
	g.nextStep()
	return true
}

func closeSomething(g *generator, p *gproc) bool {
	f := pick(g, g.files, func(f *gfile) bool { return f.holders[p] })
	if f == nil {
		return false
	}
	g.uses(p, f)
	g.lost(f, p)
	g.add(p, "close", f)
	g.nextStep()
	return true
}

// lendIdentity lets a file use the clients of another.
func lendIdentity(g *generator, p *gproc) bool {
	if g.Real {
		return false
	}
	f, whose := pick(g, g.files, held(p, []string{"ctl", "gpu"}[g.r.IntN(2)])), pick(g, g.files, held(p, "ctl"))
	if f == nil || whose == nil || f.rooted {
		return false
	}
	g.uses(p, f, whose)
	g.add(p, "register", f, whose)
	return true
}
