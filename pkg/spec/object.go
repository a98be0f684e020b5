// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/jsonspan"
)

// object is a JSON object taken apart into its members, with every byte between them kept, so that putting it together
// again gives the input where nothing was set. Decoding into a map or a struct would lose the order, the spelling of
// numbers, and whatever the struct does not know.
type object struct {
	open, tail []byte // up to and with '{'; after the last value
	members    []member
	// fold: names that differ in case only are the same to Go's decoder, which runc uses, as those of a structure's fields are.
	fold bool
}

// member is one member of an object.
type member struct {
	lead  []byte // comma, spaces, the key as written, colon, spaces
	key   string
	value []byte
	child *object // value taken apart, once an edit asked for it
}

// parseObject takes apart raw, which must be valid JSON (json.Valid) and an object. fold: see object.
//
// A key that occurs twice is refused: readers differ in which one they take.
func parseObject(raw []byte, fold bool) (*object, error) {
	o, err := takeApart(raw, fold)
	if err != nil {
		return nil, err
	}
	seen := make(map[string]bool, len(o.members))
	for _, m := range o.members {
		name := m.key
		if fold {
			name = strings.ToLower(strings.ToUpper(name)) // some letters have more than two cases
		}
		if seen[name] {
			return nil, fmt.Errorf("member %q occurs twice", m.key)
		}
		seen[name] = true
	}
	return o, nil
}

// takeApart is parseObject for an object in which keys may occur twice.
func takeApart(raw []byte, fold bool) (*object, error) {
	i := jsonspan.SkipSpace(raw, 0)
	if i >= len(raw) || raw[i] != '{' {
		return nil, fmt.Errorf("want an object, have %s", clip(raw))
	}
	o := &object{open: raw[:i+1], fold: fold}
	start := i + 1
	for m, more := jsonspan.Next(raw, start); more; m, more = jsonspan.Next(raw, start) {
		key, err := unquote(raw[m.Key:m.KeyEnd])
		if err != nil {
			return nil, fmt.Errorf("member name %s: %w", clip(raw[m.Key:m.KeyEnd]), err)
		}
		o.members = append(o.members, member{lead: raw[start:m.Value:m.Value], key: key, value: raw[m.Value:m.End:m.End]})
		start = m.End
	}
	o.tail = raw[start:]
	return o, nil
}

// is says whether m is the member called key.
func (o *object) is(m *member, key string) bool {
	return m.key == key || o.fold && strings.EqualFold(m.key, key)
}

// find returns the member called key, or nil. Where it was written in another case it gets its right name: crun would not know it by
// the other, and so not what we write into it.
func (o *object) find(key string) *member {
	for i := range o.members {
		m := &o.members[i]
		if !o.is(m, key) {
			continue
		}
		if m.key != key {
			start := bytes.IndexByte(m.lead, '"')
			end := jsonspan.SkipValue(m.lead, start)
			m.lead = slices.Concat(m.lead[:start], quote(key), m.lead[end:])
			m.key = key
		}
		return m
	}
	return nil
}

// get returns the value of key; nil when it is absent or null.
func (o *object) get(key string) []byte {
	m := o.find(key)
	if m == nil || string(m.value) == "null" {
		return nil
	}
	if m.child != nil {
		return m.child.append(nil)
	}
	return m.value
}

// set replaces the value of key or adds the member at the end.
func (o *object) set(key string, value []byte) {
	if m := o.find(key); m != nil {
		m.value, m.child = value, nil
		return
	}
	lead := append(quote(key), ':')
	if len(o.members) > 0 {
		lead = append([]byte{','}, lead...)
	}
	o.members = append(o.members, member{lead: lead, key: key, value: value})
}

// sub returns the object that is the value of key, for editing; nil when it is absent or null.
func (o *object) sub(key string, fold bool) (*object, error) {
	m := o.find(key)
	if m == nil {
		return nil, nil
	}
	if m.child == nil && string(m.value) != "null" {
		child, err := parseObject(m.value, fold)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		m.child = child
	}
	return m.child, nil
}

// need is sub that adds an empty object where there is none.
func (o *object) need(key string, fold bool) (*object, error) {
	child, err := o.sub(key, fold)
	if err != nil || child != nil {
		return child, err
	}
	o.set(key, []byte("{}"))
	return o.sub(key, fold)
}

// append puts o together again behind b.
func (o *object) append(b []byte) []byte {
	b = append(b, o.open...)
	for i := range o.members {
		m := &o.members[i]
		b = append(b, m.lead...)
		if m.child != nil {
			b = m.child.append(b)
		} else {
			b = append(b, m.value...)
		}
	}
	return append(b, o.tail...)
}

// elements splits a valid JSON array into its elements as written. An absent array has none.
func elements(raw []byte) ([][]byte, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	if raw[0] != '[' {
		return nil, fmt.Errorf("want an array, have %s", clip(raw))
	}
	var list [][]byte
	for i := jsonspan.SkipSpace(raw, 1); raw[i] != ']'; i = jsonspan.SkipSpace(raw, i) {
		if raw[i] == ',' {
			i = jsonspan.SkipSpace(raw, i+1)
		}
		end := jsonspan.SkipValue(raw, i)
		list = append(list, raw[i:end:end])
		i = end
	}
	return list, nil
}

// array joins elements.
func array(list [][]byte) []byte {
	size := 2
	for _, e := range list {
		size += len(e) + 1
	}
	b := append(make([]byte, 0, size), '[')
	for i, e := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, e...)
	}
	return append(b, ']')
}

// quote writes s as a JSON string.
func quote(s string) []byte {
	b, _ := json.Marshal(s) // a string always has a JSON form
	return b
}

// unquote reads a JSON string. Nearly all are plain ASCII, for which encoding/json would take longer by far.
func unquote(raw []byte) (string, error) {
	plain := len(raw) >= 2 && raw[0] == '"' && raw[len(raw)-1] == '"'
	for i := 1; plain && i < len(raw)-1; i++ {
		plain = raw[i] >= ' ' && raw[i] <= '~' && raw[i] != '"' && raw[i] != '\\'
	}
	if plain {
		return string(raw[1 : len(raw)-1]), nil
	}
	var s string
	err := json.Unmarshal(raw, &s)
	return s, err
}

// clip shortens raw for a message.
func clip(raw []byte) string {
	const most = 40
	if len(raw) > most {
		return fmt.Sprintf("%q…", raw[:most])
	}
	return fmt.Sprintf("%q", raw)
}
