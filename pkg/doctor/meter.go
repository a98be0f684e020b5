// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Times of a measurement, about five seconds for a GPU. partTime bounds each wait: a driver may hang.
const (
	partTime    = 10 * time.Second
	settleTime  = 400 * time.Millisecond // the arbiter sees who has work, and how long its kernels are
	windowTime  = 1200 * time.Millisecond
	quietTime   = 250 * time.Millisecond // without the end of a kernel: the pause is there
	pauseWanted = 500                    // milliseconds: the ledger is read four times a second
	loadMemory  = "1GiB"                 // a CUDA context has some hundred MiB
)

// loadWeights are the weights of the three containers.
var loadWeights = []int{1, 3, 1}

// loadProgram computes in the containers.
func (h *Host) loadProgram() []string {
	if h.simulated() {
		return []string{filepath.Join(h.Bin, probe), "load"}
	}
	dir := h.Bin
	if h.Limiter != "" {
		dir = filepath.Dir(h.Limiter)
	}
	return []string{filepath.Join(dir, "cgpu-load")}
}

func (h *Host) logf(format string, args ...any) {
	if h.Log != nil {
		h.Log(format, args...)
	}
}

func (h *Host) measureAll() (list []measured) {
	t, _ := h.node()
	for _, g := range t.GPUs {
		m := meter{host: h, measured: measured{gpu: g, figures: map[string][]Figure{}, why: map[string]string{}},
			prefix: fmt.Sprintf("doctor-%d-%d", os.Getpid(), g.Index)}
		m.run(t)
		list = append(list, m.measured)
	}
	return list
}

// meter measures one GPU, with a container of weight 1, one of weight 3, and another of weight 1.
type meter struct {
	measured
	host             *Host
	prefix           string // of the containers' names
	one, three, also *load
	before           []GPUUser // others', when it began
}

func (m *meter) logf(format string, args ...any) {
	m.host.logf("GPU %d: %s", m.gpu.Index, fmt.Sprintf(format, args...))
}

func (m *meter) run(t *device.Table) {
	if err := m.mayBegin(t); err != nil {
		m.why[""] = err.Error()
		return
	}
	err := m.steps(t)
	m.end(t)
	if e := m.undisturbed(t); e != nil {
		err = e
	} else if e := m.outside(t, time.Now().Add(partTime)); e != nil { // what was theirs may be given back a little later
		err = &disturbance{e}
	}
	if err == nil {
		return
	}
	m.logf("%v", err)
	m.why[""] = err.Error() // of the parts that are without figures
	if _, disturbed := errors.AsType[*disturbance](err); disturbed {
		m.figures = nil // they would say nothing
	}
}

// mayBegin says why nothing is measured: somebody would be held up, or not find what is taken for it.
func (m *meter) mayBegin(t *device.Table) (err error) {
	if m.host.Force {
		return nil
	}
	if m.before, _, err = m.users(t); err != nil {
		return err
	}
	if names := working(m.before); len(names) > 0 {
		return fmt.Errorf("%s has work on it, or may have; measure when nobody has, or with --force beside it", strings.Join(names, ", "))
	}
	if err := m.outside(t, time.Now()); err != nil {
		return err
	}
	records, cards, err := ledger.Open(m.host.RunDir).State()
	if err != nil {
		return err
	}
	card, own := cards[m.gpu.UUID]
	if !own {
		card = t.Config.Card()
	}
	if !spare(m.gpu, t.Config.Overcommit, card, records) {
		return errors.New("no room to spare: who starts meanwhile might not find any; measure when there is, or with --force")
	}
	return nil
}

