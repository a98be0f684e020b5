// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/opencgpu/cgpu/pkg/suggest"
)

// badValue is a value that cannot be; its key is as lineOf counts, such as sim.gpus[1].memory.
type badValue struct{ key, text string }

func (e *badValue) Error() string { return e.text }

// fault is one bad value: key, value, and what is wanted instead.
func fault(key string, value any, want string) error {
	return &badValue{key, fmt.Sprintf("%s = %s: %s", key, quoted(value), want)}
}

// quoted is a value as it stands in the file.
func quoted(value any) string {
	switch v := value.(type) {
	case string:
		return strconv.Quote(v)
	case []any:
		list := make([]string, len(v))
		for i, one := range v {
			list[i] = quoted(one)
		}
		return "[" + strings.Join(list, ", ") + "]"
	case map[string]any:
		return "a table"
	}
	return fmt.Sprint(value)
}

// written is what a size says, in quotation marks or without.
func written(size any) string {
	switch v := size.(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return "" // is no size
}

// decodeError makes one line, in words, of what the decoder found, which is else drawn over several.
func decodeError(name string, text []byte, err error) error {
	if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok && len(unknown.Errors) > 0 {
		first := unknown.Errors[0]
		line, _ := first.Position()
		keys := first.Key()
		return fmt.Errorf("config: %s: unknown key %s: want one of docs/variables.md, each with its default in configs/cgpu.toml of the "+
			"sources%s",
			at(name, line), strings.Join(keys, "."), suggest.DidYouMean(keys[len(keys)-1], siblings(keys)))
	}
	bad, ok := errors.AsType[*toml.DecodeError](err)
	if !ok {
		return fmt.Errorf("config: %s: %w", name, err)
	}
	line, _ := bad.Position()
	key := strings.Join(bad.Key(), ".")
	var all map[string]any
	if want := wants()[key]; want != "" && toml.Unmarshal(text, &all) == nil { // it is TOML, and of another kind
		if value, ok := valueAt(all, bad.Key()); ok {
			return fmt.Errorf("config: %s: %w", at(name, line), fault(key, value, "want "+want))
		}
		return fmt.Errorf("config: %s: %s: want %s", at(name, line), key, want)
	}
	message := strings.TrimPrefix(bad.Error(), "toml: ")
	if key != "" {
		message = key + ": " + message
	}
	return fmt.Errorf("config: %s: %s", at(name, line), message)
}

// wants says of what kind each key's value is.
func wants() map[string]string {
	all := map[string]string{}
	add := func(table string, of any) {
		for field := range reflect.TypeOf(of).Fields() {
			all[table+field.Tag.Get("toml")] = kindOf(field.Type)
		}
	}
	add("", file{})
	add("sim.", file{}.Sim)
	add("sim.gpus.", fileGPU{})
	add("domains.", fileDomain{})
	return all
}

// siblings are the known keys of the table that a key is in.
func siblings(key []string) (known []string) {
	table := strings.Join(key[:len(key)-1], ".")
	for k := range wants() {
		if of, last := k[:max(strings.LastIndex(k, "."), 0)], k[strings.LastIndex(k, ".")+1:]; of == table {
			known = append(known, last)
		}
	}
	slices.Sort(known) // of two that are as near, always the same
	return known
}

func kindOf(t reflect.Type) string {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.String:
		return "text in quotation marks"
	case reflect.Int64:
		return "a whole number without quotation marks"
	case reflect.Float64:
		return "a number without quotation marks"
	case reflect.Bool:
		return "true or false, without quotation marks"
	case reflect.Slice:
		switch t.Elem() {
		case reflect.TypeFor[fileGPU]():
			return "tables [[sim.gpus]]"
		case reflect.TypeFor[fileDomain]():
			return "tables [[domains]]"
		}
		return "a list, in brackets, of " + kindOf(t.Elem())
	case reflect.Struct:
		return "a table, such as [sim]"
	}
	return "a size, such as \"6GiB\""
}

// at is where something stands; line 0 is not known.
func at(name string, line int) string {
	if line == 0 {
		return name
	}
	return fmt.Sprintf("%s:%d", name, line)
}

// valueAt is a key's value, unless it is in one of several tables.
func valueAt(v any, key []string) (any, bool) {
	for _, k := range key {
		table, _ := v.(map[string]any)
		of, ok := table[k]
		if !ok {
			return nil, false
		}
		v = of
	}
	return v, true
}

// lineOf is the line in which a key is set, or else in which the table begins that has it; 0 where that cannot be said.
// Elements of an array of tables are counted: sim.gpus[0].memory.
func lineOf(text []byte, key string) (line int) {
	var p unstable.Parser
	p.Reset(text)
	table, seen, best := "", map[string]int{}, 0
	for p.NextExpression() {
		e := p.Expression()
		var path []string
		at := 0
		for k := e.Key(); k.Next(); {
			if at == 0 {
				at = p.Shape(k.Node().Raw).Start.Line
			}
			path = append(path, string(k.Node().Data))
		}
		full := strings.Join(path, ".")
		switch e.Kind {
		case unstable.Table:
			table = full + "."
		case unstable.ArrayTable:
			full, seen[full] = fmt.Sprintf("%s[%d]", full, seen[full]), seen[full]+1
			table = full + "."
		case unstable.KeyValue:
			full = table + full
		}
		if (key == full || strings.HasPrefix(key, full+".") || strings.HasPrefix(key, full+"[")) && len(full) > best {
			best, line = len(full), at
		}
	}
	return line
}
