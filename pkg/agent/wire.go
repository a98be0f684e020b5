// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bufio"
	"errors"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/wire"
)

// Pods are read from the API server's answers here, and not by Kubernetes' own types, which would hold a pod whole (package wire).
//
// client-go's informers of metadata do not spare it: PartialObjectMetadata has neither the status, where the IDs of containers are that
// no tenant writes, nor the containers' names. And it is decoded whole too, while labels, owners and finalizers alone can be a megabyte.

// Bounds of what is kept of a pod. Nobody needs as much.
const (
	maxName       = 253 // as Kubernetes bounds names
	maxContainer  = 63  // of a container's name
	maxID         = 128 // of a container's ID with the runtime's name
	maxContainers = 64  // of a pod; what is beyond has no Events, and annotations do not change it
	maxSeen       = 128 // containers are looked at
	maxAnnotation = 256 // bytes of a value
	maxNumber     = 32  // bytes of an amount
)

// Numbers of the fields that are read, of k8s.io/api/core/v1/generated.proto and k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto.
// TestReadPod compares with the types.
const (
	podMeta, podSpec, podStatus = 1, 2, 3

	metaName, metaNamespace, metaUID, metaVersion          = 1, 3, 5, 6
	metaCreated, metaDeleted, metaLabels, metaAnnotations  = 8, 9, 11, 12
	specContainers, specInitContainers                     = 2, 20
	containerName, containerResources, resourcesLimits     = 1, 8, 1
	statusPhase, statusConditions, statusStarted           = 1, 2, 7
	statusContainers, statusInitContainers                 = 8, 10
	conditionType, conditionStatus, conditionSince         = 1, 2, 4
	containerStatusName, containerStatusID                 = 1, 8
	timeSeconds, timeNanos                                 = 1, 2
	mapKey, mapValue                                       = 1, 2
	quantityText                                           = 1
	listMeta, listItems, listMetaVersion, listMetaContinue = 1, 2, 2, 3
	watchType, watchObject, extensionRaw                   = 1, 2, 1
)

// readPod reads a v1.Pod.
func readPod(names deviceplugin.Names, m *wire.Message) (*pod, error) {
	p := &pod{}
	err := m.Fields(func(field int, v *wire.Message) error {
		switch field {
		case podMeta:
			return readMeta(v, p)
		case podSpec:
			return v.Fields(func(field int, v *wire.Message) error {
				if field != specContainers && field != specInitContainers {
					return nil
				}
				if p.seen++; p.seen > maxSeen {
					p.more = true
					return nil
				}
				return readContainer(names, v, p, field == specInitContainers)
			})
		case podStatus:
			return readStatus(v, p)
		}
		return nil
	})
	return p, err
}

// readMeta reads an ObjectMeta.
func readMeta(m *wire.Message, p *pod) error {
	return m.Fields(func(field int, v *wire.Message) (err error) {
		var to *string
		switch field {
		case metaName:
			to = &p.Name
		case metaNamespace:
			to = &p.Namespace
		case metaUID:
			to = (*string)(&p.UID)
		case metaVersion:
			to = &p.ResourceVersion
		case metaCreated:
			p.CreationTimestamp.Time, err = readTime(v)
			return err
		case metaDeleted:
			p.ending = true
			return nil
		case metaLabels:
			return readEntry(v, keptLabels, maxNumber, &p.Labels)
		case metaAnnotations:
			return readEntry(v, keptAnnotations, maxAnnotation, &p.Annotations)
		default:
			return nil
		}
		*to, err = v.Text(maxName)
		return err
	})
}

// keptLabels and keptAnnotations are those that somebody goes by; the last one is the watch's own mark.
var (
	keptLabels      = []string{deviceplugin.ResourceCount}
	keptAnnotations = slices.Concat(annotations, deviceplugin.Annotations(), []string{metav1.InitialEventsAnnotationKey})
)

// readEntry reads an entry of a map, if it is one of those that are kept. A pod may have some ten thousand others.
func readEntry(m *wire.Message, kept []string, most int, to *map[string]string) error {
	key := ""
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case mapKey: // which comes first
			key, err = v.OneOf(kept)
		case mapValue:
			if key == "" {
				return nil
			}
			if *to == nil {
				*to = map[string]string{}
			}
			// One byte more tells a value that is too long from one that is not.
			(*to)[key], err = v.Text(most + 1)
		}
		return err
	})
}

func readTime(m *wire.Message) (time.Time, error) {
	var seconds, nanos int64
	err := m.Fields(func(field int, v *wire.Message) error {
		switch field {
		case timeSeconds:
			seconds = int64(v.Value)
		case timeNanos:
			nanos = int64(v.Value)
		}
		return nil
	})
	if seconds == 0 && nanos == 0 {
		return time.Time{}, err
	}
	return time.Unix(seconds, nanos), err
}

// readContainer reads a container: its name, and how many units of a device plugin's it asks for.
func readContainer(names deviceplugin.Names, m *wire.Message, p *pod, first bool) error {
	c := deviceplugin.Container{Init: first}
	err := m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case containerName:
			c.Name, err = v.Text(maxContainer)
		case containerResources:
			err = v.Fields(func(field int, v *wire.Message) error {
				if field != resourcesLimits {
					return nil
				}
				return readLimit(names, v, p, &c)
			})
		}
		return err
	})
	p.see(c)
	return err
}