// spare says whether what the runs take of a GPU is there twice.
func spare(g device.GPU, overcommit float64, card sched.Card, records []ledger.Record) bool {
	size, _ := quota.ParseSize(loadMemory)
	memory, places, promised := 2*size*quota.Bytes(len(loadWeights)), 2*len(loadWeights), sched.Permille(0)
	capped := func(s sched.Share, times sched.Permille) {
		most, _ := card.Cap(s)
		promised += most * times
	}
	for _, weight := range loadWeights {
		capped(sched.Share{Weight: weight, Priority: quota.PriorityDefault}, 2)
	}
	for _, r := range records {
		for _, v := range r.VGPUs {
			if v.UUID == g.UUID {
				memory, places = memory+v.Limit, places+1
				capped(v.Share, 1)
			}
		}
	}
	return float64(memory) <= float64(g.Memory)*cmp.Or(overcommit, 1) && places <= card.MaxInst && promised <= sched.Whole
}

// disturbance is somebody's work while it was measured, who is not to be held up longer.
type disturbance struct{ error }

func (d *disturbance) Unwrap() error { return d.error }

// undisturbed refuses to go on where others have begun to use the GPU.
func (m *meter) undisturbed(t *device.Table) error {
	if m.host.Force {
		return nil
	}
	now, _, err := m.users(t)
	if err != nil {
		return err
	}
	names := since(m.before, now)
	for _, name := range working(now) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if len(names) > 0 {
		return &disturbance{fmt.Errorf("%s came, went or computed meanwhile, so it was ended", strings.Join(names, ", "))}
	}
	return nil
}

// outsideMemory is less than a program with a context has. The rest is of cgpu's own RM clients.
const outsideMemory = 64 * quota.MiB

// outside says, by what the driver has given out, that programs use the GPU which no guard knows. It waits for the end of that until a
// deadline.
func (m *meter) outside(t *device.Table, deadline time.Time) error {
	if m.host.Force {
		return nil
	}
	for ; ; time.Sleep(50 * time.Millisecond) {
		all, err := m.host.Used([]int{m.gpu.Index})
		n, told := all[m.gpu.UUID]
		if err != nil || !told {
			return errors.Join(errors.New("what programs outside cgpu use of it is not known; --force measures all the same"), err)
		}
		others, own, err := m.users(t)
		if err != nil {
			return err
		}
		for _, u := range append(others, own...) {
			n -= min(n, u.Used)
		}
		if n < outsideMemory {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("programs outside cgpu use %v of it; measure when none does, or with --force beside them", n.FloorMiB())
		}
	}
}

func working(users []GPUUser) (names []string) {
	for _, u := range users {
		if u.works() {
			names = append(names, u.Name)
		}
	}
	return names
}

// users are the containers on the GPU: others', and those of this measurement.
func (m *meter) users(t *device.Table) (others, own []GPUUser, err error) {
	records, err := ledger.Open(m.host.RunDir).List()
	if err != nil {
		return nil, nil, err
	}
	for _, u := range m.host.Users(t, records, m.gpu.UUID) {
		if slices.ContainsFunc(m.loads(), func(l *load) bool { return l.has(u.Record) }) {
			own = append(own, u)
		} else {
			others = append(others, u)
		}
	}
	return others, own, nil
}

// steps measures one part after the other.
func (m *meter) steps(t *device.Table) error {
	if err := m.start(); err != nil {
		return err
	}
	for _, l := range m.loads() {
		l.say("calibrate") // each alone on the GPU
		if err := l.await("say how long its kernels are", func() bool { return l.ready != nil }); err != nil {
			return err
		}
		m.logf("%s: a kernel takes %v and %v µs alone", l.name, l.ready[0], l.ready[1])
	}
	if err := m.undisturbed(t); err != nil {
		return err
	}
	_, own, err := m.users(t)
	if err != nil {
		return err
	}
	shared := len(own) > 0 && own[0].Compute != nil
	if !shared {
		m.why[partWeights] = "its guard does not share out the time of this GPU"
	} else if p := own[0].Compute.Policy; p != sched.PolicyPreempt && p != sched.PolicyWeight && p != sched.PolicySoft {
		m.why[partWeights], shared = fmt.Sprintf("the GPU's policy is %v, under which time is not shared by weight", p), false
	}
	if !shared {
		m.why[partWaiting], m.why[partSwitch] = m.why[partWeights], m.why[partWeights]
		return m.pause(own)
	}
	for _, part := range []func() error{m.weights, func() error { return m.waiting(t) }} {
		if err := part(); err != nil {
			return err
		}
		if err := m.undisturbed(t); err != nil {
			return err
		}
	}
	return m.pause(own)
}

