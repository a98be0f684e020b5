// SPDX-License-Identifier: Apache-2.0

// Package wire reads what the API server sends as protocol buffers, field by field, and keeps of it what is asked for.
//
// Who may make an object may make it of more than a megabyte, in as many pieces as fit. Kubernetes' own types hold an object whole
// before anything can be taken off it: such a pod is ten to thirty megabytes as objects of Go, and there can be any number of them.
// A reader that walks over the message needs its buffer and what it keeps.
package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// ErrFormat is an answer that is no protocol buffer as Kubernetes sends it.
var ErrFormat = errors.New("the API server's answer is not what was asked for")

// buffer is that of a reader, and more than any text that is compared or kept whole.
const buffer = 32 << 10

// NewReader is one for messages.
func NewReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, buffer) }

// Message is one that is being read; left is what is still there of it.
type Message struct {
	r    *bufio.Reader
	left uint64
	// Value is that of a number, which has nothing else.
	Value    uint64
	isNumber bool
}

// Body is the whole of an answer, whose end is the answer's.
func Body(r *bufio.Reader) *Message { return &Message{r: r, left: 1 << 62} }

// Of is a message that has size bytes.
func Of(r *bufio.Reader, size int) *Message { return &Message{r: r, left: uint64(size)} }

// Frame is the next of a stream of messages, each of which its length goes before. io.EOF: there is none.
func Frame(r *bufio.Reader) (*Message, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	return &Message{r: r, left: uint64(binary.BigEndian.Uint32(size[:]))}, nil
}

// Kinds of fields.
const (
	number  = 0
	fixed64 = 1
	length  = 2
	fixed32 = 5
)

func (m *Message) varint() (n uint64, err error) {
	for shift := 0; shift < 64; shift += 7 {
		if m.left == 0 {
			return 0, ErrFormat
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
	return 0, ErrFormat
}

// noEOF: an answer that ends in the middle of something was cut off.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Fields hands over numbers, and what has a length, in their order. What f leaves of one is skipped.
func (m *Message) Fields(f func(field int, v *Message) error) error {
	var v Message // one for all: a pod has many
	for m.left > 0 {
		key, err := m.varint()
		if err != nil {
			return err
		}
		size, value := uint64(0), uint64(0)
		switch key & 7 {
		case number:
			if value, err = m.varint(); err != nil {
				return err
			}
		case fixed64:
			size = 8
		case fixed32:
			size = 4
		case length:
			if size, err = m.varint(); err != nil {
				return err
			}
		default:
			return ErrFormat
		}
		if size > m.left {
			return ErrFormat
		}
		m.left -= size
		v = Message{r: m.r, left: size, Value: value, isNumber: key&7 == number}
		if v.isNumber || key&7 == length {
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
func (m *Message) skip() error {
	for m.left > 0 {
		n, err := m.r.Discard(int(min(m.left, 1<<20)))
		m.left -= uint64(n)
		if err != nil {
			return noEOF(err)
		}
	}
	return nil
}

// Text is the beginning of what is left, most bytes at most.
func (m *Message) Text(most int) (string, error) {
	b, err := m.read(most)
	return string(b), err
}

// Append appends the beginning of what is left to b, most bytes at most.
func (m *Message) Append(b []byte, most int) ([]byte, error) {
	had, size := len(b), int(min(m.left, uint64(most)))
	b = slices.Grow(b, size)[:had+size]
	n, err := io.ReadFull(m.r, b[had:])
	m.left -= uint64(n)
	if err != nil {
		return nil, noEOF(err)
	}
	return b, nil
}

func (m *Message) read(most int) ([]byte, error) { return m.Append(nil, most) }

// OneOf is what is left, if it is one of a list; "" otherwise.
func (m *Message) OneOf(list []string) (string, error) {
	if m.left >= 1<<10 { // less than the buffer, and longer than any of a list
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

// Answers begin so, before a runtime.Unknown: what it is, and then itself.
const prefix = "k8s\x00"

// ErrDone ends Object in the middle: what was looked for was read.
var ErrDone = errors.New("done")

// Object reads an answer up to its body, which it hands over if it is of the kind.
func (m *Message) Object(kind string, f func(body *Message) error) error {
	text, err := m.Text(len(prefix))
	if err != nil {
		return err
	}
	if text != prefix {
		return ErrFormat
	}
	is := ""
	return m.Fields(func(field int, v *Message) error {
		switch field {
		case 1: // typeMeta, which comes first
			return v.Fields(func(field int, v *Message) (err error) {
				if field == 2 {
					is, err = v.Text(64)
				}
				return err
			})
		case 2: // raw
			if is != kind {
				return fmt.Errorf("%w: %.64q", ErrFormat, is)
			}
			return f(v)
		}
		return nil
	})
}

// Keep says which fields of a message are kept: by their numbers, and what of each of them; nil is all of it.
type Keep map[int]Keep

// ErrLarge: what is to be kept of an object is more than may be.
var ErrLarge = errors.New("has more than is read of one")

// Cut is the message without what is not kept, most bytes at most.
func (m *Message) Cut(keep Keep, most int) ([]byte, error) {
	var out []byte
	err := m.Fields(func(field int, v *Message) (err error) {
		of, ok := keep[field]
		if !ok {
			return nil
		}
		var inner []byte
		switch {
		case v.isNumber:
			out = binary.AppendUvarint(binary.AppendUvarint(out, uint64(field)<<3|number), v.Value)
		case of != nil:
			inner, err = v.Cut(of, most-len(out))
		case v.left > uint64(most):
			err = ErrLarge
		default:
			inner, err = v.read(most)
		}
		if !v.isNumber {
			out = binary.AppendUvarint(binary.AppendUvarint(out, uint64(field)<<3|length), uint64(len(inner)))
			out = append(out, inner...)
		}
		if err == nil && len(out) > most {
			err = ErrLarge
		}
		return err
	})
	return slices.Clip(out), err
}
