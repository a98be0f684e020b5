// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	resourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/watchlist"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/opencgpu/cgpu/pkg/wire"
)

// Claims are read one at a time, and no more of each than counts. A claim may be of more than a megabyte, such as of labels, which is
// four to twenty as objects of Go; the kubelet asks for all claims of a pod at once, and for those of many pods; and the library
// kubeletplugin has all that it is asked for in memory (getResourceClaims in its draplugin.go).

// maxClaim bounds what is kept of a claim. 32 requests and as many configurations of 10 KiB, which is the most that the API takes, and as
// many of classes, are not always less; nobody needs a tenth of it.
const maxClaim = 256 << 10

// claimFields are the fields that the driver goes by (k8s.io/api/resource/v1/generated.proto). TestClaimFields compares with the types.
var claimFields = func() wire.Keep {
	exactly := wire.Keep{1: nil, 7: nil}     // class, capacity
	sub := wire.Keep{1: nil, 2: nil, 7: nil} // name, class, capacity
	request := wire.Keep{1: nil, 2: exactly, 3: sub}
	// request, driver, pool, device, adminAccess, shareID, consumedCapacity
	result := wire.Keep{1: nil, 2: nil, 3: nil, 4: nil, 5: nil, 9: nil, 10: nil}
	devices := wire.Keep{1: result, 2: nil} // results, config
	return wire.Keep{
		1: {1: nil, 3: nil, 5: nil}, // metadata: name, namespace, uid
		2: {1: {1: request}},        // spec: devices: requests
		3: {1: {1: devices}},        // status: allocation: devices
	}
}()

// slim is a client by which claims are read so. One without an API server, of a test, stays what it is.
func slim(client kubernetes.Interface) kubernetes.Interface {
	if c, ok := client.ResourceV1().RESTClient().(*rest.RESTClient); !ok || c == nil {
		return client
	}
	return slimClient{client}
}

type slimClient struct{ kubernetes.Interface }

func (c slimClient) ResourceV1() resourcev1.ResourceV1Interface {
	return slimV1{c.Interface.ResourceV1()}
}

// IsWatchListSemanticsUnSupported is what a reflector asks of a client.
func (c slimClient) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(c.Interface)
}

type slimV1 struct{ resourcev1.ResourceV1Interface }

func (c slimV1) ResourceClaims(namespace string) resourcev1.ResourceClaimInterface {
	return slimClaims{c.ResourceV1Interface.ResourceClaims(namespace), c.RESTClient(), namespace}
}

type slimClaims struct {
	resourcev1.ResourceClaimInterface
	client    rest.Interface
	namespace string
}

// Get returns what counts of a claim.
func (c slimClaims) Get(ctx context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := c.client.Get().Namespace(c.namespace).Resource("resourceclaims").Name(name).SetHeader("Accept",
		runtime.ContentTypeProtobuf).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	claim := &resourceapi.ResourceClaim{}
	err = wire.Body(wire.NewReader(r)).Object("ResourceClaim", func(body *wire.Message) error {
		text, err := body.Cut(claimFields, maxClaim)
		if err == nil {
			err = claim.Unmarshal(text)
		}
		if err == nil {
			err = wire.ErrDone
		}
		return err
	})
	if !errors.Is(err, wire.ErrDone) {
		return nil, fmt.Errorf("dra: claim %s/%s: %w", c.namespace, name, err)
	}
	return claim, nil
}

// oneByOne makes of the kubelet's call for all claims of a pod one for each, of which one at a time has its claim in memory. What the
// library could not have is an error of that claim alone, and tried again for a while: the kubelet comes again only after a minute or more.
func (d *Driver) oneByOne(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	all, ok := req.(*drapb.NodePrepareResourcesRequest)
	if !ok {
		return handler(ctx, req)
	}
	answer := &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{}}
	deadline := time.Now().Add(apiPatience)
	for _, claim := range all.Claims {
		one, err := d.prepareOne(ctx, claim, handler)
		for err != nil && !lasting(err) && time.Now().Before(deadline) && pause(ctx) {
			one, err = d.prepareOne(ctx, claim, handler)
		}
		if err != nil {
			d.o.Log.Error("claim is not prepared", "claim", claim.Namespace+"/"+claim.Name, "uid", claim.Uid, "error", err)
			one = &drapb.NodePrepareResourceResponse{Error: err.Error()}
		}
		answer.Claims[claim.Uid] = one
	}
	return answer, nil
}

// lasting: asking again at once is of no use.
func lasting(err error) bool { return apierrors.IsNotFound(err) || errors.Is(err, wire.ErrLarge) }

// prepareOne makes the call for one claim, when no other is under way.
func (d *Driver) prepareOne(ctx context.Context, claim *drapb.Claim, handler grpc.UnaryHandler) (*drapb.NodePrepareResourceResponse,
	error) {
	select {
	case d.preparing <- struct{}{}:
		defer func() { <-d.preparing }()
	case <-ctx.Done():
		return nil, fmt.Errorf("dra: another claim is being prepared: %w", ctx.Err())
	}
	answer, err := handler(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil {
		return nil, err
	}
	list, ok := answer.(*drapb.NodePrepareResourcesResponse)
	if !ok || list.Claims[claim.Uid] == nil {
		return nil, fmt.Errorf("dra: claim %s/%s: there is no answer for it", claim.Namespace, claim.Name)
	}
	return list.Claims[claim.Uid], nil
}
