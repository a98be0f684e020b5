// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// Kind is what a list is made of.
type Kind struct {
	Steps int
	Procs int
	Limit uint64 // of the container's device memory: sizes are such that it is reached now and then
	// Malformed makes a third of the calls slightly wrong. Without, calls are as CUDA makes them, and what shares an RM client is not
	// used by two processes at once.
	Malformed bool
	// Real leaves out what the simulated driver allows and the real one only with much more around it.
	Real bool
}

// generator knows what there would be if every operation succeeded.
type generator struct {
	Kind
	r       *rand.Rand
	ops     []Op
	step    int
	names   int // of all things
	procs   []*gproc
	files   []*gfile
	clients []*gclient
	busy    map[any]bool // things that the step uses already
	uuid    bool         // the GPU's is known
}

type gproc struct {
	id   int
	made int
}

type gfile struct {
	id, made int
	kind     string
	holders  map[*gproc]bool
	parked   bool
	used     bool // as export, or for a window
	rooted   bool
	// of nvidia-uvm
	registered bool
	on         *gobj  // the address space of RM's that it is tied to
	next       uint64 // address
	maps       []gmap
	channels   []*gobj
}

type gmap struct {
	base, size uint64
	made       int
}

type gclient struct {
	id, made int
	file     *gfile
	objs     []*gobj
	device   *gobj
	sub      *gobj
}

type gobj struct {
	id, made int
	c        *gclient
	class    uint32
	parent   *gobj
	size     uint64
	engine   uint64
	external bool  // an address space for UVM
	on       *gobj // of addresses: what is mapped there; of a channel group: its address space
}

// Generate makes up a list. The same seed gives the same.
func Generate(seed uint64, k Kind) []Op {
	g := &generator{Kind: k, r: rand.New(rand.NewPCG(seed, 0)), busy: map[any]bool{}}
	for range max(1, k.Procs) {
		g.start()
	}
	for g.step < k.Steps {
		if g.r.IntN(3) > 0 { // else it happens at the same time as the last one
			g.nextStep()
		}
		g.one()
	}
	return g.ops
}

func (g *generator) nextStep() {
	g.step++
	g.busy = map[any]bool{}
}

func (g *generator) name() int { g.names++; return g.names }

// add appends an operation.
func (g *generator) add(p *gproc, do string, args ...any) {
	o := Op{Step: g.step, Proc: p.id, Do: do}
	for _, a := range args {
		switch a := a.(type) {
		case *gfile:
			o.Args = append(o.Args, fmt.Sprint("f", a.id))
		case *gclient:
			o.Args = append(o.Args, fmt.Sprint("c", a.id))
		case *gobj:
			o.Args = append(o.Args, fmt.Sprint("o", a.id))
		case *gproc:
			o.Args = append(o.Args, fmt.Sprint("p", a.id))
		case uint64:
			o.Args = append(o.Args, fmt.Sprintf("%#x", a))
		default:
			o.Args = append(o.Args, fmt.Sprint(a))
		}
	}
	if _, isCall := calls[do]; isCall && g.Malformed && g.r.IntN(3) == 0 {
		o.Wrong = g.wrong()
	}
	g.ops = append(g.ops, o)
}

// wrong makes up how a call is made wrong.
func (g *generator) wrong() []string {
	values := []string{"0", "1", "2", "3", "8", "0x40", "0x7fffffff", "0x80000000", "0xffffffff", "0x10000", "0x200000",
		"0xc1d00000", "0xcaf00000"}
	value := func() string {
		switch n := g.r.IntN(4); {
		case n == 0 && len(g.clients) > 0:
			return fmt.Sprint("c", g.clients[g.r.IntN(len(g.clients))].id)
		case n == 1 && g.names > 0:
			return fmt.Sprint("o", 1+g.r.IntN(g.names))
		case n == 2:
			return fmt.Sprintf("%#x", g.r.Uint32())
		}
		return values[g.r.IntN(len(values))]
	}
	var list []string
	for range 1 + g.r.IntN(2) {
		switch g.r.IntN(8) {
		case 0, 1, 2:
			list = append(list, fmt.Sprintf("o+%d=%s", 4*g.r.IntN(12), value()))
		case 3, 4:
			list = append(list, fmt.Sprintf("b+%d=%s", 4*g.r.IntN(32), value()))
		case 5:
			list = append(list, "ptr="+[]string{"0", "8", "0xffff800000000000", "0x7ffffffff000"}[g.r.IntN(4)])
		case 6:
			if len(g.files) > 0 {
				list = append(list, fmt.Sprint("fd=f", g.files[g.r.IntN(len(g.files))].id))
			}
		case 7:
			list = append(list, "xfer")
		}
	}
	return list
}

