// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"slices"
	"strconv"
	"strings"
)

// wish is what a container says in one dialect, or in several that agree. What it does not say is zero.
type wish struct {
	memory            limits
	named             []NamedLimit // by UUID, in MPS' word: Resolve compares them with the others
	percent, priority told
	used, unmapped    []setting // words that were read, and those among them that have no meaning in cgpu
	dialects          []Dialect
}

// told is a number and the word that said it; by.set is false where none did.
type told struct {
	value int
	by    setting
}

// amount is a size and the word that said it; 0: none did.
type amount struct {
	bytes Bytes
	by    setting
}

// limits are memory limits: each holds for every GPU that at says nothing of. at goes by the GPU's position in the container.
type limits struct {
	each amount
	at   []amount
}

// put sets the limit of GPU n.
func (l *limits) put(n int, a amount) {
	if a.bytes == 0 {
		return
	}
	for len(l.at) <= n {
		l.at = append(l.at, amount{})
	}
	l.at[n] = a
}

// of is the limit of GPU n.
func (l limits) of(n int) amount {
	if n < len(l.at) && l.at[n].bytes != 0 {
		return l.at[n]
	}
	return l.each
}

// first is any limit that was said, for messages.
func (l limits) first() amount {
	for n := range l.at {
		if a := l.of(n); a.bytes != 0 {
			return a
		}
	}
	return l.each
}

// ignore notes words that are set and mean nothing in cgpu.
func (x *wish) ignore(w words, names ...string) error {
	for _, name := range names {
		s, err := w.used(x, name)
		if err != nil {
			return err
		}
		if s.set && s.value != "" {
			x.unmapped = append(x.unmapped, s)
		}
	}
	return nil
}

// differ is the refusal of two settings that do not agree; what each means stands where the values do not show it.
func differ(a setting, aMeans string, b setting, bMeans string) error {
	means := func(s string) string {
		if s == "" {
			return ""
		}
		return " (" + s + ")"
	}
	return b.bad("disagrees"+means(bMeans)+" with "+a.name+"="+show(a.value)+means(aMeans), "set both alike, or only one")
}

// join adds what another dialect says; where both say something it must be the same.
func (x *wish) join(d Dialect, y wish) error {
	var joined limits
	for n := range max(len(x.memory.at), len(y.memory.at)) {
		a, err := same(x, d, x.memory.of(n), y.memory.of(n))
		if err != nil {
			return err
		}
		joined.put(n, a)
	}
	var err error
	if joined.each, err = same(x, d, x.memory.each, y.memory.each); err != nil {
		return err
	}
	if y.named != nil { // one dialect has such words
		x.named = y.named
	}
	x.memory = joined
	for _, p := range []struct {
		mine   *told
		theirs told
	}{{&x.percent, y.percent}, {&x.priority, y.priority}} {
		switch {
		case !p.mine.by.set:
			*p.mine = p.theirs
		case p.theirs.by.set && p.theirs.value != p.mine.value:
			return differ(p.mine.by, x.names(), p.theirs.by, string(d))
		}
	}
	x.used, x.unmapped = append(x.used, y.used...), append(x.unmapped, y.unmapped...)
	if len(y.used) > 0 {
		x.dialects = append(x.dialects, d)
	}
	return nil
}

// same is the one limit that two dialects name.
func same(x *wish, d Dialect, a, b amount) (amount, error) {
	if a.bytes == 0 {
		return b, nil
	}
	if b.bytes != 0 && a.bytes != b.bytes {
		return amount{}, differ(a.by, x.names()+", "+a.bytes.String(), b.by, string(d)+", "+b.bytes.String())
	}
	return a, nil
}

// names lists the dialects of a wish.
func (x *wish) names() string {
	var names []string
	for _, d := range x.dialects {
		names = append(names, string(d))
	}
	return strings.Join(names, " and ")
}

// speech is what a container says in one of the enabled dialects, unread.
type speech struct {
	words words
	asks  bool
	index int // in dialects
}

// listen gathers what the container says in the enabled dialects. It refuses nothing: the container may be none of ours.
// Gpushare's turn is after the others', because what counts of it depends on how they ask.
func (s *settings) listen(env []string, annotations map[string]string, enabled []Dialect) (all []speech) {
	for i, d := range dialects {
		switch {
		case !slices.Contains(enabled, d.name), d.name == DialectGPUShare:
		default:
			w, asks := gatherWords(env, annotations, d.memory, d.other, d.numbered, d.annotated)
			// Two values of the switch are kept. With a third it may be on, so that it is refused, as any word set twice.
			if on := w[paiEnable]; d.name == DialectPAI && on.value != "1" && !on.conflict {
				asks = false
			}
			if len(w) > 0 {
				all = append(all, speech{w, asks, i})
			}
			s.foreign = s.foreign || asks && d.annotated
		}
	}
	s.gpushare = slices.Contains(enabled, DialectGPUShare) && s.hearGPUShare(annotations)
	return all
}

// hearGPUShare lets the annotations that gpushare's scheduler wrote beat the variables of the same names. They say nothing of
// the container itself, so they make none ask.
//
// They are the pod's, and a pod's author can write them, too. Beside a request by annotation, which no author can touch, they
// are therefore nothing: a _MEM_DEV would make a whole card of the trusted number, and a _MEM_IDX would name a GPU to slice,
// so that the one the device plugin gave is taken for a whole one.
func (s *settings) hearGPUShare(annotations map[string]string) (heard bool) {
	if s.annotated() {
		return false
	}
	for _, k := range []key{memDev, memIdx, memPod} {
		name := names[k].variable
		if value, ok := annotations[name]; ok && !s.annotations[k].set {
			s.annotations[k] = setting{name: name, value: value, set: true}
			heard = true
		}
	}
	return heard
}

