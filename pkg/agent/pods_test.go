// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/wire"
)

// protocolBuffers are how the API server writes them.
func protocolBuffers(t testing.TB) apiruntime.SerializerInfo {
	t.Helper()
	info, ok := apiruntime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), apiruntime.ContentTypeProtobuf)
	if !ok {
		t.Fatal("no protocol buffers")
	}
	return info
}

// encoded is an object as the API server sends it.
func encoded(t testing.TB, o apiruntime.Object) []byte {
	t.Helper()
	b, err := apiruntime.Encode(scheme.Codecs.EncoderForVersion(protocolBuffers(t).Serializer, v1.SchemeGroupVersion), o)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// framed is an event of a watch, as the API server sends it.
func framed(t testing.TB, kind watch.EventType, o apiruntime.Object) []byte {
	t.Helper()
	b, err := apiruntime.Encode(protocolBuffers(t).StreamSerializer, &metav1.WatchEvent{Type: string(kind),
		Object: apiruntime.RawExtension{Raw: encoded(t, o)}})
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
}

// read is what is kept of a pod.
func read(t testing.TB, p *v1.Pod) *pod {
	t.Helper()
	f, err := readFrame(deviceplugin.Names{}, bufio.NewReader(bytes.NewReader(framed(t, watch.Added, p))))
	if err != nil {
		t.Fatal(err)
	}
	return f.pod
}

// answer is a source with these pods, to which nothing happens.
func answer(t testing.TB, list ...*v1.Pod) source {
	return func(ctx context.Context, o metav1.ListOptions) (io.ReadCloser, error) {
		if o.Watch && o.SendInitialEvents != nil {
			return nil, apierrors.NewBadRequest("an old API server")
		}
		if o.Watch {
			r, w := io.Pipe()
			context.AfterFunc(ctx, func() { w.Close() })
			return r, nil
		}
		all := &v1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
		for _, p := range list {
			all.Items = append(all.Items, *p)
		}
		return io.NopCloser(bytes.NewReader(encoded(t, all))), nil
	}
}

// hostilePod has a little more than a megabyte, in as many pieces as there can be.
func hostilePod(name string) *v1.Pod {
	p := podOf("ns", name, "main", "id-"+name)
	p.Annotations = map[string]string{annotationLimit: "4Gi", annotationWeight: strings.Repeat("9", 200000)}
	for i := range 20000 {
		p.Annotations[fmt.Sprintf("cgpu.io/%d", i)] = "x"
		p.Spec.Containers = append(p.Spec.Containers, v1.Container{Name: fmt.Sprintf("c%d", i)})
		p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, v1.ContainerStatus{Name: fmt.Sprintf("c%d", i),
			ContainerID: fmt.Sprint("containerd://", name, i)})
	}
	return p
}

