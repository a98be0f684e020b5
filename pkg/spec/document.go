// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/opencgpu/cgpu/pkg/jsonspan"
)

// MaxSize bounds a config.json. The largest recorded one has 35 KB; the variables of a container can be long.
const MaxSize = 16 << 20

// Document is a config.json that can be edited member by member.
//
// Only the members that an edit touches are decoded: a runtime that decodes everything into a structure and encodes it
// again silently drops what an engine newer than itself wrote.
type Document struct {
	root *object
}

// Decode reads a config.json. The result refers to raw, which must not be changed afterwards.
func Decode(raw []byte) (*Document, error) {
	switch {
	case len(raw) > MaxSize:
		return nil,
			fmt.Errorf("spec: config.json has %d bytes, want at most %d: shorten the container's variables, arguments, annotations or paths of "+
				"mounts", len(raw), MaxSize)
	case !json.Valid(raw): // also bounds the nesting
		return nil, fmt.Errorf("spec: config.json is not valid JSON: %w", invalid(raw))
	}
	root, err := parseObject(raw, true)
	if err != nil {
		return nil, fmt.Errorf("spec: config.json: %w", err)
	}
	return &Document{root}, nil
}

// invalid says where raw stops being JSON.
func invalid(raw []byte) error {
	err := json.Unmarshal(raw, new(json.RawMessage))
	syntax, ok := errors.AsType[*json.SyntaxError](err)
	if !ok {
		return err
	}
	before := raw[:syntax.Offset]
	return fmt.Errorf("line %d, column %d: %w", bytes.Count(before, []byte("\n"))+1, len(before)-1-bytes.LastIndexByte(before, '\n'), err)
}

// Encode gives the document as JSON; the input of Decode, byte for byte, when nothing was edited.
func (d *Document) Encode() []byte { return d.root.append(nil) }

// within finds the object at path, for reading: nil when it is absent.
func (d *Document) within(path ...string) (*object, error) {
	o := d.root
	for i, key := range path {
		var err error
		if o, err = o.sub(key, true); o == nil || err != nil {
			return nil, inside(path[:i], err)
		}
	}
	return o, nil
}

// must finds the object at path, for editing; path is added where it is absent.
func (d *Document) must(path ...string) (*object, error) {
	o := d.root
	for i, key := range path {
		var err error
		if o, err = o.need(key, true); err != nil {
			return nil, inside(path[:i], err)
		}
	}
	return o, nil
}

// inside puts the path before an error that begins with a member's name.
func inside(path []string, err error) error {
	for i := len(path) - 1; i >= 0 && err != nil; i-- {
		err = fmt.Errorf("%s.%w", path[i], err)
	}
	return err
}

// list reads the array called key in the object at path.
func (d *Document) list(key string, path ...string) ([][]byte, error) {
	o, err := d.within(path...)
	if o == nil || err != nil {
		return nil, err
	}
	list, err := elements(o.get(key))
	if err != nil {
		return nil, inside(path, fmt.Errorf("%s: %w", key, err))
	}
	return list, nil
}

// setList writes the array called key in the object at path.
func (d *Document) setList(list [][]byte, key string, path ...string) error {
	o, err := d.must(path...)
	if err != nil {
		return err
	}
	o.set(key, array(list))
	return nil
}

// Strings returns the array of strings at path in raw, a JSON object; nil when there is no such thing. cgpu-runtime reads
// one setting of node.json with it on every call. It looks at nothing else in raw, not even whether it is JSON, and stays
// clear of encoding/json: the first use of that would cost more than the rest of the program, and node.json can be 60 KiB.
func Strings(raw []byte, path ...string) []string {
	for _, key := range path {
		if raw = lookup(raw, key); raw == nil {
			return nil
		}
	}
	if len(raw) < 2 || raw[0] != '[' || raw[len(raw)-1] != ']' {
		return nil
	}
	var list []string
	for i := jsonspan.SkipSpace(raw, 1); i < len(raw)-1; {
		end := jsonspan.SkipValue(raw, i)
		s, err := unquote(raw[i:end])
		if err != nil {
			return nil
		}
		list = append(list, s)
		if i = jsonspan.SkipSpace(raw, end); i < len(raw)-1 && raw[i] == ',' {
			i = jsonspan.SkipSpace(raw, i+1)
		}
	}
	return list
}

// String returns the string at path in raw, as Strings does an array; empty when there is no such thing.
func String(raw []byte, path ...string) string {
	for _, key := range path {
		if raw = lookup(raw, key); raw == nil {
			return ""
		}
	}
	if len(raw) < 2 || raw[0] != '"' {
		return ""
	}
	s, err := unquote(raw)
	if err != nil {
		return ""
	}
	return s
}

// lookup returns the value of a key in raw, which need not be valid JSON. It finds keys that are written without escapes.
func lookup(raw []byte, key string) []byte {
	i := jsonspan.SkipSpace(raw, 0)
	if i >= len(raw) || raw[i] != '{' {
		return nil
	}
	for i = jsonspan.SkipSpace(raw, i+1); i < len(raw) && raw[i] == '"'; {
		end := jsonspan.SkipValue(raw, i)
		colon := jsonspan.SkipSpace(raw, end)
		if colon >= len(raw) || raw[colon] != ':' {
			return nil
		}
		value := jsonspan.SkipSpace(raw, colon+1)
		next := jsonspan.SkipValue(raw, value)
		if next == value {
			return nil
		}
		if string(raw[i+1:end-1]) == key {
			return raw[value:next]
		}
		if i = jsonspan.SkipSpace(raw, next); i < len(raw) && raw[i] == ',' {
			i = jsonspan.SkipSpace(raw, i+1)
		}
	}
	return nil
}
