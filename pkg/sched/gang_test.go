// SPDX-License-Identifier: Apache-2.0

package sched_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

// machine is several GPUs with an arbiter each, and programs that have a process on each of them.
type machine struct {
	gpus     []*whole
	programs []*program
}

// program does the same steps on all of its GPUs.
type program struct {
	ranks []*rank
	ready []int // of each collective, how many ranks are at it; the first is number base
	steps []job
	done  int // collectives, by all ranks
	left  time.Duration
}

// job is a part of a step: launched after some time of the CPU, then done on the GPU.
type job struct {
	cpu, gpu   time.Duration
	collective bool // its kernels wait, spinning, for those on the other GPUs; it is done while all are on
}

// rank is the part of a program on one GPU.
type rank struct {
	v        *vgpu
	group    *runlist.TSG
	next     int           // job to be launched
	launch   time.Duration // when it will be
	queue    []job
	left     time.Duration // of the first of the queue
	ended    int           // jobs
	passed   int           // collectives
	busy     bool          // the group has work
	ahead    int           // jobs that may be under way
	computed time.Duration
	spun     time.Duration // on the engine at a collective, while others were not
}

func newMachine(n int) *machine {
	m := &machine{}
	for i := range n {
		w := newWhole(0.15)
		w.gpu = runlist.New(runlist.Config{Restart: true, SwitchCost: runlist.DefaultSwitchCost + time.Duration(i)*3*us,
			PreemptCost: runlist.DefaultPreemptCost})
		m.gpus = append(m.gpus, w)
	}
	return m
}

// start has a container with all GPUs begin with a program; ahead are the jobs that it launches before the first is done.
func (m *machine) start(share sched.Share, ahead int, steps ...job) *program {
	p := &program{steps: steps}
	for i, w := range m.gpus {
		m.run(w.gpu.Now() + time.Duration(i)*1300*us)
		v := w.add(share)
		v.gang = sched.Gang{GPUs: 1, Order: uint64(len(m.programs) + 1)}
		r := &rank{v: v, group: v.process(), ahead: ahead, launch: w.gpu.Now() + steps[0].cpu}
		p.ranks = append(p.ranks, r)
	}
	m.programs = append(m.programs, p)
	return p
}

func (r *rank) resident() bool { return r.v.w.gpu.Running() == r.group }

// atCollective reports that a rank waits in a collective.
func (r *rank) atCollective() bool { return len(r.queue) > 0 && r.queue[0].collective }

// moving is what of a program goes on: for each rank, does its job?
func (p *program) moving() (all bool) {
	for _, r := range p.ranks {
		if !r.resident() || !r.atCollective() || r.passed != p.done {
			return false
		}
	}
	return true
}

// next is when something of a program changes.
func (p *program) next(now time.Duration) time.Duration {
	at, together := never, p.moving()
	if together {
		at = now + p.left
	}
	for _, r := range p.ranks {
		if r.launch != never {
			at = min(at, r.launch)
		}
		if len(r.queue) > 0 && !r.queue[0].collective && r.resident() {
			at = min(at, now+r.left)
		}
	}
	return at
}

// elapse does work for some time, in which nobody came or left.
func (p *program) elapse(dt time.Duration, together bool, resident []bool) {
	if together {
		p.left -= dt
	}
	for i, r := range p.ranks {
		switch {
		case !resident[i] || len(r.queue) == 0:
		case !r.queue[0].collective:
			r.left -= dt
			r.computed += dt
		case together:
			r.computed += dt
		default:
			r.spun += dt
		}
	}
}

// settle ends and begins jobs.
func (p *program) settle(now time.Duration) {
	if p.moving() && p.left <= 0 {
		p.done++
		for _, r := range p.ranks {
			r.passed++
			r.pop()
		}
		p.left = 0
	}
	for _, r := range p.ranks {
		for len(r.queue) > 0 && !r.queue[0].collective && r.left <= 0 {
			r.pop()
		}
		if r.launch <= now {
			j := p.steps[r.next%len(p.steps)]
			r.next++
			r.launch = never
			r.queue = append(r.queue, j)
			if len(r.queue) == 1 {
				r.left = j.gpu
			}
		}
		if r.launch == never && r.next-r.ended < r.ahead {
			r.launch = now + p.steps[r.next%len(p.steps)].cpu
		}
		if want := len(r.queue) > 0; want != r.busy {
			if r.busy = want; want {
				r.group.Submit(runlist.Work{Length: time.Hour, Count: 1})
			} else {
				r.group.Stop()
			}
		}
	}
	if p.left <= 0 {
		for _, j := range p.ranks[0].queue {
			if j.collective {
				p.left = j.gpu
				break
			}
		}
	}
}