// What the reader finds is what Kubernetes' own types hold.
func TestReadPod(t *testing.T) {
	full := &v1.Pod{}
	fill(reflect.ValueOf(full).Elem(), 0)
	full.Annotations = map[string]string{"a": "b", annotationSpill: "1GiB", annotationPriority: "", "cgpu.io/unknown": "x"}
	full.Spec.InitContainers, full.Spec.Containers = []v1.Container{{Name: "first", Image: "i"}},
		[]v1.Container{{Name: "main"}, {Name: "side", Args: []string{"name"}}}
	full.Status.InitContainerStatuses = []v1.ContainerStatus{{Name: "first", ContainerID: "containerd://id0", Image: "i", RestartCount: 3}}
	full.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "main"}, {Name: "side", ContainerID: "cri-o://id2", Ready: true}}
	got := read(t, full)
	if got.Name != full.Name || got.Namespace != full.Namespace || got.UID != full.UID || got.ResourceVersion != full.ResourceVersion ||
		got.Name == "" {
		t.Errorf("%+v", got.ObjectMeta)
	}
	if want := map[string]string{annotationSpill: "1GiB", annotationPriority: ""}; !reflect.DeepEqual(got.Annotations, want) {
		t.Errorf("annotations %v, want %v", got.Annotations, want)
	}
	if want := []string{"main", "side", "first"}; !reflect.DeepEqual(got.names, want) {
		t.Errorf("names %v, want %v", got.names, want)
	}
	if want := []running{{"side", "id2"}, {"first", "id0"}}; !reflect.DeepEqual(got.running, want) {
		t.Errorf("running %v, want %v", got.running, want)
	}
	created, scheduled, now := metav1.Unix(1700000000, 0), metav1.Unix(1700000005, 0), metav1.Now()
	limit := func(memory, percent string) v1.ResourceRequirements {
		return v1.ResourceRequirements{Requests: v1.ResourceList{deviceplugin.ResourceMemory: resource.MustParse("99")},
			Limits: v1.ResourceList{"cpu": resource.MustParse("2"),
				deviceplugin.ResourceMemory: resource.MustParse(memory), deviceplugin.ResourcePercent: resource.MustParse(percent)}}
	}
	full.CreationTimestamp, full.DeletionTimestamp, full.Status.StartTime, full.Status.Phase = created, nil, nil, v1.PodPending
	full.Labels = map[string]string{"a": "b", deviceplugin.ResourceCount: "2"}
	full.Annotations["ALIYUN_COM_GPU_MEM_IDX"], full.Annotations["ALIYUN_COM_GPU_MEM_DEV"] = "1", "14"
	full.Spec.InitContainers[0].Resources, full.Spec.Containers[0].Resources, full.Spec.Containers[1].Resources = limit("3", "0"),
		limit("2k", "40"), limit("1", "-5")
	full.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue, LastTransitionTime: now},
		{Type: v1.PodScheduled, Status: v1.ConditionTrue, LastTransitionTime: scheduled}}
	want := deviceplugin.Pod{Namespace: full.Namespace, Name: full.Name, UID: string(full.UID), Created: created.Time,
		Scheduled: scheduled.Time, Waiting: true,
		Annotations: map[string]string{annotationSpill: "1GiB", annotationPriority: "", "ALIYUN_COM_GPU_MEM_IDX": "1"}, Count: "2", Memory: 2001,
		Containers: []deviceplugin.Container{{Name: "main", Memory: 2000, Percent: 40}, {Name: "side", Memory: 1},
			{Name: "first", Init: true, Memory: 3}}}
	if got = read(t, full); !reflect.DeepEqual(got.forPlugin(), want) {
		t.Errorf("%+v, want\n%+v", got.forPlugin(), want)
	}
	full.DeletionTimestamp, full.Status.StartTime, full.Status.Phase = &now, &now, v1.PodRunning
	if p := read(t, full).forPlugin(); p.Waiting || !p.Started || !p.Ending {
		t.Errorf("%+v", p)
	}
	full.DeletionTimestamp, full.Status.StartTime, full.Status.Phase = nil, nil, v1.PodPending
	list, err := readList(deviceplugin.Names{}, bytes.NewReader(encoded(t,
		&v1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "9", Continue: "more"},
			Items: []v1.Pod{*full, *podOf("b", "db", "main", "id3"), *full}})), 2, func(*pod) {})
	if err != nil || list.ResourceVersion != "9" || list.Continue != "more" || len(list.Items) != 2 ||
		!reflect.DeepEqual(list.Items[0], got) || list.Items[1].Name != "db" {
		t.Errorf("%+v, %v", list, err)
	}
	big := read(t, hostilePod("big"))
	if len(big.Annotations) != 2 || len(big.Annotations[annotationWeight]) != maxAnnotation+1 || len(big.names) != maxContainers ||
		len(big.running) != maxContainers || big.running[0].id != "id-big" {
		t.Errorf("%d annotations, %d names, %d IDs are kept", len(big.Annotations), len(big.names), len(big.running))
	}
}

