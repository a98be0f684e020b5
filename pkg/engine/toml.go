// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// document is a TOML file: its text, what it says, and where it says it.
type document struct {
	path   string
	text   []byte
	tree   map[string]any
	tables []tomlTable
	values []tomlValue
}

// tomlTable is a header such as [a.b]; offsets are of its line, with the line's end.
type tomlTable struct {
	key      []string
	from, to int
}

// tomlValue is a key with its value. key is the whole one, with that of the table it stands in; offsets are of the value.
type tomlValue struct {
	key      []string
	from, to int
}

// badTOML is a text that is not TOML.
type badTOML struct{ what string }

func (e *badTOML) Error() string {
	return e.what + ": the engine does not start with it; repair it first"
}

func parseTOML(path string, text []byte) (d document, err error) {
	d = document{path: path, text: text, tree: map[string]any{}}
	if err := toml.Unmarshal(text, &d.tree); err != nil {
		if bad, ok := errors.AsType[*toml.DecodeError](err); ok {
			row, column := bad.Position()
			return d, &badTOML{fmt.Sprintf("%s: line %d, column %d: %s", path, row, column, strings.TrimPrefix(bad.Error(), "toml: "))}
		}
		return d, &badTOML{fmt.Sprintf("%s: %s", path, strings.TrimPrefix(err.Error(), "toml: "))}
	}
	var p unstable.Parser
	p.Reset(text)
	var table []string
	for p.NextExpression() {
		e := p.Expression()
		var key []string
		at := 0
		for it := e.Key(); it.Next(); {
			key = append(key, string(it.Node().Data))
			at = int(it.Node().Raw.Offset)
		}
		switch e.Kind {
		case unstable.Table, unstable.ArrayTable:
			table = key
			from := bytes.LastIndexByte(text[:at], '\n') + 1
			to := len(text)
			if i := bytes.IndexByte(text[at:], '\n'); i >= 0 {
				to = at + i + 1
			}
			d.tables = append(d.tables, tomlTable{key, from, to})
		case unstable.KeyValue:
			raw := e.Value().Raw
			d.values = append(d.values, tomlValue{slices.Concat(table, key), int(raw.Offset), int(raw.Offset + raw.Length)})
		}
	}
	return d, p.Error()
}

// get is what a tree has at a key; nil if nothing.
func get(tree map[string]any, key ...string) any {
	var v any = tree
	for _, k := range key {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[k]
	}
	return v
}

func getTable(tree map[string]any, key ...string) map[string]any {
	m, _ := get(tree, key...).(map[string]any)
	return m
}

func getString(tree map[string]any, key ...string) string {
	s, _ := get(tree, key...).(string)
	return s
}

// mergeTOML lays one tree over another, as engines do that merge their files: tables are joined, the rest is replaced.
func mergeTOML(under, over map[string]any) map[string]any {
	all := maps.Clone(under)
	if all == nil {
		all = map[string]any{}
	}
	for k, v := range over {
		if sub, ok := v.(map[string]any); ok {
			below, _ := all[k].(map[string]any)
			v = mergeTOML(below, sub)
		}
		all[k] = v
	}
	return all
}

// differences are the keys in which two configurations differ. What is empty, zero or false counts as not there: containerd
// writes the defaults of a table only where somebody has named the table.
func differences(a, b map[string]any) [][]string {
	var list [][]string
	var walk func(key []string, a, b any)
	walk = func(key []string, a, b any) {
		am, isA := a.(map[string]any)
		bm, isB := b.(map[string]any)
		if (isA || a == nil) && (isB || b == nil) {
			keys := slices.Concat(slices.Collect(maps.Keys(am)), slices.Collect(maps.Keys(bm)))
			slices.Sort(keys)
			for _, k := range slices.Compact(keys) {
				walk(append(slices.Clip(key), k), am[k], bm[k])
			}
			return
		}
		if !(isNothing(a) && isNothing(b)) && !reflect.DeepEqual(a, b) {
			list = append(list, key)
		}
	}
	walk(nil, a, b)
	return list
}

func isNothing(v any) bool {
	if v == nil {
		return true
	}
	r := reflect.ValueOf(v)
	return r.IsZero() || (r.Kind() == reflect.Slice || r.Kind() == reflect.Map) && r.Len() == 0
}

// quoteTOML is a string of TOML.
func quoteTOML(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// keyTOML is a dotted key.
func keyTOML(parts ...string) string {
	bare := regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	list := make([]string, len(parts))
	for i, p := range parts {
		if list[i] = p; !bare.MatchString(p) {
			list[i] = quoteTOML(p)
		}
	}
	return strings.Join(list, ".")
}

// valueTOML writes a value that was read; ok is false for tables and times, which the tables that we copy do not have.
func valueTOML(v any) (text string, ok bool) {
	switch v := v.(type) {
	case string:
		return quoteTOML(v), !strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r == 0x7f })
	case bool:
		return strconv.FormatBool(v), true
	case int64:
		return strconv.FormatInt(v, 10), true
	case []any:
		var list []string
		for _, e := range v {
			text, ok := valueTOML(e)
			if !ok {
				return "", false
			}
			list = append(list, text)
		}
		return "[" + strings.Join(list, ", ") + "]", true
	}
	return "", false
}

