// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// allocState is what the plugin remembers between calls. These are hints: all of it may be lost.
type allocState struct {
	// served are the containers that were answered, also those that were refused: the kubelet asks for none twice.
	served map[key]mark
	// last is the last answer that gave something. The kubelet asks for all resources of a container before it turns to
	// another, in an order by chance; so what comes next may be the other half of this. Nil after a refusal: the kubelet then
	// turns to another pod.
	last *lastGrant
	// free is what was free of each resource when it was last told; of the one that is not being asked for now.
	free map[string]map[string]int
	// proposed are GPUs of the last preference for several of them.
	proposed map[string][]string
	// holders are the containers with memory; adopted: also those that an earlier plugin served.
	holders holders
	adopted bool
	// vain are pods of the kubelet's of which the watch was waited to tell, and did not. Of those in old it did not at the first call: a
	// kubelet before 1.34 lists pods that have ended too, of which the watch knows no more.
	vain, old map[string]bool
}

// lastGrant is one resource given, the last one.
type lastGrant struct {
	resource string
	n        int
	gpus     []string
	id       string // one of the ids
	want     *want  // nil: not known whose it is
	at       time.Time
	// tied: it was given where the one before it was; whole: and that was surely the same container, which has all now.
	tied, whole bool
}

func newAllocState() allocState {
	return allocState{served: map[key]mark{}, free: map[string]map[string]int{}, proposed: map[string][]string{}, holders: holders{}}
}

const (
	grantLife  = 30 * time.Second // from the one resource of a container to the other it is milliseconds
	servedLife = 10 * time.Minute // the kubelet reports an admitted pod within seconds
	// watchPatience is for the watch to tell of a pod that the kubelet has: both learn of it from the API server at once.
	watchPatience = 500 * time.Millisecond
	watchPause    = 10 * time.Millisecond
)

// other is the resource that a container may have beside one.
func other(resource string) string {
	if resource == ResourceMemory {
		return ResourcePercent
	}
	return ResourceMemory
}

func (b *allocState) serve(w *want, resource string) {
	now := time.Now()
	maps.DeleteFunc(b.served, func(_ key, m mark) bool { return now.Sub(m.at) > servedLife })
	if w != nil {
		b.served[key{w.pod, w.container, resource}] = mark{now, w.exact}
	}
}

// call is one call of the kubelet, with all it goes by.
type call struct {
	p         *Plugin
	resource  string
	cards     []card
	placement string
	card      sched.Card // of a GPU that has no settings of its own
	all       []want
	has       listing  // nil: the kubelet does not tell
	unknown   []string // pods of the kubelet's of which the watch has not told
	more      []string // those of them that wait and have more containers than are kept
}

func (p *Plugin) begin(ctx context.Context, resource string) (*call, error) {
	c := &call{p: p, resource: resource}
	var withheld error
	if c.cards, c.placement, c.card, _, withheld = p.state(); withheld != nil {
		return nil, withheld
	}
	if p.o.Pods != nil {
		c.listPods(ctx)
	}
	return c, nil
}

// listPods learns from the kubelet which pods it has, and from the watch what they want. The one that is asked for is among the kubelet's,
// which takes a pod in before it admits it; the watch may tell of it a moment later.
func (c *call) listPods(ctx context.Context) {
	asked, cancel := context.WithTimeout(ctx, holderTimeout)
	has, err := c.p.list(asked)
	cancel()
	if err != nil {
		c.p.log.Warn("whose units these are", "resource", c.resource, "err", err)
	}
	pods, ok := c.p.o.Pods()
	c.has = has
	b := &c.p.allocState
	missing := missingOf(has, pods, ok)
	isNew := func(name string) bool { return !b.vain[name] && !b.old[name] }
	for deadline := time.Now().Add(watchPatience); slices.ContainsFunc(missing, isNew) && time.Now().Before(deadline); {
		time.Sleep(watchPause)
		pods, ok = c.p.o.Pods()
		missing = missingOf(has, pods, ok)
	}
	b.vain = setOf(missing)
	maps.DeleteFunc(b.old, func(name string, _ bool) bool { return has != nil && has[name] == nil })
	if b.old == nil && ok {
		b.old = setOf(missing)
	}
	c.unknown = slices.DeleteFunc(missing, func(name string) bool { return b.old[name] })
	if !ok {
		c.p.log.Warn("allocating by device ids alone", "resource", c.resource, "err", "the API server has not told of the node's pods yet")
		return
	}
	c.all = candidates(pods, has)
	inOrder(c.all)
	for _, p := range pods {
		if p.More && !p.Started {
			c.more = append(c.more, p.name())
		}
	}
}

