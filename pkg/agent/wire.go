package agent

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Pods are read from the API server's answers here, and not by Kubernetes' own types: those hold a pod whole before anything can
// be taken off it, and a pod may have a megabyte, which is ten as objects of Go. A reader that walks over the
// protocol buffers keeps the few fields that count, and never has more than one of them in memory.
//
// client-go's informers of metadata do not spare it: PartialObjectMetadata has neither the status, where the IDs of containers are that
// no tenant writes, nor the containers' names. And it is decoded whole too, while labels, owners and finalizers alone can be a megabyte.

// Bounds of what is kept of a pod. Nobody needs as much.
const (
	maxName       = 253 // as Kubernetes bounds names
	maxContainer  = 63  // of a container's name
	maxID         = 128 // of a container's ID with the runtime's name
	maxContainers = 64  // of a pod; what is beyond has no Events, and annotations do not change it
	maxAnnotation = 256 // bytes of a value
)

// errWire is an answer that is no protocol buffer as Kubernetes sends it.
var errWire = errors.New("agent: the API server's answer is not what was asked for")

// wire is a message that is being read; left is what is still there of it.
type wire struct {
	r    *bufio.Reader
	left uint64
}

const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5
)

func (m *wire) varint() (n uint64, err error) {
	for shift := 0; shift < 64; shift += 7 {
		if m.left == 0 {
			return 0, errWire
		}
		b, err := m.r.ReadByte()
		if err != nil {
			return 0, noEOF(err)
		}
		m.left--
		n |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return n, nil
		}
	}
	return 0, errWire
}

// noEOF: an answer that ends in the middle of something was cut off.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// fields hands over those that are bytes, in their order. What f leaves of one is skipped.
func (m *wire) fields(f func(number int, v *wire) error) error {
	var v wire // one for all: a pod has many
	for m.left > 0 {
		key, err := m.varint()
		if err != nil {
			return err
		}
		size := uint64(0)
		switch key & 7 {
		case wireVarint:
			if _, err := m.varint(); err != nil {
				return err
			}
			continue
		case wireFixed64:
			size = 8
		case wireFixed32:
			size = 4
		case wireBytes:
			if size, err = m.varint(); err != nil {
				return err
			}
		default:
			return errWire
		}
		if size > m.left {
			return errWire
		}
		m.left -= size
		v = wire{m.r, size}
		if key&7 == wireBytes {
			if err := f(int(min(key>>3, 1<<29)), &v); err != nil {
				return err
			}
		}
		if err := v.skip(); err != nil {
			return err
		}
	}
	return nil
}

// skip passes over the rest.
func (m *wire) skip() error {
	for m.left > 0 {
		n, err := m.r.Discard(int(min(m.left, 1<<20)))
		m.left -= uint64(n)
		if err != nil {
			return noEOF(err)
		}
	}
	return nil
}

// text is the beginning of what is left, most bytes at most.
func (m *wire) text(most int) (string, error) {
	b := make([]byte, min(m.left, uint64(most)))
	n, err := io.ReadFull(m.r, b)
	m.left -= uint64(n)
	if err != nil {
		return "", noEOF(err)
	}
	return string(b), nil
}

// Answers begin so, before a runtime.Unknown: what it is, and then itself.
const wirePrefix = "k8s\x00"

// object reads such a one, up to its body, which it hands over with its kind.
func (m *wire) object(f func(kind string, body *wire) error) error {
	prefix, err := m.text(len(wirePrefix))
	if err != nil {
		return err
	}
	if prefix != wirePrefix {
		return errWire
	}
	kind := ""
	return m.fields(func(number int, v *wire) error {
		switch number {
		case 1: // typeMeta, which comes first
			return v.fields(func(number int, v *wire) (err error) {
				if number == 2 {
					kind, err = v.text(64)
				}
				return err
			})
		case 2: // raw
			return f(kind, v)
		}
		return nil
	})
}

// pod reads a v1.Pod.
func (m *wire) pod() (*pod, error) {
	p := &pod{}
	err := m.fields(func(number int, v *wire) error {
		switch number {
		case 1:
			return v.meta(p)
		case 2: // spec: containers, initContainers
			return v.fields(func(number int, v *wire) error {
				if number != 2 && number != 20 || len(p.names) >= maxContainers {
					return nil
				}
				return v.fields(func(number int, v *wire) error {
					if number != 1 {
						return nil
					}
					name, err := v.text(maxContainer)
					p.names = append(p.names, name)
					return err
				})
			})
		case 3: // status: containerStatuses, initContainerStatuses
			return v.fields(func(number int, v *wire) error {
				if number != 8 && number != 10 || len(p.running) >= maxContainers {
					return nil
				}
				c, err := v.status()
				if c.id != "" {
					p.running = append(p.running, c)
				}
				return err
			})
		}
		return nil
	})
	return p, err
}