// An amount is what the kubelet takes it for, however it is written, or the pod is one that is not served.
func TestReadAmounts(t *testing.T) {
	zeros := strings.Repeat("0", 40)
	for text, more := range map[string]bool{"4": false, "+4": false, "0004": false, "4.0": false, "4000m": false, "4e3": false,
		"4k": false, "4Ki": false, "0": false,
		zeros + "4": true, "+" + zeros + "4": true, zeros + "4Ki": true, "4e" + zeros + "3": true, strings.Repeat(zeros, 10000) + "4": true} {
		p := podOf("b", "db", "main", "id")
		amount := resource.MustParse(text)
		p.Spec.Containers[0].Resources.Limits = v1.ResourceList{deviceplugin.ResourceMemory: amount}
		got := read(t, p).forPlugin()
		if more {
			if !got.More {
				t.Errorf("%.50s: %+v", text, got)
			}
		} else if got.More || got.Memory != int(amount.Value()) {
			t.Errorf("%s: %+v, want %d", text, got, amount.Value())
		}
	}
}

// fill gives each field of a type a value, so that one that is taken for another is seen.
func fill(v reflect.Value, depth int) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprint(v.Type().Name(), "-", depth, v.Addr().Pointer()%997))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(300)
	case reflect.Pointer:
		if depth < 8 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), depth+1)
		}
	case reflect.Slice:
		if depth < 8 && v.Type().Elem().Kind() != reflect.Uint8 {
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
			fill(v.Index(0), depth+1)
			fill(v.Index(1), depth+1)
		}
	case reflect.Struct:
		switch v.Type() {
		case reflect.TypeOf(metav1.Time{}), reflect.TypeOf(metav1.MicroTime{}):
			return
		}
		for i := range v.NumField() {
			if v.Field(i).CanSet() && v.Type().Field(i).Name != "Quantity" {
				fill(v.Field(i), depth+1)
			}
		}
	}
}

// What is cut off or is none of it is an error, and no more.
func TestReadBroken(t *testing.T) {
	whole := framed(t, watch.Added, podOf("a", "web", "main", "id1"))
	for n := range whole {
		if _, err := readFrame(deviceplugin.Names{}, bufio.NewReader(bytes.NewReader(whole[:n]))); err == nil {
			t.Fatalf("%d of %d bytes are taken", n, len(whole))
		}
	}
	if _, err := readList(deviceplugin.Names{}, bytes.NewReader(encoded(t, &v1.ConfigMapList{})), 9,
		func(*pod) {}); !errors.Is(err, wire.ErrFormat) {
		t.Errorf("a list of something else: %v", err)
	}
	if _, err := readFrame(deviceplugin.Names{}, bufio.NewReader(bytes.NewReader(framed(t, watch.Added, &v1.ConfigMap{})))); !errors.Is(err,
		wire.ErrFormat) {
		t.Errorf("something else: %v", err)
	}
	if _, err := readList(deviceplugin.Names{}, strings.NewReader(`{"kind":"PodList"}`), 9, func(*pod) {}); !errors.Is(err, wire.ErrFormat) {
		t.Errorf("JSON: %v", err)
	}
}

func FuzzReadPod(f *testing.F) {
	f.Add(framed(f, watch.Added, podOf("a", "web", "main", "id1")))
	f.Add(framed(f, watch.Error, &metav1.Status{Code: 410}))
	f.Add(encoded(f, &v1.PodList{Items: []v1.Pod{*podOf("a", "web", "main", "id1")}}))
	f.Fuzz(func(t *testing.T, text []byte) {
		if got, err := readFrame(deviceplugin.Names{}, bufio.NewReader(bytes.NewReader(text))); err == nil && got.pod != nil &&
			(len(got.pod.names) > maxContainers || len(got.pod.Annotations) > len(keptAnnotations)) {
			t.Error("too much is kept")
		}
		_, _ = readList(deviceplugin.Names{}, bytes.NewReader(text), 3, func(*pod) {})
	})
}