// one adds one action that is possible now.
func (g *generator) one() {
	for range 100 {
		total := 0
		for _, a := range actions {
			total += a.weight
		}
		n := g.r.IntN(total)
		for _, a := range actions {
			if n -= a.weight; n < 0 {
				if p := pick(g, g.procs); (p != nil || a.alone) && a.do(g, p) {
					return
				}
				break
			}
		}
	}
}

// free reports that the step may still use a thing, and that it is older than the step.
func free[T interface{ born() int }](g *generator, x T) bool {
	return x.born() < g.step && (g.Malformed || !g.busy[x])
}

func (p *gproc) born() int   { return p.made }
func (f *gfile) born() int   { return f.made }
func (c *gclient) born() int { return c.made }
func (o *gobj) born() int    { return o.made }

// pick chooses one of a list that the step may use and that fits.
func pick[T interface {
	comparable
	born() int
}](g *generator, list []T, fits ...func(T) bool) (x T) {
	var ok []T
	for _, y := range list {
		if free(g, y) && !slices.ContainsFunc(fits, func(f func(T) bool) bool { return !f(y) }) {
			ok = append(ok, y)
		}
	}
	if len(ok) > 0 {
		x = ok[g.r.IntN(len(ok))]
	}
	return x
}

func (g *generator) uses(things ...any) {
	for _, t := range things {
		g.busy[t] = true
	}
}

func (g *generator) start() {
	p := &gproc{id: g.name(), made: g.step}
	g.procs = append(g.procs, p)
	g.add(p, "start")
}

func (g *generator) open(p *gproc, kind string) *gfile {
	f := &gfile{id: g.name(), made: g.step, kind: kind, holders: map[*gproc]bool{p: true}, next: 1 << 44}
	g.files = append(g.files, f)
	g.add(p, "open", f, kind)
	return f
}

// lost is called when a process no longer has a file: with its last holder it is closed, with all that hangs on it.
func (g *generator) lost(f *gfile, p *gproc) {
	delete(f.holders, p)
	if len(f.holders) > 0 || f.parked {
		return
	}
	g.files = slices.DeleteFunc(g.files, func(x *gfile) bool { return x == f })
	g.clients = slices.DeleteFunc(g.clients, func(c *gclient) bool { return c.file == f })
}

func (g *generator) ended(p *gproc) {
	g.procs = slices.DeleteFunc(g.procs, func(x *gproc) bool { return x == p })
	for _, f := range slices.Clone(g.files) {
		if f.holders[p] {
			g.lost(f, p)
		}
	}
}

func held(p *gproc, kind string) func(*gfile) bool {
	return func(f *gfile) bool { return f.holders[p] && f.kind == kind }
}

// clientOf chooses a client that a process can use.
func (g *generator) clientOf(p *gproc) *gclient {
	return pick(g, g.clients, func(c *gclient) bool { return c.file.holders[p] && c.device != nil })
}

func of(class ...uint32) func(*gobj) bool {
	return func(o *gobj) bool { return slices.Contains(class, o.class) }
}

func (g *generator) object(c *gclient, parent *gobj, class uint32, size uint64) *gobj {
	o := &gobj{id: g.name(), made: g.step, c: c, class: class, parent: parent, size: size}
	c.objs = append(c.objs, o)
	return o
}

func (g *generator) size() uint64 {
	switch n := g.r.IntN(20); {
	case n == 0 && g.Malformed:
		return []uint64{0, 1, ^uint64(0), 1 << 63, g.Limit, g.Limit + 1, ^uint64(0) - 1<<20}[g.r.IntN(7)]
	case n < 3:
		return g.Limit / uint64(2+g.r.IntN(6)) &^ 0xffff // the limit is reached
	case n < 8:
		return uint64(1+g.r.IntN(64)) << 12
	}
	return uint64(1+g.r.IntN(256)) << 16
}

// drop forgets an object and what is below it.
func (c *gclient) drop(o *gobj) {
	gone := map[*gobj]bool{o: true}
	for range 8 {
		for _, x := range c.objs {
			if gone[x.parent] {
				gone[x] = true
			}
		}
	}
	c.objs = slices.DeleteFunc(c.objs, func(x *gobj) bool { return gone[x] })
	if gone[c.device] {
		c.device, c.sub = nil, nil
	}
}
