// SPDX-License-Identifier: Apache-2.0

package history

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

const gpu = "GPU-0"

func container(nonce string, got, granted time.Duration, used quota.Bytes) snapshot.VGPU {
	return snapshot.VGPU{Nonce: nonce, Answered: true, Used: used, Compute: &api.ComputeStatus{Exact: true, GPUTime: got, Granted: granted}}
}

func node(list ...snapshot.VGPU) snapshot.View {
	g := snapshot.GPU{UUID: gpu, VGPUs: list}
	for _, x := range list {
		g.Used += x.Used
	}
	return snapshot.View{GPUs: []snapshot.GPU{g}}
}

// TestAdd: two containers over three steps of ten seconds, of which one comes later and ends.
func TestAdd(t *testing.T) {
	const s = time.Second
	start := time.Now()
	h := New(10*s, 4)
	add := func(at time.Duration, list ...snapshot.VGPU) { h.Add(start.Add(at), node(list...)) }
	add(0, container("a", 100*s, 50*s, 7))
	if got := h.Of(gpu, "a"); got.Now != (Point{Unknown, Unknown, 7}) || got.Points != nil {
		t.Errorf("after one look: %+v", got)
	}
	add(4*s, container("a", 102*s, 51*s, 9))
	if got := h.Of(gpu, "a").Now; got != (Point{500, 250, 9}) {
		t.Errorf("after 4 s: %+v", got)
	}
	add(8*s, container("a", 103*s, 53*s, 5))
	add(12*s, container("a", 107*s, 57*s, 5), container("b", 9*s, 9*s, 1))
	if diff := cmp.Diff([]Point{{375, 375, 9}}, h.Of(gpu, "a").Points); diff != "" {
		t.Error(diff)
	}
	add(20*s, container("a", 107*s, 57*s, 5), container("b", 13*s, 17*s, 1))
	if diff := cmp.Diff([]Point{{375, 375, 9}, {1000, 1000, 5}}, h.Of(gpu, "a").Points); diff != "" {
		t.Error(diff)
	}
	// What both got.
	if got := h.Of(gpu, "").Now; got != (Point{500, 1000, 6}) {
		t.Errorf("the GPU: %+v", got)
	}
	// a is gone; nobody looked for two steps; b's guard does not answer.
	add(45*s, snapshot.VGPU{Nonce: "b"})
	if got := h.Of(gpu, "a"); got.Number != 0 || got.Now != nothing {
		t.Errorf("of one that is gone: %+v", got)
	}
	if diff := cmp.Diff([]Point{{500, 1000, 1}, nothing}, h.Of(gpu, "b").Points[1:]); diff != "" {
		t.Error(diff)
	}
	if got := h.Of(gpu, "b").Now; got != nothing {
		t.Errorf("of one that does not answer: %+v", got)
	}
	// Nor is what it counted meanwhile a part of the next step.
	add(46*s, container("b", 40*s, 40*s, 1))
	if got := h.Of(gpu, "b").Now; got.Got != Unknown {
		t.Errorf("after a gap: %+v", got)
	}
	// Steps in which nobody looked have the average.
	add(81*s, container("b", 54*s, 47*s, 2))
	if diff := cmp.Diff([]Point{{Unknown, Unknown, 1}, {400, 200, 2}, {400, 200, 2}, {400, 200, 2}}, h.Of(gpu, "b").Points); diff != "" {
		t.Error(diff)
	}
	if a, b := h.Of(gpu, ""), h.Of(gpu, "b"); a.Number == b.Number || a.Number == 0 || b.Number == 0 {
		t.Errorf("numbers %d and %d", a.Number, b.Number)
	}
}

// TestAlone: who is alone is told of what he is entitled to once in eight seconds, and shown it all the time.
func TestAlone(t *testing.T) {
	const s = time.Second
	start := time.Now()
	h := New(10*s, 4)
	var granted time.Duration
	for at := time.Duration(0); at <= 40*s; at += 2 * s {
		if at%(8*s) == 0 {
			granted = at
		}
		x := container("a", at, granted, 1)
		x.Compute.Entitled = 1000
		h.Add(start.Add(at), node(x))
		if now := h.Of(gpu, "a").Now; at > 0 && now.Entitled != 1000 {
			t.Errorf("after %v: %+v", at, now)
		}
	}
	for _, p := range h.Of(gpu, "a").Points {
		if p.Entitled != 1000 {
			t.Errorf("%+v", p)
		}
	}
	// Who does nothing is entitled to nothing, whatever was said last.
	x := container("a", 40*s, granted, 1)
	x.Compute.Entitled = 1000
	h.Add(start.Add(42*s), node(x))
	if now := h.Of(gpu, "a").Now; now.Entitled != 0 {
		t.Errorf("idle: %+v", now)
	}
}

// TestBounds: a day of looks, and one after a month of sleep, leave the points that were asked for.
func TestBounds(t *testing.T) {
	start := time.Now()
	h := New(10*time.Second, 360)
	for i := range 24 * 360 {
		at := time.Duration(i) * 10 * time.Second
		h.Add(start.Add(at), node(container("a", at/2, at, 0)))
	}
	line := h.Of(gpu, "a")
	if len(line.Points) != 360 || cap(line.Points) > 1024 {
		t.Errorf("%d points, room for %d", len(line.Points), cap(line.Points))
	}
	h.Add(start.AddDate(0, 1, 0), node(container("a", 0, 0, 0)))
	line = h.Of(gpu, "a")
	if len(line.Points) != 360 || line.Points[0].Got != Unknown || line.Now.Got != Unknown {
		t.Errorf("%d points from %+v, now %+v", len(line.Points), line.Points[0], line.Now)
	}
}
