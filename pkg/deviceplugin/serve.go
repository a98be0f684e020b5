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
)

// books are what the plugin remembers between calls. They are hints: all of it may be lost.
type books struct {
	// served are the containers that were answered, also those that were refused: the kubelet asks for none twice.
	served map[key]time.Time
	// half is the container that has one of the two resources, and may ask for the other next: the kubelet asks for all
	// resources of a container before it turns to another, in an order by chance.
	half *half
	// free is what was free of each resource when it was last told; of the one that is not being asked for now.
	free map[string]map[string]int
	// proposed are GPUs of the last preference for several of them.
	proposed map[string][]string
}

type half struct {
	resource string
	gpus     []string
	want     *want // nil: not known whose it is
	at       time.Time
}

func newBooks() books {
	return books{served: map[key]time.Time{}, free: map[string]map[string]int{}, proposed: map[string][]string{}}
}

const (
	halfLife   = 30 * time.Second // from the one resource of a container to the other it is milliseconds
	servedLife = 10 * time.Minute // the kubelet reports an admitted pod within seconds
)

// other is the resource that a container may have beside one.
func other(resource string) string {
	if resource == ResourceMemory {
		return ResourcePercent
	}
	return ResourceMemory
}

func (b *books) serve(w *want, resource string) {
	now := time.Now()
	maps.DeleteFunc(b.served, func(_ key, at time.Time) bool { return now.Sub(at) > servedLife })
	if w != nil {
		b.served[key{w.pod, w.container, resource}] = now
	}
}

// coupled is where the container that is asked for now has its other resource. sure: it is known to be the same container.
func (b *books) coupled(resource string, n int) (gpus []string, w *want, sure bool) {
	h := b.half
	if h == nil || h.resource == resource || time.Since(h.at) > halfLife {
		return nil, nil, false
	}
	if h.want == nil {
		return h.gpus, nil, false
	}
	if h.want.limits[resource] != n {
		return nil, nil, false
	}
	return h.gpus, h.want, true
}

// call is one call of the kubelet, with all it goes by.
type call struct {
	p         *Plugin
	resource  string
	cards     []card
	placement string
	all       []want
}

func (p *Plugin) begin(ctx context.Context, resource string) (*call, error) {
	c := &call{p: p, resource: resource}
	var shared bool
	if c.cards, c.placement, shared, _ = p.state(); shared {
		return nil, errShared
	}
	if p.api != nil {
		pods, err := p.api.pods(ctx)
		if err != nil {
			p.log.Warn("allocating by device ids alone", "resource", resource, "err", err)
		} else {
			c.all = candidates(pods, p.o.Node)
		}
	}
	return c, nil
}

// whose is the container that n units are asked for; position is that of the GPU, or -1 where it is still to be chosen.
func (c *call) whose(n, position int) (w *want, gpus []string, sure bool, err error) {
	gpus, w, sure = c.p.books.coupled(c.resource, n)
	if sure {
		return w, gpus, sure, nil
	}
	w, strangers := match(c.all, c.p.books.served, c.resource, n, position)
	switch {
	case w == nil:
		return nil, gpus, false, nil
	case w.index == badIndex:
		err = fmt.Errorf("deviceplugin: %s: the pod's annotation %s names no GPU: %s", w.name, annotationIndex, checkPlacing)
	case strangers:
		err = fmt.Errorf("deviceplugin: %s: the scheduler chose GPU %d, the kubelet took units of GPU %d: an init container held other units, or the GPU has too few left", w.name, w.index, position)
	}
	return w, gpus, false, err
}

const checkPlacing = "check that gpushare's scheduler extender placed the pod"

// prefer answers GetPreferredAllocation: the kubelet takes what it is told from the units that are free.
func (c *call) prefer(available, must []string, size int) ([]string, error) {
	free, _, err := count(c.cards, c.resource, available)
	if err != nil {
		return nil, err
	}
	c.p.books.free[c.resource] = free
	bound, mustCards, err := count(c.cards, c.resource, must)
	if err != nil {
		return nil, err
	}
	w, gpus, sure, err := c.whose(size, -1)
	if err != nil {
		c.p.books.serve(w, c.resource)
		return nil, err
	}
	r := request{resource: c.resource, need: size, gpus: 1, free: free, placement: c.placement}
	for _, m := range mustCards {
		r.must = append(r.must, m.UUID)
	}
	if w != nil {
		r.gpus = w.gpus
	} else if len(gpus) > 0 && size%len(gpus) == 0 {
		r.gpus = len(gpus)
	}
	if size%r.gpus != 0 {
		c.p.books.serve(w, c.resource)
		return nil, fmt.Errorf("deviceplugin: %s=%d: is no multiple of the pod's label %s=%d: each GPU gives the same", c.resource, size, ResourceCount, r.gpus)
	}
	r.need = size / r.gpus
	for _, n := range bound {
		if n > r.need {
			return nil, fmt.Errorf("deviceplugin: %s=%d: the kubelet wants %d units of one GPU in it, more than %d: an init container had other GPUs", c.resource, size, n, r.need)
		}
	}
	switch {
	case sure:
		r.must = union(r.must, gpus)
	case w != nil && w.index >= 0 && r.gpus == 1:
		if w.index >= len(c.cards) {
			c.p.books.serve(w, c.resource)
			return nil, fmt.Errorf("deviceplugin: %s: annotation %s=%d: the node has %d GPUs: %s", w.name, annotationIndex, w.index, len(c.cards), checkPlacing)
		}
		r.must = union(r.must, []string{c.cards[w.index].UUID})
	default:
		r.like = c.liking(w, gpus, r)
	}
	chosen, err := choose(c.cards, r)
	if err != nil {
		c.p.books.serve(w, c.resource)
		return nil, err
	}
	c.p.books.proposed[c.resource] = nil
	if len(chosen) > 1 {
		c.p.books.proposed[c.resource] = uuids(chosen)
	}
	return pick(chosen, r.need, available, must), nil
}