func (r *rank) pop() {
	r.queue = r.queue[1:]
	r.ended++
	if len(r.queue) > 0 {
		r.left = r.queue[0].gpu
	}
}

// soon is when a GPU, its guards or its arbiter do something.
func (w *whole) soon() time.Duration {
	next, _ := w.gpu.Next()
	next = min(next, w.tick, w.press)
	if len(w.script) > 0 {
		next = min(next, w.script[0].at)
	}
	for _, v := range w.vgpus {
		next = min(next, v.turning, v.edge)
	}
	return next
}

func (m *machine) run(until time.Duration) {
	for now := m.gpus[0].gpu.Now(); now < until; {
		next := until
		for _, w := range m.gpus {
			next = min(next, max(w.soon(), now)+1) // run ends before what is due at its end
		}
		type moved struct {
			together bool
			resident []bool
		}
		state := make([]moved, len(m.programs))
		for i, p := range m.programs {
			next = min(next, max(p.next(now), now))
			state[i].together = p.moving()
			for _, r := range p.ranks {
				state[i].resident = append(state[i].resident, r.resident())
			}
		}
		for _, w := range m.gpus {
			w.run(next)
		}
		for i, p := range m.programs {
			p.elapse(next-now, state[i].together, state[i].resident)
		}
		for _, p := range m.programs {
			p.settle(next)
		}
		now = next
	}
}

// rates is how many rounds of its steps each program does in a second.
func (m *machine) rates(d time.Duration) (rates []float64) {
	before := make([]int, len(m.programs))
	for i, p := range m.programs {
		before[i] = p.ranks[0].ended
	}
	m.run(m.gpus[0].gpu.Now() + d)
	for i, p := range m.programs {
		rates = append(rates, float64(p.ranks[0].ended-before[i])/float64(len(p.steps))/d.Seconds())
	}
	return rates
}

// allReduce is 256 MiB between two H200s, four under way.
func (m *machine) allReduce(share sched.Share) *program {
	return m.start(share, 4, job{gpu: 890 * us, collective: true})
}

// ddp is a training step: kernels which the CPU launches more slowly than the GPU does them, and collectives between them.
func ddpSteps() (steps []job) {
	steps = append(steps, job{cpu: 500 * us, gpu: 100 * us, collective: true}) // buffers
	for range 5 {
		for range 40 {
			steps = append(steps, job{cpu: 160 * us, gpu: 85 * us})
		}
		steps = append(steps, job{cpu: 100 * us, gpu: 200 * us, collective: true})
	}
	return steps
}

func (m *machine) ddp(share sched.Share) *program {
	return m.start(share, 300, ddpSteps()...)
}

func TestGangExplore(t *testing.T) {
	type starter func(m *machine, share sched.Share) *program
	for _, c := range []struct {
		name string
		f    starter
	}{{"allreduce", (*machine).allReduce}, {"ddp", (*machine).ddp}} {
		one := newMachine(2)
		c.f(one, weight(1))
		one.run(2 * time.Second)
		alone := one.rates(4 * time.Second)[0]
		for off := range 2 {
			for _, fixed := range []time.Duration{0, 500 * us, 1 * ms, 2048 * us, 5 * ms, 10 * ms, 20 * ms, 35 * ms} {
				m := newMachine(2)
				if fixed > 0 {
					for _, w := range m.gpus {
						w.fixed = fixed
					}
				}
				m.run(time.Duration(off) * 17 * ms)
				for i, w := range m.gpus {
					w.run(w.gpu.Now())
					w.tick += time.Duration(i) * time.Duration(off) * 7 * ms
				}
				c.f(m, weight(1))
				m.run(m.gpus[0].gpu.Now() + time.Duration(off)*700*us)
				c.f(m, weight(1))
				m.run(3 * time.Second)
				two := m.rates(4 * time.Second)
				spun, on := 0.0, 0.0
				for _, r := range m.programs[0].ranks {
					spun += r.spun.Seconds()
					on += r.spun.Seconds() + r.computed.Seconds()
				}
				t.Log(fmt.Sprintf("%s off %d fixed %v: alone %.1f, two %.1f %.1f: %.1f %%, spun %.2f, pace %v %v, load %.2f; slices %v %v", c.name, off, fixed, alone, two[0], two[1],
					100*(two[0]+two[1])/alone, spun/on, m.gpus[0].state.Pace(), m.gpus[1].state.Pace(), m.gpus[0].gpu.Totals().Load().Seconds()/m.gpus[0].gpu.Now().Seconds(),
					m.gpus[0].vgpus[0].row, m.gpus[1].vgpus[1].row))
			}
		}
	}
}
