// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	resourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/opencgpu/cgpu/pkg/wire"
)

// protobufOf is an object as the API server sends it.
func protobufOf(t testing.TB, o k8sruntime.Object) []byte {
	t.Helper()
	info, ok := k8sruntime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), k8sruntime.ContentTypeProtobuf)
	if !ok {
		t.Fatal("no protocol buffers")
	}
	version := resourceapi.SchemeGroupVersion
	if _, status := o.(*metav1.Status); status {
		version = corev1.SchemeGroupVersion
	}
	b, err := k8sruntime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, version), o)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// claimServer is an API server that has these claims and nothing else; most is how many it was asked for at the same time.
func claimServer(t *testing.T, claims map[string]*resourceapi.ResourceClaim) (client kubernetes.Interface, most *atomic.Int32) {
	most = &atomic.Int32{}
	var now atomic.Int32
	bodies := map[string][]byte{}
	for name, c := range claims {
		bodies[name] = protobufOf(t, c)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/resourceclaims/") {
			n := now.Add(1)
			defer now.Add(-1)
			for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
			}
		}
		w.Header().Set("Content-Type", k8sruntime.ContentTypeProtobuf)
		body, ok := bodies[path.Base(r.URL.Path)]
		if !ok || !strings.Contains(r.URL.Path, "/namespaces/team/resourceclaims/") {
			gone := apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), path.Base(r.URL.Path)).ErrStatus
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write(protobufOf(t, &gone))
			return
		}
		_, _ = w.Write(body)
	}))
	t.Cleanup(s.Close)
	real, err := kubernetes.NewForConfig(&rest.Config{Host: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	return claimsOf{fake.NewClientset(), real}, most
}

// claimsOf takes claims from an API server, all else from memory.
type claimsOf struct {
	*fake.Clientset
	real kubernetes.Interface
}

func (c claimsOf) ResourceV1() resourcev1.ResourceV1Interface {
	return claimsV1{c.Clientset.ResourceV1(), c.real.ResourceV1()}
}

type claimsV1 struct {
	resourcev1.ResourceV1Interface
	real resourcev1.ResourceV1Interface
}

func (c claimsV1) RESTClient() rest.Interface { return c.real.RESTClient() }
func (c claimsV1) ResourceClaims(namespace string) resourcev1.ResourceClaimInterface {
	return c.real.ResourceClaims(namespace)
}

// full is a claim with all that the driver goes by.
func full() *resourceapi.ResourceClaim {
	r := resultOf("6Gi 30 2")
	r.AdminAccess = ptr(false)
	c := claimWith([]result{r}, configFor(byClass, `,"priority":"best-effort"`), configFor(byClaim, `,"containers":2`, "gpu"))
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: vgpuClass,
			Capacity: &resourceapi.CapacityRequirements{Requests: used("6Gi 30 2")}}},
		{Name: "or", FirstAvailable: []resourceapi.DeviceSubRequest{{Name: "a", DeviceClassName: WholeClass,
			Capacity: &resourceapi.CapacityRequirements{Requests: used("1Gi")}}}}}
	return c
}

// hostile adds what the driver does not go by to a claim, a megabyte and more of it.
func hostile(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c.Labels = map[string]string{}
	for i := range 40000 {
		c.Labels[fmt.Sprintf("%05x", i)] = ""
		c.Finalizers = append(c.Finalizers, "a/b")
		c.OwnerReferences = append(c.OwnerReferences, metav1.OwnerReference{})
	}
	for i := range c.Spec.Devices.Requests {
		if e := c.Spec.Devices.Requests[i].Exactly; e != nil {
			e.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: strings.Repeat("x", 100000)}}}
		}
	}
	c.Status.ReservedFor = make([]resourceapi.ResourceClaimConsumerReference, 1000)
	return c
}

// What is read of a claim is what Kubernetes' own types hold of it, however much else it has.
func TestClaimFields(t *testing.T) {
	plain := full()
	client, _ := claimServer(t, map[string]*resourceapi.ResourceClaim{"claim": hostile(full())})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	got, err := slim(client).ResourceV1().ResourceClaims("team").Get(t.Context(), "claim", metav1.GetOptions{})
	runtime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(plain, got); diff != "" {
		t.Error(diff)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("%d bytes allocated for a claim", n)
	}
	if _, err := slim(client).ResourceV1().ResourceClaims("other").Get(t.Context(), "claim", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a claim of another namespace: %v", err)
	}
}

// A claim that has more of what counts than is read of one is refused, and no other.
func TestClaimTooLarge(t *testing.T) {
	large := full()
	for range 40 {
		large.Status.Allocation.Devices.Config = append(large.Status.Allocation.Devices.Config, configFor(byClaim, strings.Repeat(" ", 10000)))
	}
	client, _ := claimServer(t, map[string]*resourceapi.ResourceClaim{"claim": large})
	_, err := slim(client).ResourceV1().ResourceClaims("team").Get(t.Context(), "claim", metav1.GetOptions{})
	if !errors.Is(err, wire.ErrLarge) || !strings.Contains(err.Error(), "claim team/claim") {
		t.Errorf("%v", err)
	}
}

// The kubelet asks for all claims of a pod at once, and for several pods: the driver reads them one at a time, and one that cannot be had
// is the error of that one.
func TestClaimsOneByOne(t *testing.T) {
	claims := map[string]*resourceapi.ResourceClaim{}
	var ask [3][]*drapb.Claim
	for i := range 12 {
		c := hostile(full())
		c.Name, c.UID = fmt.Sprint("claim", i), types.UID(fmt.Sprintf("4a3d8f1e-0000-4000-8000-0000000000%02d", i))
		claims[c.Name] = c
		ask[i%3] = append(ask[i%3], &drapb.Claim{Namespace: "team", Name: c.Name, Uid: string(c.UID)})
	}
	gone := &drapb.Claim{Namespace: "team", Name: "gone", Uid: claimUID}
	ask[0] = append(ask[0][:1], append([]*drapb.Claim{gone}, ask[0][1:]...)...)
	o := options(t, nil)
	var most *atomic.Int32
	o.Client, most = claimServer(t, claims)
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
	var pods sync.WaitGroup
	for _, list := range ask {
		pods.Go(func() {
			r, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: list})
			if err != nil || len(r.Claims) != len(list) {
				t.Errorf("%v, %v", r, err)
				return
			}
			for _, c := range list {
				if text := r.Claims[c.Uid].Error; (text != "") != (c == gone) || c == gone && !strings.Contains(text, "not found") {
					t.Errorf("%s: %q", c.Name, text)
				}
			}
		})
	}
	pods.Wait()
	if n := most.Load(); n != 1 {
		t.Errorf("%d claims are read at a time", n)
	}
	if n := len(names(t, o.CDIDir)); n != 12 {
		t.Errorf("%d claims are prepared", n)
	}
}