// liking ranks GPUs for a container that is bound to none: those that have its other resource, then those where all of it
// fits, and then those where its whole pod does.
func (c *call) liking(w *want, gpus []string, r request) func(card) int {
	otherFree, told := c.p.books.free[other(c.resource)]
	return func(k card) int {
		bad := 0
		if len(gpus) > 0 && !slices.Contains(gpus, k.UUID) {
			bad += 4
		}
		if w != nil && told && otherFree[k.UUID]*w.gpus < w.limits[other(c.resource)] {
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
	w, gpus, sure, err := c.whose(len(ids), position)
	c.p.books.serve(w, c.resource)
	if err != nil {
		return nil, err
	}
	if sure && !same(gpus, uuids(used)) {
		c.p.books.half = nil
		return nil, fmt.Errorf("deviceplugin: %s: container %s has %s on GPU %s, and %s only on another one", w.name, w.container, other(c.resource), strings.Join(gpus, ", "), c.resource)
	}
	if err := c.even(w, per, used); err != nil {
		return nil, err
	}
	n := len(ids) / len(used)
	if c.resource == ResourceMemory && n > used[0].most {
		return nil, fmt.Errorf("deviceplugin: %s=%d: GPU %d has %d units: overcommitment sells a GPU twice, but not to one container", c.resource, n, used[0].position, used[0].most)
	}
	for uuid, n := range per {
		if free := c.p.books.free[c.resource]; free != nil {
			free[uuid] -= n
		}
	}
	c.pair(w, used, sure)
	if c.resource == ResourcePercent {
		return answerPercent(n), nil
	}
	return answerMemory(used, n, c.p.o.Unit, w)
}

// even checks that the units are of one GPU, or the same number of each of as many as were asked for.
func (c *call) even(w *want, per map[string]int, used []card) error {
	if w != nil && w.gpus == len(used) || w == nil && (len(used) == 1 || same(c.p.books.proposed[c.resource], uuids(used))) {
		for _, k := range used {
			if per[k.UUID] != per[used[0].UUID] {
				return fmt.Errorf("deviceplugin: %s: the kubelet took %d units of GPU %d and %d of GPU %d, want as many of each", c.resource,
					per[used[0].UUID], used[0].position, per[k.UUID], k.position)
			}
		}
		return nil
	}
	if len(used) == 1 {
		return fmt.Errorf("deviceplugin: %s: the pod's label %s=%d wants as many GPUs, and the kubelet took units of one", w.name, ResourceCount, w.gpus)
	}
	return fmt.Errorf("deviceplugin: %s: the kubelet took units of %d GPUs for one container, which would be a share on neither: no GPU has enough left, or an init container of the pod holds units of another one",
		c.resource, len(used))
}

// pair notes what the next call may be the other half of.
func (c *call) pair(w *want, used []card, sure bool) {
	b := &c.p.books
	switch {
	case b.half != nil && b.half.resource == other(c.resource) && (sure || w == nil && b.half.want == nil && same(b.half.gpus, uuids(used))):
		b.half = nil
	case w == nil || w.limits[other(c.resource)] > 0:
		b.half = &half{resource: c.resource, gpus: uuids(used), want: w, at: time.Now()}
	default:
		b.half = nil
	}
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
		cards, _, shared, changed := s.p.state()
		list := devices(s.resource, cards, last)
		for _, c := range cards {
			if !c.gone {
				last[c.UUID] = c.amount(s.resource)
			}
		}
		if shared {
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
func (s *server) GetPreferredAllocation(ctx context.Context, r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
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
		s.p.log.Warn("refused", "resource", s.resource, "err", err)
	}
	return err
}