// What install writes into files of others it can find again.
const (
	mark    = "# cgpu install: "
	created = mark + "this file was not there; cgpu uninstall removes it when nothing else is in it"
)

func beginMark(name string) string {
	return fmt.Sprintf("%sruntime %q begins; cgpu uninstall takes it out", mark, name)
}
func endMark(name string) string { return fmt.Sprintf("%sruntime %q ends", mark, name) }

// block is the part of a text that install wrote for a runtime, with its lines' ends and the empty line before it.
func block(text []byte, name string) (from, to int, found bool) {
	begin := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(beginMark(name)) + `\r?$`).FindIndex(text)
	end := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(endMark(name)) + `\r?(\n|$)`).FindIndex(text)
	if begin == nil || end == nil || end[0] < begin[0] {
		return 0, 0, false
	}
	from = begin[0]
	for _, empty := range []string{"\r\n\r\n", "\n\n"} {
		if bytes.HasSuffix(text[:from], []byte(empty)) {
			from -= len(empty) / 2
			break
		}
	}
	return from, end[1], true
}

// blocks are our parts of a text, for all runtimes.
func blocks(text []byte) (list []map[string]any) {
	for _, m := range regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(mark)+`runtime "([^"]+)"`).FindAllSubmatch(text, -1) {
		if from, to, found := block(text, string(m[1])); found {
			d, _ := parseTOML("", text[from:to]) //nolint:errcheck // one that is edited so that it is no TOML, k3s cannot read either
			list = append(list, d.tree)
		}
	}
	return list
}

// appendBlock adds a part for a runtime behind a text, or puts it in the place of the one that is there.
func appendBlock(text []byte, name, body string) []byte {
	nl := lineEnd(text)
	part := withLineEnds(beginMark(name)+"\n"+body+endMark(name)+"\n", nl)
	if from, to, found := block(text, name); found {
		if from > 0 {
			part = nl + part
		}
		return splice(text, from, to, part)
	}
	if len(text) > 0 {
		if !bytes.HasSuffix(text, []byte("\n")) {
			part = nl + nl + part
		} else {
			part = nl + part
		}
	}
	return append(slices.Clip(text), part...)
}

// wasForm is what stands behind a value that install has replaced, or added ("unset").
const wasForm = ` # cgpu install: was ("(?:[^"\\]|\\.)*"|'[^']*'|true|false|unset)\.`

// setString is set with a string.
func (d document) setString(to string, key ...string) (text []byte, ok bool) {
	return d.set(quoteTOML(to), key...)
}

// set makes a value of a table another one, a literal, and notes beside it what it was. It reports whether the table, or the
// value, stands in the text; if not, the caller's block has to say it.
func (d document) set(literal string, key ...string) (text []byte, ok bool) {
	for _, v := range d.values {
		if !slices.Equal(v.key, key) || v.to <= v.from {
			continue
		}
		line := d.text[v.to:]
		if i := bytes.IndexByte(line, '\n'); i >= 0 {
			line = line[:i]
		}
		was := string(d.text[v.from:v.to])
		end := v.to
		if m := regexp.MustCompile(`^` + wasForm).FindSubmatchIndex(line); m != nil { // what it was before us counts
			was, end = string(line[m[2]:m[3]]), v.to+m[1]
		}
		return splice(d.text, v.from, end, literal+mark0(was)), true
	}
	table, last := key[:len(key)-1], key[len(key)-1]
	for _, t := range d.tables {
		if slices.Equal(t.key, table) {
			indent := d.text[t.from : t.from+len(d.text[t.from:])-len(bytes.TrimLeft(d.text[t.from:], " \t"))]
			line := string(indent) + "  " + keyTOML(last) + " = " + literal + mark0("unset") + lineEnd(d.text)
			if !bytes.HasSuffix(d.text[:t.to], []byte("\n")) {
				line = lineEnd(d.text) + line
			}
			return splice(d.text, t.to, t.to, line), true
		}
	}
	return d.text, false
}

func mark0(was string) string { return " " + mark + "was " + was + "." }

// unsetString undoes setString for the value that is name. was is what it is again, "" for nothing, as when keep refuses it.
func unsetString(text []byte, key, name string, keep func(was string) bool) (after []byte, was string, found bool) {
	after, v, found := unset(text, key, quoteTOML(name), func(v any) bool {
		s, ok := v.(string)
		return ok && keep(s)
	})
	was, _ = v.(string)
	return after, was, found
}

// unset undoes set for the value that is a literal; was is nil where nothing was, or where keep refuses it.
func unset(text []byte, key, literal string, keep func(was any) bool) (after []byte, was any, found bool) {
	form := regexp.MustCompile(`(?m)^[ \t]*(?:[^#\n]*\.)?` + regexp.QuoteMeta(key) + `[ \t]*=[ \t]*(` + regexp.QuoteMeta(literal) +
		wasForm + `)[^\n]*(\n|$)`)
	m := form.FindSubmatchIndex(text)
	if m == nil {
		return text, nil, false
	}
	old := string(text[m[4]:m[5]])
	var v struct{ V any }
	if toml.Unmarshal([]byte("V = "+old), &v) == nil && keep(v.V) { // "unset" is no value
		return splice(text, m[2], m[3], old), v.V, true
	}
	return splice(text, m[0], m[1], ""), nil, true
}