func (m *meter) loads() []*load { return []*load{m.one, m.three, m.also} }

func (m *meter) start() error {
	begin := time.Now()
	for i, l := range []**load{&m.one, &m.three, &m.also} {
		var err error
		if *l, err = m.host.newLoad(fmt.Sprintf("%s-%c", m.prefix, 'a'+i), m.gpu.UUID, loadWeights[i]); err != nil {
			return err
		}
	}
	for _, l := range m.loads() {
		if err := l.await("have a context", func() bool { return l.up }); err != nil {
			return err
		}
	}
	m.logf("three containers have contexts after %v", time.Since(begin).Round(time.Millisecond))
	return nil
}

// window lets loads compute for a while and returns what each did, and in which time.
func (m *meter) window(what string, loads ...*load) (done []time.Duration, took time.Duration, err error) {
	begin := gpusched.Monotonic()
	time.Sleep(windowTime)
	end := gpusched.Monotonic()
	for _, l := range loads {
		if err := l.await("tell of its work", func() bool { return l.told() >= end }); err != nil {
			return nil, 0, err
		}
		d := l.between(begin, end)
		m.logf("%s: %s did %v of work in %v; every 50 ms: %s", what, l.name, d, end-begin, l.steps(begin, end))
		done = append(done, d)
	}
	return done, end - begin, nil
}

// share is the first one's part of what both did, in percent.
func share(done []time.Duration) (float64, error) {
	if done[0]+done[1] == 0 {
		return 0, errors.New("no kernel ended")
	}
	return 100 * float64(done[0]) / float64(done[0]+done[1]), nil
}

func (m *meter) weights() error {
	m.one.say("hog")
	m.three.say("hog")
	time.Sleep(settleTime)
	done, _, err := m.window("weights 3 : 1", m.three, m.one)
	if err != nil {
		return err
	}
	m.three.say("stop")
	percent, err := share(done)
	if err != nil {
		return err
	}
	m.figures[partWeights] = []Figure{{GPU: m.gpu.Index, Name: "weight-3-share", Value: percent, Unit: "%", Least: 70, Most: 80,
		text: "weight 3 beside weight 1 gets"}}
	return nil
}

// waiting measures the program that waits, and by the many switches that it makes what one costs.
func (m *meter) waiting(t *device.Table) error {
	m.also.say("loop")
	time.Sleep(settleTime)
	before, err := m.switches(t)
	if err != nil {
		return err
	}
	done, took, err := m.window("waiting", m.also, m.one)
	if err != nil {
		return err
	}
	after, err := m.switches(t)
	if err != nil {
		return err
	}
	m.also.say("stop")
	percent, err := share(done)
	if err != nil {
		return err
	}
	m.figures[partWaiting] = []Figure{{GPU: m.gpu.Index, Name: "waiting-share", Value: percent, Unit: "%", Least: 40,
		text: "who waits for each kernel gets, of what it and a neighbour that never waits have,"}}
	if !before.exact || !after.exact {
		m.why[partSwitch] = "the driver gives no records of context switches"
		return nil
	}
	n := float64(after.switches-before.switches) * float64(took) / float64(max(after.at-before.at, 1))
	lost := max(took-done[0]-done[1], 0)
	m.logf("waiting: %.0f switches in %v, of which nobody had %v", n, took, lost)
	if n < 10 {
		m.why[partSwitch] = fmt.Sprintf("there were %.0f switches in %v only", n, took)
		return nil
	}
	m.figures[partSwitch] = []Figure{
		{GPU: m.gpu.Index, Name: "switch", Value: float64(lost) / n / float64(time.Millisecond), Unit: "ms", Most: 1, text: "a switch costs"},
		// Only preemptions are bounded by max_loss; with the switches that go with them it is up to 1.7 times that, and the window's ends.
		{GPU: m.gpu.Index, Name: "switching", Value: 100 * float64(lost) / float64(took), Unit: "%", Most: 30,
			text: "beside a program that waits switches take, of the time,"},
	}
	return nil
}

