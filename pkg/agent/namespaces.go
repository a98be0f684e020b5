// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/wire"
)

// The labels of a namespace that say how far its pods may raise their running containers beyond what was allocated. The last two are
// those that bound the weight of claims (deploy/base/admission-privileges.yaml, admission-limits.yaml).
const (
	labelMaxMemory   = ours + "max-resize-memory"
	labelMaxCores    = ours + "max-resize-cores"
	labelMaxWeight   = ours + "max-weight"
	labelAllowWeight = ours + "allow-weight"
)

var namespaceLabels = []string{labelMaxMemory, labelMaxCores, labelMaxWeight, labelAllowWeight}

// beyond is how far a namespace's pods may be raised: memory and percent are more than was allocated, weight is all of it.
type beyond struct {
	memory          quota.Bytes
	percent, weight int
}

// beyondOf reads the labels of a namespace. One without them may nothing.
func beyondOf(labels map[string]string) (may beyond, err error) {
	if text, ok := labels[labelMaxMemory]; ok {
		if may.memory, err = sizeOf("label "+labelMaxMemory, text); err != nil {
			return beyond{}, err
		}
	}
	if may.percent, err = wholeLabel(labels, labelMaxCores); err != nil {
		return beyond{}, err
	}
	if labels[labelAllowWeight] == "true" {
		may.weight = quota.MaxWeight
	}
	if _, ok := labels[labelMaxWeight]; ok {
		may.weight, err = wholeLabel(labels, labelMaxWeight)
	}
	return may, err
}

// wholeLabel reads a label that is a quantity in whole numbers; 0 where there is none.
func wholeLabel(labels map[string]string, name string) (int, error) {
	text, ok := labels[name]
	if !ok {
		return 0, nil
	}
	q, err := resource.ParseQuantity(text)
	if err != nil || q.Sign() < 0 {
		return 0, fmt.Errorf("agent: label %s=%q of the namespace: want a quantity", name, text)
	}
	return int(min(q.Value(), 1<<20)), nil
}

// namespaceTimeout bounds how long the API server is waited for, by all pods together that are due at once.
const namespaceTimeout = 5 * time.Second

// Whoever has many namespaces with pods here that ask again and again costs the API server no more than askRate requests a second of a
// node, and nothing else that the agent has to ask or to tell waits for them. An answer holds for a while.
const (
	askRate  = 2
	askBurst = 10
	keepFor  = 10 * time.Second
)

// namespaces reads the labels of namespaces that say so.
type namespaces func(ctx context.Context, name string) (map[string]string, error)

// namespacesOf asks the API server, and keeps no more of its answer than these labels.
func namespacesOf(client kubernetes.Interface) namespaces {
	limit := flowcontrol.NewTokenBucketRateLimiter(askRate, askBurst)
	return func(ctx context.Context, name string) (labels map[string]string, err error) {
		c, ok := client.CoreV1().RESTClient().(*rest.RESTClient)
		if !ok || c == nil {
			return nil, errors.New("agent: a client without an API server")
		}
		r, err := c.Get().Throttle(limit).Resource("namespaces").Name(name).SetHeader("Accept", runtime.ContentTypeProtobuf).Stream(ctx)
		if err != nil {
			return nil, err
		}
		defer r.Close()
		err = wire.Body(wire.NewReader(r)).Object("Namespace", func(body *wire.Message) error {
			err := body.Fields(func(field int, v *wire.Message) error {
				if field != namespaceMeta {
					return nil
				}
				return v.Fields(func(field int, v *wire.Message) error {
					if field != metaLabels {
						return nil
					}
					return readEntry(v, namespaceLabels, maxLabel, &labels)
				})
			})
			return cmp.Or(err, wire.ErrDone)
		})
		if !errors.Is(err, wire.ErrDone) {
			return nil, err
		}
		return labels, nil
	}
}

const (
	namespaceMeta = 1  // of k8s.io/api/core/v1/generated.proto
	maxLabel      = 63 // bytes of a value, as Kubernetes bounds it
)

// permits is what namespaces may, as it was when the API server was asked last. One goroutine uses it.
type permits struct {
	ask   namespaces
	now   func() time.Time
	known map[string]permit // maxPods at most
}

type permit struct {
	may beyond
	err error // of the labels
	at  time.Time
}

// unasked is an error of asking.
type unasked struct{ error }

func (u *unasked) Unwrap() error { return u.error }

// of is what a namespace may.
func (p *permits) of(ctx context.Context, name string) (beyond, error) {
	now := p.now()
	if a, ok := p.known[name]; ok && now.Sub(a.at) < keepFor {
		return a.may, a.err
	}
	labels, err := p.ask(ctx, name)
	if err != nil { // maybe because others took the time
		return beyond{}, &unasked{fmt.Errorf("agent: what namespace %s may is not known: %w", name, err)}
	}
	a := permit{at: now}
	a.may, a.err = beyondOf(labels)
	if len(p.known) >= maxPods {
		maps.DeleteFunc(p.known, func(_ string, a permit) bool { return now.Sub(a.at) >= keepFor })
	}
	if len(p.known) < maxPods {
		p.known[name] = a
	}
	return a.may, a.err
}