// meta reads an ObjectMeta.
func (m *wire) meta(p *pod) error {
	return m.fields(func(number int, v *wire) error {
		var to *string
		switch number {
		case 1:
			to = &p.Name
		case 3:
			to = &p.Namespace
		case 5:
			to = (*string)(&p.UID)
		case 6:
			to = &p.ResourceVersion
		case 12:
			return v.annotation(p)
		default:
			return nil
		}
		text, err := v.text(maxName)
		*to = text
		return err
	})
}

// annotation keeps one that is ours, or the watch's own mark. A pod may have some ten thousand others.
func (m *wire) annotation(p *pod) error {
	key := ""
	return m.fields(func(number int, v *wire) (err error) {
		switch number {
		case 1: // the key comes first
			key, err = v.oneOf(kept)
		case 2:
			if key == "" {
				return nil
			}
			if p.Annotations == nil {
				p.Annotations = map[string]string{}
			}
			// One byte more tells a value that is too long from one that is not.
			p.Annotations[key], err = v.text(maxAnnotation + 1)
		}
		return err
	})
}

// kept are the annotations that are kept.
var kept = append([]string{metav1.InitialEventsAnnotationKey}, annotations...)

// oneOf is what is left, if it is one of a list; "" otherwise.
func (m *wire) oneOf(list []string) (string, error) {
	if m.left > maxName { // less than the reader's buffer
		return "", nil
	}
	text, err := m.r.Peek(int(m.left))
	if err != nil {
		return "", noEOF(err)
	}
	for _, one := range list {
		if string(text) == one {
			return one, nil
		}
	}
	return "", nil
}

// status reads a ContainerStatus.
func (m *wire) status() (c running, err error) {
	err = m.fields(func(number int, v *wire) (err error) {
		switch number {
		case 1:
			c.name, err = v.text(maxContainer)
		case 8:
			var id string
			id, err = v.text(maxID)
			_, c.id, _ = strings.Cut(id, "://") // the kubelet writes "containerd://…"
		}
		return err
	})
	return c, err
}

// readList reads a PodList. Of more than most pods it keeps the first.
func readList(r io.Reader, most int) (*podList, error) {
	list := &podList{}
	m := wire{bufio.NewReaderSize(r, 32<<10), 1 << 62} // its end is the answer's
	err := m.object(func(kind string, body *wire) error {
		if kind != "PodList" {
			return fmt.Errorf("%w: %.64q", errWire, kind)
		}
		err := body.fields(func(number int, v *wire) error {
			switch {
			case number == 1:
				return v.listMeta(list)
			case number != 2 || len(list.Items) >= most:
				return nil
			}
			p, err := v.pod()
			list.Items = append(list.Items, p)
			return err
		})
		if err == nil {
			err = errDone
		}
		return err
	})
	if err != errDone {
		return nil, err
	}
	return list, nil
}

// errDone: what was looked for was read.
var errDone = errors.New("done")

func (m *wire) listMeta(list *podList) error {
	return m.fields(func(number int, v *wire) (err error) {
		switch number {
		case 2:
			list.ResourceVersion, err = v.text(maxName)
		case 3:
			list.Continue, err = v.text(64 << 10)
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

// readFrame reads the next event of a watch: its length, and a WatchEvent. That has no wirePrefix, unlike lists and the object in it
// (apimachinery, serializer/codec_factory.go: streams have the raw serializer).
func readFrame(r *bufio.Reader) (f frame, err error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return f, err // io.EOF is the end of the watch
	}
	m := wire{r, uint64(binary.BigEndian.Uint32(size[:]))}
	err = m.fields(func(number int, v *wire) (err error) {
		switch number {
		case 1: // type, which comes first
			f.kind, err = v.text(32)
			return err
		case 2: // object: a RawExtension
			return v.fields(func(number int, v *wire) error {
				if number != 1 {
					return nil
				}
				return v.carried(&f)
			})
		}
		return nil
	})
	if err == nil && f.pod == nil && f.status == nil {
		err = errWire
	}
	return f, err
}

// carried reads what a watch's event is about.
func (m *wire) carried(f *frame) error {
	if f.kind == "ERROR" {
		text, err := m.text(64 << 10)
		f.status = []byte(text)
		return err
	}
	return m.object(func(kind string, body *wire) (err error) {
		if kind != "Pod" {
			return fmt.Errorf("%w: %.64q", errWire, kind)
		}
		f.pod, err = body.pod()
		return err
	})
}

// running is a container that the kubelet has told of.
type running struct{ name, id string }
