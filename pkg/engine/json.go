// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/opencgpu/cgpu/pkg/jsonspan"
)

// member is one of a JSON object, by offsets into the text.
type member struct {
	key        string
	start      int // of the key's quote
	value, end int // of the value
}

// object is a JSON object in a text.
type object struct {
	open, close int // of its braces
	members     []member
}

// bom is what some editors put before a text.
var bom = []byte("\uFEFF")

// parseObject finds the members of the JSON object that a text is. Errors name line and column.
func parseObject(text []byte) (object, error) {
	skipped := 0
	if bytes.HasPrefix(text, bom) {
		skipped = len(bom)
	}
	var v map[string]json.RawMessage
	err := json.Unmarshal(text[skipped:], &v)
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		line, column := position(text, skipped+max(int(syntax.Offset)-1, 0))
		hint := ""
		if strings.HasPrefix(syntax.Error(), "invalid character '/'") || strings.HasPrefix(syntax.Error(), "invalid character '#'") {
			hint = " (JSON has no comments)"
		}
		return object{}, fmt.Errorf("line %d, column %d: %w%s", line, column, err, hint)
	}
	if err != nil || v == nil {
		return object{}, errors.New("want a JSON object, {…}")
	}
	return objectAt(text, bytes.IndexByte(text, '{'))
}

// position is that of an offset, for people.
func position(text []byte, offset int) (line, column int) {
	before := text[:min(offset, len(text))]
	return bytes.Count(before, []byte("\n")) + 1, len(before) - bytes.LastIndexByte(before, '\n')
}

// objectAt reads the object whose brace is at an offset of valid JSON. A key that is there twice is refused: which one counts
// is not for us to decide.
func objectAt(text []byte, at int) (object, error) {
	o := object{open: at}
	seen := map[string]bool{}
	place, more := jsonspan.Next(text, at+1)
	for ; more; place, more = jsonspan.Next(text, place.End) {
		m := member{start: place.Key, value: place.Value, end: place.End}
		if err := json.Unmarshal(text[place.Key:place.KeyEnd], &m.key); err != nil {
			return o, err
		}
		if seen[m.key] {
			line, _ := position(text, m.start)
			return o, fmt.Errorf("line %d: %q is there a second time; take one out", line, m.key)
		}
		seen[m.key] = true
		o.members = append(o.members, m)
	}
	o.close = place.Key
	return o, nil
}

// find is the place of a member, -1 if there is none.
func (o object) find(key string) int {
	for i, m := range o.members {
		if m.key == key {
			return i
		}
	}
	return -1
}

// layout is how a text is indented.
type layout struct {
	nl   string
	unit string // of one level
}

func layoutOf(text []byte, top object) layout {
	l := layout{nl: lineEnd(text), unit: "    "}
	if len(top.members) > 0 {
		if indent, own := indentOf(text, top.members[0].start); own && indent != "" {
			l.unit = indent
		}
	}
	return l
}

// indentOf is the white space before an offset on its line. own: nothing else is before it.
func indentOf(text []byte, offset int) (indent string, own bool) {
	line := text[bytes.LastIndexByte(text[:offset], '\n')+1 : offset]
	trimmed := bytes.TrimLeft(line, " \t")
	return string(line[:len(line)-len(trimmed)]), len(trimmed) == 0
}

// value is a JSON value of ours: a string, or an object with one member.
type value struct {
	text string
	key  string
	sub  *value
}

// render writes a value; on several lines if indent begins with a line's end, as that of the line it stands on.
func (v value) render(l layout, indent string, lines bool) string {
	if v.sub == nil {
		return quoteJSON(v.text)
	}
	if !lines {
		return "{" + quoteJSON(v.key) + ": " + v.sub.render(l, "", false) + "}"
	}
	inner := indent + l.unit
	return "{" + l.nl + inner + quoteJSON(v.key) + ": " + v.sub.render(l, inner, true) + l.nl + indent + "}"
}

func quoteJSON(s string) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // a path with & stays readable
	if err := e.Encode(s); err != nil {
		return `""` // no string fails
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// insert adds a member behind the others.
func (o object) insert(text []byte, l layout, key string, v value) []byte {
	if len(o.members) == 0 {
		indent, _ := indentOf(text, o.open)
		inner := indent + l.unit
		return splice(text, o.open+1, o.close, l.nl+inner+quoteJSON(key)+": "+v.render(l, inner, true)+l.nl+indent)
	}
	last := o.members[len(o.members)-1]
	if indent, own := indentOf(text, last.start); own {
		return splice(text, last.end, last.end, ","+l.nl+indent+quoteJSON(key)+": "+v.render(l, indent, true))
	}
	return splice(text, last.end, last.end, ", "+quoteJSON(key)+": "+v.render(l, "", false))
}

// remove takes a member out, with its comma and its line.
func (o object) remove(text []byte, i int) []byte {
	switch {
	case len(o.members) == 1:
		return splice(text, o.open+1, o.close, "")
	case i == len(o.members)-1:
		return splice(text, o.members[i-1].end, o.members[i].end, "")
	}
	return splice(text, o.members[i].start, o.members[i+1].start, "")
}

// compact is JSON without white space; a text that is none, without that at its ends. Nothing is an empty object to dockerd.
func compact(text []byte) []byte {
	text = bytes.TrimSpace(bytes.TrimPrefix(text, bom))
	if len(text) == 0 {
		return []byte("{}")
	}
	var b bytes.Buffer
	if json.Compact(&b, text) != nil {
		return text
	}
	return b.Bytes()
}