// understand reads what was said in dialects, and joins it. Of a request by annotation only annotations count.
func (s *settings) understand(said []speech) (wish, error) {
	var x wish
	for _, sp := range said {
		d := dialects[sp.index]
		if s.annotated() && !d.annotated {
			continue
		}
		y, err := d.read(sp.words)
		if err != nil {
			return wish{}, err
		}
		if err := x.join(d.name, y); err != nil {
			return wish{}, err
		}
	}
	return x, nil
}

// adopt puts a wish into a Quota that has been read from cgpu's own settings. Both may say the same; what they say
// differently is refused, unless one is an annotation and the other is not: then that counts, as it does among cgpu's own.
func (q *Quota) adopt(s *settings, x wish) error {
	q.from = map[key]setting{}
	if err := q.adoptMemory(x.memory); err != nil {
		return err
	}
	q.Named = x.named
	name, _ := q.source(priority)
	prioKey := priority
	if _, ok := q.Asked[name]; !ok {
		prioKey = highPrio
	}
	prio := int(q.Priority)
	for _, f := range []struct {
		own    *int
		keys   key
		theirs told
	}{{&q.Percent, corePercentage, x.percent}, {&prio, prioKey, x.priority}} {
		if !f.theirs.by.set {
			continue
		}
		name, value := q.source(f.keys)
		_, asked := q.Asked[name]
		switch {
		case !asked || isAnnotation(f.theirs.by.name) && !isAnnotation(name):
			*f.own = f.theirs.value
			q.from[f.keys] = f.theirs.by
		case isAnnotation(name) && !isAnnotation(f.theirs.by.name):
		case *f.own != f.theirs.value:
			return differ(setting{name: name, value: value}, "", f.theirs.by, x.names())
		}
	}
	q.Priority = Priority(prio)
	for _, word := range x.used {
		q.Asked[word.name] = word.value
		if word.name == mpsMemory && q.Memory == (Memory{}) && q.PerGPU == nil {
			q.from[memContainer] = word // by UUID alone
		}
	}
	for _, word := range x.unmapped {
		q.Unmapped = append(q.Unmapped, word.name)
	}
	q.Dialects = x.dialects
	if s.gpushare {
		q.Dialects = append(q.Dialects, DialectGPUShare)
	}
	return nil
}

// isAnnotation tells an annotation from a variable by the slash: a variable with one could not be set in a shell, and none
// of a dialect's has one.
func isAnnotation(name string) bool { return strings.Contains(name, "/") }

// adoptMemory takes the limits of a wish, or compares them with cgpu's own.
func (q *Quota) adoptMemory(l limits) error {
	said := l.first()
	if said.bytes == 0 {
		return nil
	}
	if name, value := q.source(memContainer); q.Memory != (Memory{}) {
		own := setting{name: name, value: value}
		if q.Memory.Den != 0 {
			return differ(own, "a fraction of the card", said.by, said.bytes.String())
		}
		for n := range len(l.at) + 1 {
			if a := l.of(n); a.bytes != 0 && a.bytes != q.Memory.Fixed {
				return differ(own, q.Memory.String(), a.by, a.bytes.String())
			}
		}
		return nil
	}
	q.from[memContainer] = said.by
	q.Memory.Fixed = l.each.bytes
	several := false
	for n := range l.at {
		limit := l.of(n).bytes
		q.PerGPU = append(q.PerGPU, limit)
		several = several || limit != l.each.bytes
	}
	if !several {
		q.PerGPU = nil // the one limit says it all
	}
	return nil
}

// limitOf is the limit of the GPU at a position among those that the container gets a part of.
func (q *Quota) limitOf(n int, sliced []GPU) (Memory, error) {
	m := q.Memory
	if n < len(q.PerGPU) && q.PerGPU[n] != 0 {
		m = Memory{Fixed: q.PerGPU[n]}
	}
	for _, l := range q.Named {
		switch g, reason := find(l.ID, sliced); {
		case reason != "":
			return m, q.refuse("says a limit for "+l.ID+", of which the container gets no part", "leave it out", memContainer)
		case g.Index != sliced[n].Index:
		case m != (Memory{}) && m.Fixed != l.Limit:
			return m, q.refuse("says two limits for "+describe(g), "say one", memContainer)
		default:
			m.Fixed = l.Limit
		}
	}
	if m == (Memory{}) {
		return m, q.refuse("says no limit for GPU "+strconv.Itoa(n)+" of the container",
			"say one for every GPU that the container gets", memContainer)
	}
	return m, nil
}

// Placed is the limit of the one GPU that a container gets where it names none.
func (q *Quota) Placed() (Memory, error) {
	if len(q.PerGPU) > 1 || len(q.Named) > 0 {
		return Memory{}, q.refuse("says limits for "+strconv.Itoa(len(q.PerGPU)+len(q.Named))+
			" GPUs, but no GPU is named, and the node gives one to such a container",
			"name the GPUs in NVIDIA_VISIBLE_DEVICES", memContainer)
	}
	return q.limitOf(0, make([]GPU, 1))
}

// fits refuses limits for other GPUs than the sliced ones that the container gets.
func (q *Quota) fits(sliced, native int) error {
	switch {
	case q.PerGPU == nil:
		return nil
	case native > 0:
		return q.refuse("says limits by the GPUs' numbers in the container, which has whole GPUs too",
			"say one limit for all GPUs, or give no GPU whole", memContainer)
	case len(q.PerGPU) > sliced:
		return q.refuse("says a limit for GPU "+strconv.Itoa(len(q.PerGPU)-1)+" of a container that has "+strconv.Itoa(sliced),
			"name more GPUs, or fewer limits", memContainer)
	}
	return nil
}
