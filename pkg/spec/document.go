package spec

import (
	"encoding/json"
	"errors"
	"fmt"
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
		return nil, fmt.Errorf("spec: config.json has %d bytes, want at most %d", len(raw), MaxSize)
	case !json.Valid(raw): // also bounds the nesting
		return nil, errors.New("spec: config.json is not valid JSON")
	}
	root, err := parseObject(raw, true)
	if err != nil {
		return nil, fmt.Errorf("spec: config.json: %w", err)
	}
	return &Document{root}, nil
}

// Encode gives the document as JSON; the input of Decode, byte for byte, when nothing was edited.
func (d *Document) Encode() []byte { return d.root.append(nil) }

// within finds the object at path, for reading: nil when it is absent.
func (d *Document) within(path ...string) (*object, error) {
	o := d.root
	for _, key := range path {
		var err error
		if o, err = o.sub(key, true); o == nil || err != nil {
			return nil, err
		}
	}
	return o, nil
}

// must finds the object at path, for editing; path is added where it is absent.
func (d *Document) must(path ...string) (*object, error) {
	o := d.root
	for _, key := range path {
		var err error
		if o, err = o.need(key, true); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// list reads the array called key in the object at path.
func (d *Document) list(key string, path ...string) ([][]byte, error) {
	o, err := d.within(path...)
	if o == nil || err != nil {
		return nil, err
	}
	list, err := elements(o.get(key))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
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

// Member returns the value at path in raw, a JSON object, without decoding anything else; false when it is absent.
// cgpu-runtime reads one setting of node.json with it on every call, where the first use of encoding/json on a
// structure would cost more than the rest of the program.
func Member(raw []byte, path ...string) (json.RawMessage, bool) {
	if !json.Valid(raw) {
		return nil, false
	}
	for _, key := range path {
		o, err := parseObject(raw, false)
		if err != nil {
			return nil, false
		}
		if raw = o.get(key); raw == nil {
			return nil, false
		}
	}
	return raw, true
}
