// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// shortDir is a folder for sockets, whose paths must be short.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func options(t *testing.T, client *fake.Clientset) Options {
	dir := shortDir(t)
	o := Options{Node: "node1", Client: client, CDIDir: filepath.Join(dir, "cdi"), PluginDir: filepath.Join(dir, "p"),
		RegistryDir: filepath.Join(dir, "r"),
		Hook:        hook, Table: tableOf(2), CRISocket: criServer{name: "containerd", version: "v2.4.2"}.serve(t)}
	for _, d := range []string{o.CDIDir, o.RegistryDir} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

func TestStartRefuses(t *testing.T) {
	for want, edit := range map[string]func(*Options){
		"Node is empty":       func(o *Options) { o.Node = "" },
		"Client is nil":       func(o *Options) { o.Client = nil },
		"Table is nil":        func(o *Options) { o.Table = nil },
		`Hook "cgpu-hook"`:    func(o *Options) { o.Hook = "cgpu-hook" },
		"Hook is empty":       func(o *Options) { o.Hook = "" },
		`CDIDir ""`:           func(o *Options) { o.CDIDir = "" },
		"ignores CDI devices": func(o *Options) { o.CRISocket = criServer{name: "containerd", version: "1.6.38"}.serve(t) },
	} {
		o := options(t, fake.NewClientset())
		edit(&o)
		if d, err := Start(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			if d != nil {
				d.Stop()
			}
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestHook: the node's table tells where cgpu-hook is, and is listened to again when it has changed.
func TestHook(t *testing.T) {
	o, table := Options{}, tableOf(1)
	for _, want := range []string{"/usr/bin/cgpu-hook", "/usr/local/bin/cgpu-hook"} {
		table.Hook = want
		if got := o.hook(table); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if o.Hook = "/opt/cgpu-hook"; o.hook(table) != o.Hook {
		t.Error("what was set does not win")
	}
}

// TestRegistration is what the kubelet does with the registration socket, and what becomes of Healthy.
func TestRegistration(t *testing.T) {
	o := options(t, fake.NewClientset())
	o.PodUID = "5ec0ad00-0000-4000-8000-000000000000"
	d, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	sockets, _ := filepath.Glob(o.RegistryDir + "/*")
	if len(sockets) != 1 || !strings.Contains(sockets[0], o.PodUID) {
		t.Fatalf("%v: two agents at a time need sockets of their own", sockets)
	}
	conn, err := grpc.NewClient("unix:"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	kubelet := registration.NewRegistrationClient(conn)
	info, err := kubelet.GetInfo(t.Context(), &registration.InfoRequest{})
	if err != nil || info.Name != DriverName || info.Type != registration.DRAPlugin {
		t.Errorf("%v, %v", info, err)
	}
	if err := d.Healthy(); err != nil {
		t.Errorf("before the kubelet has answered: %v", err)
	}
	for _, c := range []struct {
		status *registration.RegistrationStatus
		want   string
	}{{&registration.RegistrationStatus{Error: "version mismatch"}, "version mismatch"},
		{&registration.RegistrationStatus{PluginRegistered: true}, ""}} {
		if _, err := kubelet.NotifyRegistrationStatus(t.Context(), c.status); (err == nil) != c.status.PluginRegistered {
			t.Errorf("%+v: %v", c.status, err)
		}
		err := d.Healthy()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

func TestHealth(t *testing.T) {
	invalid := apierrors.NewInvalid(schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}, "s", nil)
	server := func(d *Driver) func(context.Context, error, string) { return plugin{d: d}.HandleError }
	slices := func(d *Driver) func(context.Context, error, string) { return d.notPublished }
	for _, c := range []struct {
		handler         func(*Driver) func(context.Context, error, string)
		err             error
		healthy, failed bool
	}{
		{slices, errors.New("no route to host"), true, false},
		{slices, invalid, false, false},
		{server, errors.Join(kubeletplugin.ErrRecoverable, errors.New("a file")), true, false},
		{server, errors.New("the socket is gone"), false, true},
	} {
		o := options(t, fake.NewClientset())
		d, err := Start(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		c.handler(d)(t.Context(), c.err, "in the background")
		if err := d.Healthy(); (err == nil) != c.healthy {
			t.Errorf("%v: %v", c.err, err)
		}
		if err := d.Failed(); (err != nil) != c.failed {
			t.Errorf("%v: failed: %v", c.err, err)
		}
		d.Stop()
	}
}

// TestPrepare: preparing twice is as once, a claim that is refused keeps no other from being prepared, and both ends with
// nothing left.
func TestPrepare(t *testing.T) {
	good, bad := claimWith([]result{resultOf("6Gi 30 1")}), claimWith([]result{resultOf("6Gi 300 1")})
	bad.UID = "bad"
	other := claimWith([]result{{Request: "nic", Driver: "nic.example.com"}})
	other.UID = "other"
	// The API server knows the claim: else the sweep at the start, which goes on meanwhile, may find the spec and remove it.
	o := options(t, fake.NewClientset(good))
	d, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	p := plugin{d: d}
	var before []byte
	for range 2 {
		results, err := p.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{bad, good, other})
		if err != nil || len(results) != 3 {
			t.Fatalf("%v, %v", results, err)
		}
		g := results[good.UID]
		if g.Err != nil || len(g.Devices) != 1 || g.Devices[0].CDIDeviceIDs[0] != "gpu.cgpu.io/share="+claimUID+"."+shareA ||
			*g.Devices[0].ShareID != shareA || g.Devices[0].Requests[0] != "gpu" || g.Devices[0].PoolName != "node1" {
			t.Errorf("%+v", g)
		}
		if err := results["bad"].Err; err == nil || !strings.HasPrefix(err.Error(),
			"dra: claim team/claim: request gpu: consumedCapacity: cores: 300") {
			t.Error(err)
		}
		if r := results["other"]; r.Err != nil || len(r.Devices) != 0 {
			t.Errorf("%+v", r)
		}
		text, err := os.ReadFile(d.cdi.path(claimUID))
		if err != nil || before != nil && string(text) != string(before) {
			t.Errorf("%v: %s, before %s", err, text, before)
		}
		before = text
		if n := names(t, o.CDIDir); len(n) != 1 {
			t.Errorf("%v", n)
		}
	}
	for range 2 {
		results, err := p.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: claimUID}, {UID: "../../etc/passwd"}})
		if err != nil || len(results) != 2 || results[claimUID] != nil || results["../../etc/passwd"] == nil {
			t.Errorf("%v, %v", results, err)
		}
		if n := names(t, o.CDIDir); len(n) != 0 {
			t.Errorf("%v", n)
		}
	}
}

// TestPrepareIsPatient: a prepare waits for what may pass, since the kubelet comes again only after a minute.
func TestPrepareIsPatient(t *testing.T) {
	claim := claimWith([]result{resultOf("6Gi 0 1")})
	client := fake.NewClientset(claim)
	answers := []error{apierrors.NewServiceUnavailable("restarts"), errors.New("connection refused")}
	client.PrependReactor("get", "resourceclaims", func(k8stesting.Action) (bool, k8sruntime.Object, error) {
		if len(answers) == 0 {
			return false, nil, nil
		}
		err := answers[0]
		answers = answers[1:]
		return true, nil, err
	})
	o := options(t, client)
	d, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	conn, err := grpc.NewClient("unix:"+filepath.Join(o.PluginDir, DriverName, "dra.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	kubelet := drapb.NewDRAPluginClient(conn)
	prepare := func(name string) error {
		r, err := kubelet.NodePrepareResources(t.Context(),
			&drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: "team", Name: name, Uid: claimUID}}})
		if err == nil && r.Claims[claimUID].Error != "" {
			err = errors.New(r.Claims[claimUID].Error)
		}
		return err
	}
	if err := prepare("claim"); err != nil {
		t.Errorf("the API server was away: %v", err)
	}
	if err := d.Update(t.Context(), &device.Table{}); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(time.Second, func() { _ = d.Update(context.Background(), tableOf(2)) })
	if err := prepare("claim"); err != nil {
		t.Errorf("there was no table: %v", err)
	}
	least := time.Hour
	for range 3 { // a busy machine may make one of them late
		begin := time.Now()
		if err := prepare("other"); err == nil {
			t.Error("prepared a claim that is not there")
		}
		least = min(least, time.Since(begin))
	}
	if least > apiPatience {
		t.Errorf("a claim that is not there is waited for, for %v", least)
	}
}

// TestSweep: at the start the specs of claims that are gone go, and those that the API server does not answer for stay.
func TestSweep(t *testing.T) {
	mine := func(name, uid string, edit func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
		c := claimWith([]result{resultOf("6Gi 0 1")})
		c.Name, c.UID = name, types.UID(uid)
		edit(c)
		return c
	}
	nothing := func(*resourceapi.ResourceClaim) {}
	client := fake.NewClientset(
		mine("used", "used", nothing),
		mine("replaced", "another", nothing),
		mine("released", "released", func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil }),
		mine("moved", "moved", func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Pool = "node2" }),
	)
	client.PrependReactor("get", "resourceclaims", func(a k8stesting.Action) (bool, k8sruntime.Object, error) {
		if a.(k8stesting.GetAction).GetName() == "unknown" {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "resourceclaims"}, "unknown", nil)
		}
		return false, nil, nil
	})
	o := options(t, client)
	f := cdiFolder{dir: o.CDIDir}
	for _, name := range []string{"used", "replaced", "released", "moved", "unknown", "deleted"} {
		if err := f.write(types.UID(name), cdiSpec("team", name, hook, twoShares())); err != nil {
			t.Fatal(err)
		}
	}
	foreign := filepath.Join(o.CDIDir, "nvidia.json")
	if err := os.WriteFile(foreign, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	d, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	d.sweeps.Wait()
	want := fmt.Sprint([]string{"gpu.cgpu.io-share_unknown.json", "gpu.cgpu.io-share_used.json", "nvidia.json"})
	if got := fmt.Sprint(names(t, o.CDIDir)); got != want {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestSweepBesidePrepare: a claim that is prepared while the sweep asks for it keeps its spec, whatever the answer was.
func TestSweepBesidePrepare(t *testing.T) {
	claim := claimWith([]result{resultOf("6Gi 0 1")})
	client := fake.NewClientset()
	o := options(t, client)
	d := &Driver{o: o, cdi: cdiFolder{dir: o.CDIDir}, table: o.Table}
	d.o.Log = slog.New(slog.DiscardHandler)
	prepare := func() {
		results, err := plugin{d: d}.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
		if err != nil || results[claim.UID].Err != nil {
			t.Error(err, results)
		}
	}
	for _, between := range []func(){
		prepare,
		func() {
			_, _ = plugin{d: d}.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: claimUID}})
			prepare()
		},
	} {
		prepare()
		asked := false
		client.PrependReactor("get", "resourceclaims", func(k8stesting.Action) (bool, k8sruntime.Object, error) {
			if !asked {
				asked = true
				between()
			}
			return false, nil, nil
		})
		d.sweep(t.Context())
		if got := names(t, o.CDIDir); len(got) != 1 || !asked {
			t.Errorf("%v", got)
		}
		// The next sweep finds it as it was.
		d.sweep(t.Context())
		if got := names(t, o.CDIDir); len(got) != 0 {
			t.Errorf("%v", got)
		}
	}
}