// switched is what guards have counted by a moment.
type switched struct {
	at       time.Duration
	switches uint64
	exact    bool
}

func (m *meter) switches(t *device.Table) (s switched, err error) {
	_, own, err := m.users(t)
	s.at, s.exact = gpusched.Monotonic(), len(own) > 0
	for _, u := range own {
		if u.Compute == nil {
			return s, fmt.Errorf("the guard of %s does not answer", u.Name)
		}
		s.switches += u.Compute.Switches
		s.exact = s.exact && u.Compute.Exact
		m.logf("%s: %v: weight %d, slice %v, %d switches, %d preemptions, %v on the engine, an arbiter: %v", u.Record.Name, u.Compute.Policy,
			u.Compute.Weight, u.Compute.Slice, u.Compute.Switches, u.Compute.Preemptions, u.Compute.GPUTime, u.Compute.Ruled)
	}
	return s, err
}

// pause stops the first load, which computes, and lets it go on.
func (m *meter) pause(own []GPUUser) error {
	nonce := ""
	for _, u := range own {
		if m.one.has(u.Record) {
			nonce = u.Record.Nonce
		}
	}
	m.one.say("hog")
	time.Sleep(settleTime)
	set := func(paused bool) (time.Duration, error) {
		at := gpusched.Monotonic()
		_, err := ledger.Open(m.host.RunDir).Change(nonce, ledger.ChangeRequest{Paused: &paused})
		return at, err
	}
	stopped, err := set(true)
	if err != nil {
		return err
	}
	quiet := func() bool {
		return m.one.last() > 0 && gpusched.Monotonic()-m.one.last() > quietTime && m.one.told()-m.one.last() > quietTime
	}
	stopErr := m.one.await("stop", quiet)
	resumed, err := set(false) // whatever came of it
	if err != nil {
		return err
	}
	if stopErr != nil && (m.one.over() || m.one.told()-stopped < partTime/2) { // it died, or says nothing: nobody knows
		return stopErr
	}
	if stopErr != nil {
		m.figures[partPause] = []Figure{{GPU: m.gpu.Index, Name: "pause", Value: ms(partTime), Unit: "ms", Most: pauseWanted,
			text: "cgpu pause stops nothing: kernels still end after"}}
		return nil
	}
	g := gap{}
	if err := m.one.await("go on after a pause", func() (found bool) { g, found = m.one.gapAt(resumed); return found }); err != nil {
		return err
	}
	m.logf("pause: asked at %v, the last kernel ended at %v; resume: asked at %v, the first one ended at %v", stopped, g.from, resumed, g.to)
	m.figures[partPause] = []Figure{
		{GPU: m.gpu.Index, Name: "pause", Value: ms(g.from - stopped), Unit: "ms", Most: pauseWanted,
			text: "after cgpu pause the last kernel ends after"},
		{GPU: m.gpu.Index, Name: "resume", Value: ms(g.to - resumed), Unit: "ms", Most: pauseWanted,
			text: "after cgpu resume the first one ends after"},
	}
	return nil
}

func ms(d time.Duration) float64 { return max(float64(d)/float64(time.Millisecond), 0) }

// end takes everything away again, and waits until it is gone.
func (m *meter) end(t *device.Table) {
	for _, l := range m.loads() {
		if l != nil {
			l.end()
		}
	}
	for deadline := time.Now().Add(partTime); ; time.Sleep(10 * time.Millisecond) {
		_, own, err := m.users(t)
		if err == nil && len(own) == 0 {
			return
		}
		if time.Now().After(deadline) {
			m.left = fmt.Sprintf("containers of the measurement, %s-a to c, are still in the ledger", m.prefix)
			return
		}
	}
}
