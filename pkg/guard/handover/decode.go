// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
)

// MaxSize bounds a state. A container with all objects that it may have comes to some 20 MiB.
const MaxSize = 64 << 20

// maxFD is more than a process can have (fs.nr_open).
const maxFD = 1 << 30

// Encode writes a state.
func Encode(s *State) ([]byte, error) {
	s.Version = Version
	b, err := json.Marshal(s)
	if err == nil && len(b) > MaxSize {
		err = fmt.Errorf("it has %d bytes, %d are the most", len(b), MaxSize)
	}
	if err != nil {
		return nil, fmt.Errorf("write the guard's state: %w", err)
	}
	return b, nil
}

// Decode reads a state. It believes nothing: what comes out refers to nothing that is not there, and names no descriptor twice.
func Decode(b []byte) (*State, error) {
	s, err := decode(b)
	if err != nil {
		return nil, fmt.Errorf("read the guard's state: %w", err)
	}
	return s, nil
}

func decode(b []byte) (*State, error) {
	if len(b) > MaxSize {
		return nil, fmt.Errorf("it has %d bytes, %d are the most", len(b), MaxSize)
	}
	s := &State{}
	if err := json.Unmarshal(b, s); err != nil {
		return nil, err
	}
	if !slices.Contains(Versions(), s.Version) {
		return nil, fmt.Errorf("version %d: want one of %v", s.Version, Versions())
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	return s, nil
}

// Descriptors lists all that the state names.
func (s *State) Descriptors() (fds []int) {
	add := func(list ...int) {
		for _, fd := range list {
			if fd != 0 {
				fds = append(fds, fd)
			}
		}
	}
	weak := func(w *WeakFile) {
		if w != nil {
			add(w.Epoll)
		}
	}
	p := &s.Process
	add(p.Seccomp, p.Control, p.Tally, p.Ledger, p.Sim, p.Reply)
	add(p.Listeners...)
	add(p.GPUNodes...)
	add(p.Held...)
	if p.RM != nil {
		add(p.RM.FD)
	}
	for _, x := range p.OldRM {
		add(x.FD)
	}
	for i := range s.Account.Windows {
		weak(s.Account.Windows[i].File)
	}
	for _, c := range s.Account.Clients {
		for _, e := range c.Events {
			add(e.Epoll)
		}
	}
	for _, f := range s.Files {
		weak(f.Weak)
		add(f.Strong)
	}
	for _, x := range s.Processes {
		add(x.PidFD)
	}
	for _, t := range s.Tasks {
		add(t.PidFD)
	}
	if s.Rescuer != nil {
		add(s.Rescuer.Pipe)
	}
	return fds
}

// checker remembers what is wrong first.
type checker struct{ err error }

func (c *checker) that(ok bool, format string, args ...any) {
	if !ok && c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// ref checks a place in a list, or with zero none.
func (c *checker) ref(what string, i, n int) { c.that(i >= 0 && i <= n, "%s %d of %d", what, i, n) }

// weak checks a file that is followed.
func (c *checker) weak(w *WeakFile) {
	c.that(w == nil || w.Epoll > 0, "a file that is followed by nothing")
}

// gpu checks the index of a GPU, from which on -1 (it is not known) or 0.
func (c *checker) gpu(i, least, n int) { c.that(i >= least && i < n, "GPU %d of %d", i, n) }

// count checks a number that is added to and subtracted from.
func (c *checker) count(what string, n int64) {
	c.that(n >= 0 && n <= math.MaxInt32, "%s: %d", what, n)
}

// Check is what Decode does with a state that was read in another way.
func (s *State) Check() error { return s.check() }

func (s *State) check() error {
	c := &checker{}
	n := len(s.Config.GPUs)
	c.that(n > 0 && len(s.Account.GPUs) == n, "%d GPUs, and %d accounts", n, len(s.Account.GPUs))
	s.checkDescriptors(c)
	s.checkProcess(c, n)
	s.checkAccount(c, n)
	for i := range s.Files {
		s.checkFile(c, &s.Files[i])
	}
	s.checkTasks(c)
	for _, x := range s.GPUTime {
		c.gpu(x.GPU, 0, n)
		c.count("tries", int64(x.Refused))
		c.that(x.Local.Plan.Valid(), "the plan of GPU %d", x.GPU)
	}
	return c.err
}

func (s *State) checkDescriptors(c *checker) {
	fds := s.Descriptors()
	slices.Sort(fds)
	for i, fd := range fds {
		c.that(fd > 2 && fd < maxFD, "descriptor %d", fd)
		c.that(i == 0 || fd != fds[i-1], "descriptor %d is named twice", fd)
	}
}

func (s *State) checkProcess(c *checker, gpus int) {
	p := &s.Process
	c.that(p.Seccomp > 0 && p.Control > 0 && len(p.Listeners) > 0, "a socket or the filter is missing")
	for _, fd := range p.Listeners {
		c.that(fd > 0, "a filter without a descriptor")
	}
	c.that(p.Trial >= 0, "process %d, by which the program was tried", p.Trial)
	c.that(p.Keeper >= 0, "process %d, the keeper", p.Keeper)
	c.that(p.Nice == nil || *p.Nice >= urgentNice && *p.Nice <= 19, "nice value")
	c.that(p.InitPID > 0, "first process %d", p.InitPID)
	if p.RM != nil {
		c.that(len(p.RM.Devices) == gpus && len(p.RM.Subdevices) == gpus && len(p.BAR1) == gpus, "the guard's RM client has not %d GPUs", gpus)
		c.that(p.RM.FD > 0 || p.RM.File > 0, "the guard's RM client has no file")
	}
	for _, x := range p.OldRM {
		c.that(x.Handle > 0 && (x.FD > 0 || x.File > 0), "an RM client of a guard that was killed has no name, or no file")
	}
	threads := map[int]bool{}
	for _, x := range p.Roots {
		c.that(x.TID > 0 && !threads[x.TID], "thread %d in a root alloc", x.TID)
		threads[x.TID] = true
	}
	for _, i := range p.Instances {
		c.gpu(i, 0, gpus)
	}
	for _, b := range p.Buffers {
		c.gpu(b.GPU, 0, gpus)
	}
}

func (s *State) checkAccount(c *checker, gpus int) {
	a := &s.Account
	for _, x := range a.Charges {
		c.gpu(x.GPU, 0, gpus)
		for _, n := range []int{x.Handles, x.References, x.Windows, x.Fabrics} {
			c.count("references", int64(n))
		}
	}
	handles := map[uint32]bool{}
	for _, x := range a.Clients {
		c.that(!handles[x.Handle], "client %#x is there twice", x.Handle)
		handles[x.Handle] = true
		c.ref("file", x.File, len(s.Files))
		for _, e := range x.Events {
			c.weak(&e)
		}
	}
	s.checkObjects(c, gpus)
	owned := map[int]bool{}
	own := func(list []int) {
		for _, i := range list {
			c.that(i > 0, "window 0")
			c.ref("window", i, len(a.Windows))
			c.that(!owned[i], "window %d is there twice", i)
			owned[i] = true
		}
	}
	for _, o := range a.Objects {
		own(o.Windows)
		own(o.KeptWindows)
	}
	own(a.Loose)
	for _, w := range a.Windows {
		c.gpu(w.GPU, 0, gpus)
		c.ref("charge", w.Charge, len(a.Charges))
		c.that(w.Kept != (w.File != nil), "a window's file")
		c.that(!w.Kept || w.Handle != 0, "a window that is kept by nothing")
		c.weak(w.File)
		old := slices.ContainsFunc(s.Process.OldRM, func(x RMClient) bool { return x.Handle == w.Own })
		c.that(old || w.Own == 0 && (s.Process.RM != nil || w.Handle == 0), "a window, and no RM client")
	}
	for _, m := range a.DMA {
		c.that(m.Mapper > 0 && m.Memory > 0, "a mapping of nothing")
		c.ref("object", m.Mapper, len(a.Objects))
		c.ref("object", m.Memory, len(a.Objects))
		c.gpu(m.GPU, 0, gpus)
	}
	for _, r := range a.Retained {
		c.ref("charge", r.Context, len(a.Charges))
		c.ref("object", r.Channel, len(a.Objects))
		c.gpu(r.CountsOn, -1, gpus)
		c.gpu(r.RunlistGPU, -1, gpus)
		c.count("calls", int64(r.Calls))
	}
	for _, r := range a.Runlists {
		c.gpu(r.GPU, -1, gpus)
		c.count("channels", int64(r.N))
	}
	for _, n := range []int64{int64(a.Windowed), int64(a.Zombies), a.Exported, a.UVMMaps} {
		c.count("a sum", n)
	}
}

func (s *State) checkObjects(c *checker, gpus int) {
	a := &s.Account
	type name struct {
		client int
		handle uint32
	}
	seen := map[name]bool{}
	for i := range a.Objects {
		o := &a.Objects[i]
		c.that(o.Client > 0, "an object of no client")
		c.ref("client", o.Client, len(a.Clients))
		c.that(!seen[name{o.Client, o.Handle}], "object %#x is there twice", o.Handle)
		seen[name{o.Client, o.Handle}] = true
		c.gpu(o.GPU, -1, gpus)
		c.gpu(o.CountsOn, -1, gpus)
		c.gpu(o.RunlistGPU, -1, gpus)
		c.ref("charge", o.Charge, len(a.Charges))
		c.ref("charge", o.SecondCharge, len(a.Charges))
		c.ref("channel that is kept", o.Retained, len(a.Retained))
		c.that(o.Group >= 0, "channel group %d", o.Group)
		for _, m := range o.Notifies {
			c.that(m > 0, "object 0")
			c.ref("object", m, len(a.Objects))
		}
	}
}

func (s *State) checkFile(c *checker, f *File) {
	charge := func(i int) { c.ref("charge", i, len(s.Account.Charges)) }
	c.that((f.Weak != nil) != (f.Strong != 0), "a file with %d descriptors", f.Strong)
	c.weak(f.Weak)
	c.count("clients", int64(f.Clients))
	for _, e := range f.Exports {
		charge(e.Charge)
	}
	for _, m := range f.Maps {
		c.that(m.Base <= m.End, "a mapping from %#x to %#x", m.Base, m.End)
		charge(m.Charge)
		charge(m.Tables)
	}
	for _, x := range f.Channels {
		c.that(x.Kept > 0, "a registered channel that is not kept")
		c.ref("channel that is kept", x.Kept, len(s.Account.Retained))
	}
	for _, r := range f.Ranges {
		for _, t := range r.Tables {
			c.that(t > 0, "charge 0")
			charge(t)
		}
	}
}

func (s *State) checkTasks(c *checker) {
	processes := map[int]bool{}
	for _, p := range s.Processes {
		c.that(p.PID > 0 && p.PidFD > 0 && !processes[p.PID], "process %d", p.PID)
		processes[p.PID] = true
	}
	tasks := map[int]bool{}
	for _, t := range s.Tasks {
		c.that(t.TID > 0 && !tasks[t.TID] && processes[t.PID], "thread %d of process %d", t.TID, t.PID)
		tasks[t.TID] = true
		if v := t.Saved; v != nil {
			c.that(len(v.Out) == len(v.Before) && len(v.Out) > v.Blocks && v.Blocks >= 0 && v.Blocks <= 1, "a saved answer of %d parts", len(v.Out))
			c.that(v.Size >= 0 && v.Size <= MaxSize, "a saved answer of %d bytes", v.Size)
			for i := range min(len(v.Out), len(v.Before)) {
				c.that(len(v.Out[i].Data) == len(v.Before[i].Data), "a saved answer whose parts differ in length")
			}
		}
	}
	for _, x := range s.Managed.Spans {
		c.that(x.PID > 0 && x.Base < x.End, "managed memory from %#x to %#x of process %d", x.Base, x.End, x.PID)
	}
}