// An API server with pods of a megabyte, as their author can make any number of: neither a list nor a watch of them needs memory,
// and those that have ended are not asked for.
func TestBigPods(t *testing.T) {
	const count = 40
	one := hostilePod("p")
	events := make(chan []byte, 16)
	for _, streams := range []bool{true, false} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			if s := q.Get("fieldSelector"); !strings.Contains(s, "spec.nodeName=n") || !strings.Contains(s, "status.phase!=Failed") ||
				!strings.Contains(s, "status.phase!=Succeeded") {
				t.Errorf("selector %q", s)
			}
			if !strings.HasPrefix(r.Header.Get("Accept"), apiruntime.ContentTypeProtobuf) {
				t.Errorf("accepts %q", r.Header.Get("Accept"))
			}
			if q.Get("watch") == "" {
				w.Header().Set("Content-Type", apiruntime.ContentTypeProtobuf)
				list := &v1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "5"}}
				for i := range count {
					p := one.DeepCopy()
					p.Name, p.UID = fmt.Sprint("p", i), types.UID(fmt.Sprint("u", i))
					list.Items = append(list.Items, *p)
				}
				_, _ = w.Write(encoded(t, list))
				return
			}
			if q.Get("sendInitialEvents") != "" && !streams {
				b := encoded(t, &apierrors.NewBadRequest("sendInitialEvents").ErrStatus)
				w.Header().Set("Content-Type", apiruntime.ContentTypeProtobuf)
				w.WriteHeader(http.StatusBadRequest)
				_, _ = w.Write(b)
				return
			}
			w.Header().Set("Content-Type", apiruntime.ContentTypeProtobuf+";stream=watch")
			if q.Get("sendInitialEvents") != "" {
				for i := range count {
					p := one.DeepCopy()
					p.Name, p.UID, p.ResourceVersion = fmt.Sprint("p", i), types.UID(fmt.Sprint("u", i)), "5"
					_, _ = w.Write(framed(t, watch.Added, p))
				}
				_, _ = w.Write(framed(t, watch.Bookmark, &v1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "5",
					Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}))
			}
			w.(http.Flusher).Flush()
			for {
				select {
				case <-r.Context().Done():
					return
				case b := <-events:
					_, _ = w.Write(b)
					w.(http.Flusher).Flush()
				}
			}
		}))
		client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
		if err != nil {
			t.Fatal(err)
		}
		p := newPods(apiServer(client, "n"), silent)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); p.run(ctx) }()
		if !p.synced(ctx, time.Minute) {
			t.Fatal("pods are not known")
		}
		wait := func(what string, f func() bool) {
			t.Helper()
			for deadline := time.Now().Add(time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("streams %v: %s", streams, what)
				}
			}
		}
		if n := len(p.informer.GetStore().ListKeys()); n != count || p.get("ns/p7") == nil ||
			p.get("ns/p7").Annotations[annotationLimit] != "4Gi" {
			t.Errorf("streams %v: %d pods", streams, n)
		}
		events <- framed(t, watch.Modified, podOf("ns", "p7", "main", "new"))
		wait("not changed", func() bool { o, _ := p.owner("new", ""); return o != nil })
		events <- framed(t, watch.Deleted, podOf("ns", "p7", "main", "new"))
		wait("not gone", func() bool { return p.get("ns/p7") == nil })
		if o, name := p.owner("new", ""); o == nil || o.Name != "p7" || name != "main" {
			t.Errorf("the last that happened to a pod is not told: %v", o)
		}
		stop()
		<-done
		server.Close()
	}
}

// Reading a big pod takes a fraction of its size, and that only for a moment. As an object of Go it is 93 MiB.
func TestReadAllocates(t *testing.T) {
	text := framed(t, watch.Added, hostilePod("big"))
	r := bufio.NewReaderSize(nil, 32<<10)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r.Reset(bytes.NewReader(text))
	if _, err := readFrame(deviceplugin.Names{}, r); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("%d bytes allocated for a pod of %d", n, len(text))
	}
}