// readLimit reads an entry of a container's limits. The API server keeps an amount as its author wrote it: 0…04 with a thousand
// zeros, which is four to the kubelet. Such a pod is one of which there is more than is kept, and not one that asks for nothing.
func readLimit(names deviceplugin.Names, m *wire.Message, p *pod, c *deviceplugin.Container) error {
	name := ""
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case mapKey:
			name, err = v.OneOf(names.List())
			name = names.Inside(name)
		case mapValue:
			if name == "" {
				return nil
			}
			return v.Fields(func(field int, v *wire.Message) error {
				if field != quantityText {
					return nil
				}
				text, err := v.Text(maxNumber + 1)
				if len(text) > maxNumber {
					p.more = true
					return nil
				}
				c.Set(name, units(text))
				return err
			})
		}
		return err
	})
}

// units are how many a quantity is; 0 for what is no number of units.
func units(text string) int {
	if n, err := strconv.Atoi(text); err == nil {
		return n
	}
	q, err := resource.ParseQuantity(text)
	if err != nil || q.Value() > math.MaxInt32 {
		return 0
	}
	return int(q.Value())
}

// readStatus reads a PodStatus.
func readStatus(m *wire.Message, p *pod) error {
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case statusPhase:
			p.phase, err = v.Text(maxNumber)
		case statusStarted:
			p.started = true
		case statusConditions:
			return readCondition(v, p)
		case statusContainers, statusInitContainers:
			if len(p.running) >= maxContainers {
				return nil
			}
			c, err := readContainerStatus(v)
			if c.id != "" {
				p.running = append(p.running, c)
			}
			return err
		}
		return err
	})
}

// readCondition reads when a pod was scheduled.
func readCondition(m *wire.Message, p *pod) error {
	kind, status := "", ""
	var since time.Time
	err := m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case conditionType:
			kind, err = v.Text(maxNumber)
		case conditionStatus:
			status, err = v.Text(maxNumber)
		case conditionSince:
			since, err = readTime(v)
		}
		return err
	})
	if kind == "PodScheduled" && status == "True" {
		p.scheduled = since
	}
	return err
}

// readContainerStatus reads a ContainerStatus.
func readContainerStatus(m *wire.Message) (c running, err error) {
	err = m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case containerStatusName:
			c.name, err = v.Text(maxContainer)
		case containerStatusID:
			var id string
			id, err = v.Text(maxID)
			_, c.id, _ = strings.Cut(id, "://") // the kubelet writes "containerd://…"
		}
		return err
	})
	return c, err
}

// readList reads a PodList. Of more than most pods it keeps the first. f is called with each before the next is read.
func readList(names deviceplugin.Names, r io.Reader, most int, f func(*pod)) (*podList, error) {
	list := &podList{}
	err := wire.Body(wire.NewReader(r)).Object("PodList", func(body *wire.Message) error {
		err := body.Fields(func(field int, v *wire.Message) error {
			switch {
			case field == listMeta:
				return readListMeta(v, list)
			case field != listItems || len(list.Items) >= most:
				return nil
			}
			p, err := readPod(names, v)
			f(p)
			list.Items = append(list.Items, p)
			return err
		})
		if err == nil {
			err = wire.ErrDone
		}
		return err
	})
	if !errors.Is(err, wire.ErrDone) {
		return nil, err
	}
	return list, nil
}

func readListMeta(m *wire.Message, list *podList) error {
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case listMetaVersion:
			list.ResourceVersion, err = v.Text(maxName)
		case listMetaContinue:
			list.Continue, err = v.Text(64 << 10)
		}
		return err
	})
}

// frame is an event of a watch: the pod of it, or the bytes of an error's Status.
type frame struct {
	kind   string
	pod    *pod
	status []byte
}

// readFrame reads the next event of a watch: a WatchEvent. That has no prefix, unlike lists and the object in it
// (apimachinery, serializer/codec_factory.go: streams have the raw serializer).
func readFrame(names deviceplugin.Names, r *bufio.Reader) (f frame, err error) {
	m, err := wire.Frame(r)
	if err != nil {
		return f, err // io.EOF is the end of the watch
	}
	err = m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case watchType: // which comes first
			f.kind, err = v.Text(32)
			return err
		case watchObject: // a RawExtension
			return v.Fields(func(field int, v *wire.Message) error {
				if field != extensionRaw {
					return nil
				}
				return f.decode(names, v)
			})
		}
		return nil
	})
	if err == nil && f.pod == nil && f.status == nil {
		err = wire.ErrFormat
	}
	return f, err
}

// decode reads what a watch's event is about.
func (f *frame) decode(names deviceplugin.Names, m *wire.Message) error {
	if f.kind == "ERROR" {
		text, err := m.Text(64 << 10)
		f.status = []byte(text)
		return err
	}
	return m.Object("Pod", func(body *wire.Message) (err error) {
		f.pod, err = readPod(names, body)
		return err
	})
}

// running is a container that the kubelet has told of.
type running struct{ name, id string }
