// SPDX-License-Identifier: Apache-2.0

// Package history keeps what a node's GPUs and their containers got and had over the last time, in steps, from one look at the node after
// the other: some minutes for `cgpu top`, an hour for `cgpu web`. It is bounded: so many points of each GPU and of each container that is
// there.
package history

import (
	"maps"
	"time"

	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// Unknown stands for what nobody can tell.
const Unknown = -1

// Point is what a container, or a GPU's containers together, got and had over a time.
type Point struct {
	Got      sched.Permille // of the GPU's time
	Entitled sched.Permille // what the share of the GPU's busy time would have been, while there was work
	Used     int64          // bytes of the GPU's memory, the most that was seen
}

var nothing = Point{Unknown, Unknown, Unknown}

// Line is the history of a container on a GPU, or of a GPU.
type Line struct {
	Number int     // nobody else's in this History
	Now    Point   // between the last two looks
	Points []Point // a step each, the oldest first; the last ends with the step that is not over
}

// History is for one goroutine.
type History struct {
	Step   time.Duration
	points int
	begun  time.Time
	at     time.Time // of the last look
	looks  int
	lines  map[key]*line
	last   int // number given out
}

// key has no nonce for the GPU itself.
type key struct{ gpu, nonce string }

// New keeps so many points.
func New(step time.Duration, points int) *History {
	return &History{Step: step, points: points, lines: map[key]*line{}}
}

// Add takes a look. Who is not there any more is forgotten.
func (h *History) Add(at time.Time, v snapshot.View) {
	if h.looks++; h.looks == 1 {
		h.begun, h.at = at, at
	}
	passed, step := at.Sub(h.at), int(at.Sub(h.begun)/h.Step)
	h.at = at
	for _, g := range v.GPUs {
		sum := reading{passed: passed, used: int64(g.Used)}
		for _, x := range g.VGPUs {
			l := h.line(key{g.UUID, x.Nonce}, step)
			r := l.read(x, passed)
			l.add(r, step, h.points)
			sum.timed = sum.timed || r.timed
			sum.got += r.got
			sum.entitled += r.entitled
		}
		h.line(key{g.UUID, ""}, step).add(sum, step, h.points)
	}
	maps.DeleteFunc(h.lines, func(_ key, l *line) bool { return l.seen != h.looks })
}

// Of is the history of a container on a GPU, by its nonce; of the GPU without one.
func (h *History) Of(gpu, nonce string) Line {
	l := h.lines[key{gpu, nonce}]
	if l == nil {
		return Line{Now: nothing}
	}
	return Line{l.number, l.now, l.points}
}

// line finds a line, or begins one.
func (h *History) line(k key, step int) *line {
	l := h.lines[k]
	if l == nil {
		h.last++
		l = &line{number: h.last, step: step, now: nothing, sum: reading{used: Unknown}}
		h.lines[k] = l
	}
	l.seen = h.looks
	return l
}

type line struct {
	number, seen int
	counted      bool // the counters are those of the last look
	gpu, granted time.Duration
	ahead        time.Duration // of granted is what the guard's figure stood in for
	now          Point
	step         int     // that is not over
	sum          reading // of it
	points       []Point
}

// reading is what was counted over a time.
type reading struct {
	timed                 bool // got and entitled are known, of passed
	passed, got, entitled time.Duration
	used                  int64
}

// point is the reading in parts of the GPU's time.
func (r reading) point() Point {
	p := nothing
	p.Used = r.used
	if r.timed && r.passed > 0 {
		part := func(d time.Duration) sched.Permille { return min(sched.Permille(d*1000/r.passed), sched.Whole) }
		p.Got, p.Entitled = part(r.got), part(r.entitled)
	}
	return p
}

// read compares a container's counters with those of the last look.
func (l *line) read(x snapshot.VGPU, passed time.Duration) reading {
	r := reading{passed: passed, used: Unknown}
	if x.Answered {
		r.used = int64(x.Used)
	}
	c := x.Compute
	if c == nil || !c.Exact {
		l.counted = false
		return r
	}
	r.got, r.entitled = c.GPUTime-l.gpu, c.Granted-l.granted
	r.timed = l.counted && r.got >= 0 && r.entitled >= 0
	if r.timed {
		r.entitled = l.standIn(r, time.Duration(c.Entitled)*passed/time.Duration(sched.Whole))
	} else {
		r.got, r.entitled, l.ahead = 0, 0, 0
	}
	l.counted, l.gpu, l.granted = true, c.GPUTime, c.Granted
	return r
}

// standIn is what r has as entitled, or lately, by what the guard says of the last second, where that is not counted yet: of who is alone
// on a GPU it is counted once in some seconds, and what he got meanwhile is known.
func (l *line) standIn(r reading, lately time.Duration) time.Duration {
	if r.entitled == 0 && r.got > 0 {
		l.ahead += lately
		return lately
	}
	if l.ahead > 0 {
		r.entitled, l.ahead = max(r.entitled-l.ahead, min(lately, r.entitled)), 0
	}
	return r.entitled
}

// add takes a reading into the step, and ends steps that are over.
func (l *line) add(r reading, step, most int) {
	if step > l.step {
		l.points = append(l.points, l.sum.point())
		for range min(step-l.step-1, most) { // in which nobody looked: the average is known
			l.points = append(l.points, r.point())
		}
		if over := len(l.points) - most; over > 0 {
			l.points = append(l.points[:0], l.points[over:]...)
		}
		l.step, l.sum = step, reading{used: Unknown}
	}
	l.now = r.point()
	l.sum.used = max(l.sum.used, r.used)
	if r.timed {
		l.sum.timed = true
		l.sum.passed += r.passed
		l.sum.got += r.got
		l.sum.entitled += r.entitled
	}
}
