// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	admission "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/wire"
)

// since is the time from which on pods have no forged decisions. What the API server has of the policy is noted; that it does not answer
// says nothing of the policy, unless it does not let the agent see it.
func (p *Plugin) since(ctx context.Context) (time.Time, error) {
	client, name := p.o.Client.AdmissionregistrationV1(), p.o.Scheduler.PolicyName()
	policy, err := client.ValidatingAdmissionPolicies().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		policy, err = nil, nil
	}
	var binding *admission.ValidatingAdmissionPolicyBinding
	if err == nil && policy != nil {
		if binding, err = client.ValidatingAdmissionPolicyBindings().Get(ctx, name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
			binding, err = nil, nil
		}
	}
	if err != nil {
		away := fmt.Errorf("nri: policy %s: %w", name, err)
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			p.set(&p.guarded, away)
		}
		return time.Time{}, away
	}
	since, err := p.o.Scheduler.Guarded(policy, binding)
	p.set(&p.guarded, err)
	return since, err
}

// Bounds of what is read of a pod: Kubernetes' of its names, and of annotations' keys.
const (
	maxName      = 253
	maxContainer = 63
	maxKey       = 253 + 1 + 63
)

// Numbers of the fields that are read, of k8s.io/api/core/v1/generated.proto and k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto.
// TestCreateContainer reads what the types encode.
const (
	podMeta, podSpec = 1, 2

	metaName, metaNamespace, metaUID             = 1, 3, 5
	metaCreated, metaDeleted, metaAnnotations    = 8, 9, 12
	specContainers, specNode, specInitContainers = 2, 10, 20
	specEphemeral, ephemeralCommon               = 34, 1
	containerName, containerResources, itsLimits = 1, 8, 1
	quantityText                                 = 1
	timeSeconds, mapKey, mapValue                = 1, 1, 2
)

// getPod reads a pod from the API server, and no more of it than counts: its author may have made it of more than a megabyte.
func getPod(ctx context.Context, client kubernetes.Interface, s *decision.Scheduler, namespace, name string) (*decision.Pod, error) {
	c, ok := client.CoreV1().RESTClient().(*rest.RESTClient)
	if !ok || c == nil {
		return nil, errors.New("nri: a client without an API server")
	}
	r, err := c.Get().Namespace(namespace).Resource("pods").Name(name).SetHeader("Accept", runtime.ContentTypeProtobuf).Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("nri: pod %s/%s: %w", namespace, name, err)
	}
	defer r.Close()
	p := &decision.Pod{Annotations: map[string]string{}}
	err = wire.Body(wire.NewReader(r)).Object("Pod", func(body *wire.Message) error {
		if err := readPod(body, s, p); err != nil {
			return err
		}
		return wire.ErrDone
	})
	if !errors.Is(err, wire.ErrDone) {
		return nil, fmt.Errorf("nri: pod %s/%s: %w", namespace, name, err)
	}
	return p, nil
}

// readPod reads a v1.Pod. Fields come in the order of their numbers, of maps and lists all entries.
func readPod(m *wire.Message, s *decision.Scheduler, p *decision.Pod) error {
	var containers, init []decision.Container
	err := m.Fields(func(field int, v *wire.Message) error {
		switch field {
		case podMeta:
			return readMeta(v, s, p)
		case podSpec:
			return v.Fields(func(field int, v *wire.Message) (err error) {
				switch field {
				case specNode:
					p.Node, err = v.Text(maxName)
				case specContainers:
					containers, err = readContainer(v, s, containers)
				case specInitContainers:
					init, err = readContainer(v, s, init)
				case specEphemeral:
					err = readEphemeral(v, p)
				}
				return err
			})
		}
		return nil
	})
	p.Containers = slices.Concat(init, containers)
	if err == nil && len(p.Containers) > decision.MaxContainers {
		err = fmt.Errorf("has more than %d containers", decision.MaxContainers)
	}
	for i := range min(len(init), len(p.Containers)) {
		p.Containers[i].Init = true
	}
	return err
}

func readMeta(m *wire.Message, s *decision.Scheduler, p *decision.Pod) error {
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case metaName:
			p.Name, err = v.Text(maxName)
		case metaNamespace:
			p.Namespace, err = v.Text(maxName)
		case metaUID:
			p.UID, err = v.Text(maxName)
		case metaDeleted:
			p.Ending = true
		case metaCreated:
			err = v.Fields(func(field int, v *wire.Message) error {
				if field == timeSeconds {
					p.Created = time.Unix(int64(v.Value), 0)
				}
				return nil
			})
		case metaAnnotations:
			err = readAnnotation(v, s, p.Annotations)
		}
		return err
	})
}

// readAnnotation keeps those that the decision is read from.
func readAnnotation(m *wire.Message, s *decision.Scheduler, to map[string]string) error {
	key := ""
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch {
		case field == mapKey: // which comes first
			key, err = v.Text(maxKey)
		case field == mapValue && s.Reads(key):
			// One byte more tells a value that is too long from one that is not.
			to[key], err = v.Text(decision.MaxValue + 1)
		}
		return err
	})
}

// readContainer appends a container: its name, and the limits that the scheduler goes by.
func readContainer(m *wire.Message, s *decision.Scheduler, list []decision.Container) ([]decision.Container, error) {
	if len(list) > decision.MaxContainers {
		return list, nil // one too many is known, and refused
	}
	c := decision.Container{Limits: map[string]string{}}
	err := m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case containerName:
			c.Name, err = v.Text(maxContainer)
		case containerResources:
			err = v.Fields(func(field int, v *wire.Message) error {
				if field != itsLimits {
					return nil
				}
				return readLimit(v, s, c.Limits)
			})
		}
		return err
	})
	return append(list, c), err
}

func readLimit(m *wire.Message, s *decision.Scheduler, to map[string]string) error {
	name := ""
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch {
		case field == mapKey: // which comes first
			name, err = v.OneOf(s.Limits)
		case field == mapValue && name != "":
			to[name] = "" // which is no number
			err = v.Fields(func(field int, v *wire.Message) (err error) {
				if field == quantityText {
					to[name], err = v.Text(decision.MaxLimit)
				}
				return err
			})
		}
		return err
	})
}

// readEphemeral keeps the name of an ephemeral container. Of more than count nothing is known, and they are not created in a decided pod.
func readEphemeral(m *wire.Message, p *decision.Pod) error {
	if len(p.Ephemeral) >= decision.MaxContainers {
		return nil
	}
	return m.Fields(func(field int, v *wire.Message) error {
		if field != ephemeralCommon {
			return nil
		}
		return v.Fields(func(field int, v *wire.Message) error {
			if field != containerName {
				return nil
			}
			name, err := v.Text(maxContainer)
			p.Ephemeral = append(p.Ephemeral, name)
			return err
		})
	})
}