// sliceClient is one in which slices can be published.
func sliceClient() *fake.Clientset {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1", UID: "node1"}}) // the slices' owner
	// The fake knows no generateName; the apiserver does.
	n := 0
	client.PrependReactor("create", "resourceslices", func(a k8stesting.Action) (bool, k8sruntime.Object, error) {
		s := a.(k8stesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		if s.Name == "" {
			n++
			s.Name = fmt.Sprint(s.GenerateName, n)
		}
		return false, nil, nil
	})
	return client
}

// TestUpdate: a GPU that vanished goes from the slice, and its claims are refused.
func TestUpdate(t *testing.T) {
	client := sliceClient()
	d, err := Start(t.Context(), options(t, client))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	publishes := func(gpus ...int) {
		t.Helper()
		var want []string
		for _, i := range gpus {
			want = append(want, strings.ToLower(uuid(i)))
		}
		deadline := time.Now().Add(time.Minute)
		for {
			l, err := client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
			var got []string
			for i := range l.Items {
				for _, d := range l.Items[i].Spec.Devices {
					got = append(got, d.Name)
				}
			}
			if err == nil && len(l.Items) == 1 && slices.Equal(got, want) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("GPUs %v are not published: %+v, %v", gpus, l, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	publishes(0, 1)
	spread := tableOf(2)
	spread.Config.Placement = ledger.PolicySpread
	d.mu.Lock()
	d.taken = map[string]quota.Bytes{uuid(0): quota.GiB}
	d.mu.Unlock()
	if err := d.Update(t.Context(), spread); err != nil {
		t.Fatal(err)
	}
	publishes(1, 0) // what has the most left is tried first
	less := tableOf(2)
	less.GPUs = less.GPUs[1:]
	if err := d.Update(t.Context(), less); err != nil {
		t.Fatal(err)
	}
	publishes(1)
	claim := claimWith([]result{resultOf("6Gi 30 1")})
	results, err := plugin{d: d}.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
	if err != nil || results[claim.UID].Err == nil {
		t.Errorf("%v, %v", results, err)
	}
	if err := d.Update(t.Context(), nil); err == nil {
		t.Error("a table that is not there is taken")
	}
}

// TestFollow: cgpu policy is noticed, and other changes of the ledger are none.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	book := ledger.Open(dir)
	tab := tableOf(2)
	gpu := ledger.GPU{UUID: uuid(1), Index: 1, Memory: tab.GPUs[1].Memory}
	d := &Driver{o: Options{Node: "node1", RunDir: dir, Log: slog.New(slog.DiscardHandler)}, table: tab}
	look := func(want bool) {
		t.Helper()
		if changed, err := d.lookAtLedger(); err != nil || changed != want {
			t.Errorf("%v, %v", changed, err)
		}
	}
	look(false) // there is no ledger
	set := func(policy sched.Policy) {
		t.Helper()
		if _, err := book.SetCard(gpu, tab.Config.Card(), func(c *sched.Card) error { c.Policy = policy; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	set(sched.PolicyNative)
	look(true)
	look(false)
	if c := d.node().cards[uuid(1)]; c.Policy != sched.PolicyNative {
		t.Errorf("%+v", c)
	}
	request := ledger.Request{Record: ledger.Record{ID: "c", Nonce: "n", VGPUs: []ledger.VGPU{{UUID: uuid(1),
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}}, GPUs: []ledger.GPU{gpu}, Card: tab.Config.Card()}
	if _, err := book.Reserve(request); err != nil {
		t.Fatal(err)
	}
	look(false) // a container
	tab.Config.Placement = "spread"
	order := func(want ...int) {
		t.Helper()
		var got []int
		for _, g := range inOrder(d.table, d.taken).GPUs {
			got = append(got, g.Index)
		}
		if !slices.Equal(got, want) {
			t.Errorf("GPUs %v, want %v", got, want)
		}
	}
	order(0, 1)
	request.Record.ID, request.Record.Nonce, request.Record.VGPUs[0].UUID = "d", "m", uuid(0)
	request.GPUs, request.Record.VGPUs[0].Limit = []ledger.GPU{{UUID: uuid(0), Memory: tab.GPUs[0].Memory}}, 2*quota.GiB
	request.Record.Allocated = []ledger.Allocation{{ID: "s", UUID: uuid(0), Given: request.Record.VGPUs[0]}}
	if _, err := book.Reserve(request); err != nil {
		t.Fatal(err)
	}
	look(true) // the other GPU has more left
	order(1, 0)
	// What a pod's author does to his share, within what was allocated and beyond, is nothing to schedulers.
	for _, limit := range []quota.Bytes{512 * quota.MiB, 3 * quota.GiB} {
		change := ledger.ChangeRequest{GPUs: request.GPUs, Card: tab.Config.Card(), Only: []string{uuid(0)},
			Settings: ledger.Settings{Limit: &limit}, ByPod: true, Headroom: quota.GiB}
		if errs := book.ChangeByPods([]ledger.PodChange{{Nonce: "m", Requests: []ledger.ChangeRequest{change}}}); errs[0] != nil {
			t.Fatal(errs)
		}
		look(false)
		order(1, 0)
	}
	if err := book.Release("m"); err != nil {
		t.Fatal(err)
	}
	look(true)
	order(0, 1)
	set(sched.PolicyFixed)
	look(true)
	// A damaged ledger changes nothing, and is read again when it is whole.
	whole, err := os.ReadFile(ledger.File(dir))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(ledger.File(dir), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if changed, err := d.lookAtLedger(); changed || err == nil || d.node().cards[uuid(1)].Policy != sched.PolicyFixed {
		t.Errorf("%v, %v", changed, err)
	}
	if err := os.WriteFile(ledger.File(dir), whole, 0o600); err != nil {
		t.Fatal(err)
	}
	look(false)
	if err := os.Remove(ledger.File(dir)); err != nil {
		t.Fatal(err)
	}
	look(true)
}

// BenchmarkPrepare is one claim, without the API server's part.
func BenchmarkPrepare(b *testing.B) {
	o := Options{Node: "node1", Hook: hook, Log: slog.New(slog.DiscardHandler)}
	d := &Driver{o: o, cdi: cdiFolder{dir: b.TempDir()}, table: tableOf(8)}
	claims := []*resourceapi.ResourceClaim{claimWith([]result{resultOf("6Gi 30 1")}, configFor(byClaim, `,"weight":2`))}
	for b.Loop() {
		results, err := plugin{d: d}.PrepareResourceClaims(context.Background(), claims)
		if err != nil || results[claimUID].Err != nil {
			b.Fatal(err, results)
		}
	}
}