// missingOf are the pods of the kubelet's of which the watch has not told; if it has told of nothing yet, one without a name.
func missingOf(has listing, pods []Pod, ok bool) (names []string) {
	if !ok {
		return []string{""}
	}
	here := map[string]bool{}
	for i := range pods {
		here[pods[i].name()] = true
	}
	for name := range has {
		if !here[name] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func setOf(names []string) map[string]bool {
	set := make(map[string]bool, len(names))
	for _, name := range names {
		set[name] = true
	}
	return set
}

// agreed reports that the kubelet's own list bears out that it asks for a container of this pod, the only one that is known to wait for
// so much: it has the pod, and none of which it is not known what it wants. A static pod, whose object comes after it, would be one.
func (c *call) agreed(w *want) bool {
	stranger := func(name string) bool { return name != w.name }
	return c.has[w.name] != nil && len(c.unknown) == 0 && !slices.ContainsFunc(c.more, stranger)
}

// tie is where the container that is asked for now may have its other resource, from the grant before. must: it has to be there;
// known: and is this one. Of a container whose percentage is booked on one GPU and whose memory lies on another, the percentage
// would be promised twice.
//
// What the kubelet has allocated it tells by container (listing), so that its container is known even where it was one of many
// when it was served. The kubelet does not list init containers. Of these it must where all that it can have been for
// want this too, or all that could be asked for now want what it gave; else a stranger's pod could bind this one to a
// full GPU, and the GPU is only preferred. So it is where the API server was not asked, and nothing is known of who waits.
func (c *call) tie(n int) (last *lastGrant, known *want, must bool) {
	last = c.p.allocState.last
	if last == nil || last.resource == c.resource || last.whole || time.Since(last.at) > grantLife {
		return nil, nil, false
	}
	if len(c.all) == 0 {
		return last, nil, false
	}
	wants := func(x *want) bool { return x.limits[c.resource] == n && c.open(x) }
	fits, others, strangers := 0, 0, 0
	for i := range c.all {
		x, now := &c.all[i], wants(&c.all[i])
		then := x.limits[last.resource] == last.n && !c.p.allocState.served[key{x.pod, x.container, last.resource}].sure
		switch {
		case last.want != nil && last.want.exact:
			if now && x.pod == last.want.pod && x.container == last.want.container {
				return last, x, true
			}
		case then && now:
			fits++
		case then:
			others++
		case now:
			strangers++
		}
	}
	if fits == 0 {
		return nil, nil, false
	}
	if others+strangers > 0 {
		if name, container := c.has.holder(last); name != "" {
			i := slices.IndexFunc(c.all, func(x want) bool { return x.name == name && x.container == container })
			if i < 0 || !wants(&c.all[i]) {
				return nil, nil, false
			}
			return last, &c.all[i], true
		}
	}
	return last, nil, !last.tied && (others == 0 || strangers == 0)
}

// open: the container may be asked for; it was not surely served.
func (c *call) open(x *want) bool {
	return !c.p.allocState.served[key{x.pod, x.container, c.resource}].sure && !slices.Contains(x.held, c.resource)
}

// alone reports that a container waits, or waited a moment ago, which wants n units of a resource and nothing else.
func (c *call) alone(resource string, n int) bool {
	return slices.ContainsFunc(c.all, func(w want) bool { return w.limits[resource] == n && w.limits[other(resource)] == 0 })
}

// whose is the container that n units are asked for; position is that of the GPU, or -1 where it is still to be chosen. An
// index that is no GPU's is nobody's choice.
func (c *call) whose(n, position int) (w *want, last *lastGrant, must bool, err error) {
	last, known, must := c.tie(n)
	if known != nil {
		of := *known
		of.sure, of.exact = true, true
		return &of, last, true, nil
	}
	w = match(c.all, c.p.allocState.served, c.resource, n, position)
	switch {
	case w == nil && len(c.more) > 0 && len(c.unknown) == 0:
		err = fmt.Errorf("deviceplugin: %s=%d: a pod with more than %d containers that ask for units of GPUs, or a longer number of them "+
			"than anybody needs, is not served (%.253s): "+
			"give it fewer containers, and write the number without zeros before it", c.resource, n, MaxContainers, c.more[0])
	case w != nil && w.sure && !c.agreed(w):
		if w.gpus > 1 && c.has != nil && len(c.unknown) > 0 {
			err = fmt.Errorf("deviceplugin: %s: the pod's label %s=%d wants several GPUs, and it is not known whether the kubelet asks for "+
				"this pod or for %.253s, "+
				"of which the API server has not told: make the pod again", w.name, ResourceCount, w.gpus, c.unknown[0])
			break
		}
		w.sure, w.exact, w.name = false, false, "a pod"
	}
	if err != nil {
		return w, nil, false, err
	}
	if w != nil && w.index >= len(c.cards) {
		c.p.log.Warn("a GPU that is not there", "pod", w.name, annotationIndex, w.index)
		w.index = noIndex
	}
	if w != nil && w.sure && !must && w.index >= 0 && position >= 0 && w.index != position {
		err = fmt.Errorf("deviceplugin: %s: the scheduler chose GPU %d, the kubelet took units of GPU %d: an init container held other "+
			"units, or the GPU has too few left", w.name, w.index, position)
	}
	return w, last, must, err
}

// prefer answers GetPreferredAllocation: the kubelet takes what it is told from the units that are free.
func (c *call) prefer(available, must []string, size int) ([]string, error) {
	free, _, err := count(c.cards, c.resource, available)
	if err != nil {
		return nil, err
	}
	c.p.allocState.free[c.resource] = free
	if c.resource == ResourceMemory {
		c.p.allocState.holders.free(available, must)
	}
	bound, mustCards, err := count(c.cards, c.resource, must)
	if err != nil {
		return nil, err
	}
	w, last, tied, err := c.whose(size, -1)
	if err != nil {
		c.p.allocState.serve(w, c.resource)
		return nil, err
	}
	r := request{resource: c.resource, need: size, gpus: 1, free: free, placement: c.placement}
	if w != nil && w.placement != "" {
		r.placement = w.placement
	}
	for _, m := range mustCards {
		r.must = append(r.must, m.UUID)
	}
	if tied {
		r.gpus = len(last.gpus)
	} else if w != nil {
		r.gpus = w.gpus
	} else if last != nil && size%len(last.gpus) == 0 {
		r.gpus = len(last.gpus)
	}
	if size%r.gpus != 0 {
		c.p.allocState.serve(w, c.resource)
		return nil, fmt.Errorf("deviceplugin: %s=%d: is no multiple of the pod's label %s=%d: each GPU gives the same", c.resource, size,
			ResourceCount, r.gpus)
	}
	r.need = size / r.gpus
	for _, n := range bound {
		if n > r.need {
			return nil, fmt.Errorf("deviceplugin: %s=%d: the kubelet wants %d units of one GPU in it, more than %d: an init container had "+
				"other GPUs", c.resource, size, n, r.need)
		}
	}
	sharing := c.sharing(must)
	r.barred = sharing.barred(c.cards, c.resource, r.need, besides(last))
	switch {
	case tied:
		r.must = union(r.must, last.gpus)
	case w != nil && w.sure && w.index >= 0 && r.gpus == 1:
		r.must = union(r.must, []string{c.cards[w.index].UUID})
	default:
		r.like = c.liking(w, last, r, sharing)
	}
	chosen, err := choose(c.cards, r)
	if err != nil {
		c.p.allocState.serve(w, c.resource)
		return nil, err
	}
	c.p.allocState.proposed[c.resource] = nil
	if len(chosen) > 1 {
		c.p.allocState.proposed[c.resource] = uuids(chosen)
	}
	return pick(chosen, c.resource, r.need, available, must), nil
}

// liking ranks GPUs for a container that is bound to none: those that may have its other resource, then those where all of it
// fits, then the one that the extender seems to have chosen, and then those where its whole pod fits. Of containers that want as
// many units now, the most demanding counts.
func (c *call) liking(w *want, last *lastGrant, r request, s sharing) func(card) int {
	otherFree, told := c.p.allocState.free[other(c.resource)]
	most := 0
	for _, x := range c.all {
		if c.open(&x) && x.limits[c.resource] == r.need*r.gpus {
			most = max(most, x.limits[other(c.resource)]/x.gpus)
		}
	}
	return func(k card) int {
		bad := 0
		if last != nil && !slices.Contains(last.gpus, k.UUID) {
			bad += 8
		}
		if told && otherFree[k.UUID] < most || c.resource == ResourceMemory && s.percent(k.UUID, most) != "" {
			bad += 4
		}
		if w != nil && w.index >= 0 && w.index != k.position && r.gpus == 1 {
			bad += 2
		}
		if w != nil && c.resource == ResourceMemory && r.gpus == 1 && r.free[k.UUID] < w.podMemory {
			bad++
		}
		return bad
	}
}

// allocate answers Allocate for one container.
func (c *call) allocate(ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	per, used, err := count(c.cards, c.resource, ids)
	if err != nil {
		return nil, err
	}
	if len(used) == 0 {
		return nil, fmt.Errorf("deviceplugin: %s: the kubelet asks for no device", c.resource)
	}
	position := -1
	if len(used) == 1 {
		position = used[0].position
	}
	w, last, tied, err := c.whose(len(ids), position)
	c.p.allocState.serve(w, c.resource)
	if err != nil {
		return nil, err
	}
	if tied && !same(last.gpus, uuids(used)) {
		return nil, fmt.Errorf("deviceplugin: %s: the container has %s on GPU %s, and the kubelet took units of another one", c.resource,
			other(c.resource), strings.Join(last.gpus, ", "))
	}
	if err := c.even(w, tied, per, used); err != nil {
		return nil, err
	}
	n := len(ids) / len(used)
	if c.resource == ResourceMemory && n > used[0].most {
		return nil, fmt.Errorf("deviceplugin: %s=%d: GPU %d has %d units: overcommitment sells a GPU twice, but not to one container",
			c.resource, n, used[0].position, used[0].most)
	}
	mine := ids
	if c.resource != ResourceMemory {
		mine = nil
	}
	barred := c.sharing(mine).barred(used, c.resource, n, besides(last))
	for _, k := range used {
		if why := barred[k.UUID]; why != "" {
			return nil, fmt.Errorf("deviceplugin: %s=%d: GPU %d: %s", c.resource, len(ids), k.position, why)
		}
	}
	for uuid, n := range per {
		if free := c.p.allocState.free[c.resource]; free != nil {
			free[uuid] -= n
		}
	}
	now := &lastGrant{resource: c.resource, n: len(ids), gpus: uuids(used), id: ids[0], want: w, at: time.Now()}
	if last != nil && same(last.gpus, now.gpus) {
		now.tied = true
		now.whole = tied && w.exact || !last.tied && !c.alone(last.resource, last.n)
	}
	c.p.allocState.last = now
	if c.resource == ResourcePercent {
		return answerPercent(n), nil
	}
	c.p.allocState.holders.allocate(ids)
	c.p.annotated.drop(ids)
	return answerMemory(used, n, c.p.o.Unit, w)
}

// besides are the GPUs of a grant; none where there was none.
func besides(last *lastGrant) []string {
	if last == nil {
		return nil
	}
	return last.gpus
}

// even checks that the units are of one GPU, or the same number of each of as many as were asked for.
func (c *call) even(w *want, tied bool, per map[string]int, used []card) error {
	unknown := w == nil || !w.sure
	if tied || w != nil && w.gpus == len(used) || unknown && (len(used) == 1 || same(c.p.allocState.proposed[c.resource], uuids(used))) {
		for _, k := range used {
			if per[k.UUID] != per[used[0].UUID] {
				return fmt.Errorf("deviceplugin: %s: the kubelet took %d units of GPU %d and %d of GPU %d, want as many of each", c.resource,
					per[used[0].UUID], used[0].position, per[k.UUID], k.position)
			}
		}
		return nil
	}
	if len(used) == 1 {
		return fmt.Errorf("deviceplugin: %s: the pod's label %s=%d wants as many GPUs, and the kubelet took units of one", w.name,
			ResourceCount, w.gpus)
	}
	return fmt.Errorf("deviceplugin: %s: the kubelet took units of %d GPUs for one container, which would be a share on neither: no "+
		"GPU has enough left, or an init container of the pod holds units of another one",
		c.resource, len(used))
}

func uuids(cards []card) (all []string) {
	for _, c := range cards {
		all = append(all, c.UUID)
	}
	return all
}

func union(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

func same(a, b []string) bool { return slices.Equal(union(a, nil), union(b, nil)) }

// server answers the kubelet for one resource.
type server struct {
	pluginapi.UnimplementedDevicePluginServer
	p        *Plugin
	resource string
	streams  streams
}

// GetDevicePluginOptions says that preferences are to be asked for.
func (s *server) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch sends the devices now and whenever the table is another.
func (s *server) ListAndWatch(_ *pluginapi.Empty, stream pluginapi.DevicePlugin_ListAndWatchServer) error {
	s.streams.open()
	defer s.streams.close()
	s.p.fault(s.resource, nil)
	last := map[string]int{}
	for {
		cards, _, _, changed, withheld := s.p.state()
		list := devices(s.resource, cards, last)
		for _, c := range cards {
			if !c.gone {
				last[c.UUID] = c.amount(s.resource)
			}
		}
		if withheld != nil {
			for _, d := range list {
				d.Health = pluginapi.Unhealthy
			}
		}
		if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: list}); err != nil {
			return err
		}
		s.p.log.Info("told the kubelet", "resource", s.resource, "devices", len(list))
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

// GetPreferredAllocation places containers.
func (s *server) GetPreferredAllocation(ctx context.Context,
	r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	answer := &pluginapi.PreferredAllocationResponse{}
	err := s.serialise(ctx, func(c *call) error {
		for _, one := range r.GetContainerRequests() {
			ids, err := c.prefer(one.GetAvailableDeviceIDs(), one.GetMustIncludeDeviceIDs(), int(one.GetAllocationSize()))
			if err != nil {
				return err
			}
			answer.ContainerResponses = append(answer.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
		}
		return nil
	})
	return answer, err
}

// Allocate gives the shares. The kubelet rejects the pod where it fails.
func (s *server) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	answer := &pluginapi.AllocateResponse{}
	err := s.serialise(ctx, func(c *call) error {
		for _, one := range r.GetContainerRequests() {
			container, err := c.allocate(one.GetDevicesIds())
			if err != nil {
				return err
			}
			answer.ContainerResponses = append(answer.ContainerResponses, container)
		}
		return nil
	})
	s.p.wake()
	return answer, err
}

// PreStartContainer is not asked for.
func (s *server) PreStartContainer(context.Context, *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse, error) {
	return nil, errors.New("deviceplugin: PreStartContainer: was not asked for")
}

// serialise runs one call alone, and ends it in time.
func (s *server) serialise(ctx context.Context, f func(*call) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	select {
	case s.p.calls <- struct{}{}:
		defer func() { <-s.p.calls }()
	case <-ctx.Done():
		return fmt.Errorf("deviceplugin: %s: another call takes too long: %w", s.resource, ctx.Err())
	}
	c, err := s.p.begin(ctx, s.resource)
	if err == nil {
		err = f(c)
	}
	if err != nil {
		s.p.allocState.last = nil
		err = s.p.o.Names.tell(err)
		s.p.log.Warn("refused", "resource", s.resource, "err", err)
	}
	return err
}