// However large pods are, and in whatever they are, what is kept of each is bounded, and of all together; one of usual size is kept
// whole whatever others there are, and the device plugin knows of each what it asks for.
func TestKeptIsBounded(t *testing.T) {
	hostile := func(i int) *pod {
		p := &pod{ObjectMeta: metav1.ObjectMeta{Namespace: "evil", Name: fmt.Sprint(i), Annotations: map[string]string{}}}
		for _, name := range keptAnnotations {
			p.Annotations[name] = strings.Repeat("x", maxAnnotation+1)
		}
		for n := range 1000 {
			p.see(deviceplugin.Container{Name: strings.Repeat("c", maxContainer), Memory: 1})
			if n < maxContainers {
				p.running = append(p.running, running{strings.Repeat("c", maxContainer), strings.Repeat("f", maxID)})
			}
		}
		return p
	}
	p := newPods(answer(t), silent)
	for i := range maxPods {
		one := hostile(i)
		p.bound(one)
		if n := one.size(); n > maxPod || len(one.gpu) != deviceplugin.MaxContainers || !one.more || one.units != 1000 {
			t.Fatalf("%d bytes are kept of a pod, %d containers for the device plugin", n, len(one.gpu))
		}
	}
	if p.all > 3*maxAll {
		t.Errorf("%d bytes are kept", p.all)
	}
	usual := read(t, podOf("a", "web", "main", "id1"))
	if p.bound(usual); usual.cut || len(usual.running) != 1 || usual.Annotations[annotationPriority] == "" {
		t.Errorf("a pod of usual size is cut: %+v", usual)
	}
	for range 3 { // the same pod changes, and goes
		p.bound(hostile(7))
	}
	was := p.all
	p.forget("evil/7")
	if n := was - p.all; n <= 0 || n > maxPod {
		t.Errorf("%d bytes of one pod were counted", n)
	}
	if p.forgetAll(); p.all != 0 {
		t.Error("something is counted")
	}
}

// A pod of 300,000 empty sources of a volume, which is 1.2 MB and thirty times that in objects of Go, is read like any other.
func TestReadEmptySources(t *testing.T) {
	one := podOf("ns", "p", "main", "id1")
	one.Spec.Volumes = []v1.Volume{{VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: make([]v1.VolumeProjection,
		300000)}}}}
	for i := range one.Spec.Volumes[0].Projected.Sources {
		one.Spec.Volumes[0].Projected.Sources[i].DownwardAPI = &v1.DownwardAPIProjection{}
	}
	text := framed(t, watch.Added, one)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f, err := readFrame(deviceplugin.Names{}, wire.NewReader(bytes.NewReader(text)))
	runtime.ReadMemStats(&after)
	if err != nil || len(f.pod.names) != 1 || f.pod.running[0].id != "id1" {
		t.Errorf("%+v, %v", f.pod, err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 512<<10 {
		t.Errorf("%d bytes allocated for a pod of %d", n, len(text))
	}
}

// Of more pods than a node can have, the agent knows some.
func TestTooManyPods(t *testing.T) {
	p := newPods(answer(t), silent)
	d := &decoder{p: p}
	var stream bytes.Buffer
	for i := range maxPods + 100 {
		stream.Write(framed(t, watch.Added, podOf("a", fmt.Sprint(i), "main", "")))
	}
	stream.Write(framed(t, watch.Bookmark, &v1.Pod{}))
	d.r = bufio.NewReader(&stream)
	n := 0
	for {
		kind, _, err := d.Decode()
		if err != nil {
			t.Fatal(err)
		}
		if kind == watch.Bookmark {
			break
		}
		n++
	}
	if n != maxPods {
		t.Errorf("%d pods of a watch are taken, want %d", n, maxPods)
	}
}

// TestReadPodNames: what pods call the resources is the node's to say.
func TestReadPodNames(t *testing.T) {
	p := podOf("ns", "p", "main", "id")
	p.Spec.Containers[0].Resources.Limits = v1.ResourceList{"tencent.com/vcuda-memory": resource.MustParse("4"),
		deviceplugin.ResourceMemory: resource.MustParse("9"), "tencent.com/vcuda-core": resource.MustParse("30")}
	names := deviceplugin.Names{Memory: "tencent.com/vcuda-memory", Percent: "tencent.com/vcuda-core"}
	f, err := readFrame(names, bufio.NewReader(bytes.NewReader(framed(t, watch.Added, p))))
	if err != nil || len(f.pod.gpu) != 1 || f.pod.gpu[0].Memory != 4 || f.pod.gpu[0].Percent != 30 {
		t.Errorf("%+v, %v", f.pod, err)
	}
}
