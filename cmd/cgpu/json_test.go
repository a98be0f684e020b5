// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/doctor"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/gc"
	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/manual"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/view"
)

// docs/json.md lists every field that a script can read, from the types that are printed. Who renames one sees it in the page's diff, and
// has to raise snapshot.Schema.
func TestJSONDocs(t *testing.T) {
	const path = "../../docs/json.md"
	got := fmt.Sprintf(jsonHead, snapshot.Schema)
	for _, c := range []struct {
		command, note string
		value         any
	}{
		{"cgpu smi -o json", "", snapshot.View{}},
		{"cgpu ps -o json", "A list.", []view.Process{}},
		{"cgpu events -o json", "An object on each line.", event.Event{}},
		{"cgpu policy -o json", "A list.", []view.Policy{}},
		{"cgpu health -o json", "", view.Health{}},
		{"cgpu doctor -o json", "", doctor.Report{}},
		{"cgpu gc -o json", "", gc.Done{}},
		{"cgpu config -o json check", "", configView{}},
		{"cgpu version -o json", "", versionView{}},
		{"cgpu inspect",
			"It is JSON always. `record`, `guard` and `page` are what ledger, guard and page hold; they are for people, and not under the version.",
			inspectFields{}},
	} {
		got += "\n## " + c.command + "\n\n"
		if c.note != "" {
			got += c.note + "\n\n"
		}
		got += "| field | is | meaning |\n|---|---|---|\n"
		for _, f := range fieldsOf(t, reflect.TypeOf(c.value), "") {
			got += fmt.Sprintf("| `%s` | %s | %s |\n", f.path, f.kind, manual.Cell(f.meaning))
		}
	}
	if *golden.Update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("docs/json.md is not what the types say; go test ./cmd/cgpu -run TestJSONDocs -update writes it anew")
	}
}

const jsonHead = `# JSON for scripts

Every command that lists or changes something prints JSON with ` + "`-o json`" + `; ` + "`set`, `pause`, `resume` and `refresh` print what `smi`" + `
does, the first three of their container alone. This page is generated from the types in the code (` + "`go test ./cmd/cgpu -run TestJSONDocs -update`" + `), and
a test holds it up to date.

Version of the schema: **%d** (` + "`cgpu version -o json`, field `schema`" + `). Fields may be added under the same version. It goes up when one is renamed, taken away, or
means something else. A field with "may be absent" is left out where there is nothing to say.

Amounts of memory are bytes. Parts of a GPU's time are tenths of a percent where this page says "per mille", and percent where it says so. Priorities are
0 (best-effort), 1 (default) and 2 (high). Policies in compute are the numbers of [policies.md](policies.md), else names. Times are RFC 3339.
`

// inspectFields are the fields of dossier that are under the version.
type inspectFields struct {
	ID     string        `json:"id"`
	Name   string        `json:"name,omitempty"`
	State  string        `json:"state"`  // as in cgpu smi
	Events []event.Event `json:"events"` // as cgpu events prints them
}

type jsonField struct{ path, kind, meaning string }

// fieldsOf lists the fields of a type, with those of what is in it.
func fieldsOf(t *testing.T, typ reflect.Type, prefix string) (all []jsonField) {
	t.Helper()
	for typ.Kind() == reflect.Slice || typ.Kind() == reflect.Pointer {
		if typ.Kind() == reflect.Slice {
			prefix += "[]"
		}
		typ = typ.Elem()
	}
	if prefix != "" {
		prefix += "."
	}
	comments := commentsOf(t, typ)
	for i := range typ.NumField() {
		f := typ.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" || !f.IsExported() {
			continue
		}
		if name == "" {
			t.Errorf("%v.%s has no name in JSON", typ, f.Name)
			continue
		}
		kind, inner := kindOf(f.Type)
		if strings.Contains(options, "omitempty") {
			kind += ", may be absent"
		}
		all = append(all, jsonField{prefix + name, kind, comments[f.Name]})
		if inner != nil && !strings.HasPrefix(comments[f.Name], "as cgpu") {
			all = append(all, fieldsOf(t, f.Type, prefix+name)...)
		}
	}
	return all
}

// kindOf says what a value is; inner is set for one with fields.
func kindOf(typ reflect.Type) (kind string, inner reflect.Type) {
	switch typ {
	case reflect.TypeFor[quota.Bytes]():
		return "bytes", nil
	case reflect.TypeFor[sched.Permille]():
		return "per mille", nil
	case reflect.TypeFor[time.Duration]():
		return "nanoseconds", nil
	case reflect.TypeFor[time.Time]():
		return "time", nil
	}
	switch typ.Kind() {
	case reflect.Pointer:
		return kindOf(typ.Elem())
	case reflect.Slice:
		kind, inner = kindOf(typ.Elem())
		return "list of " + kind, inner
	case reflect.Struct:
		return "object", typ
	case reflect.String:
		return "text", nil
	case reflect.Bool:
		return "true or false", nil
	}
	return "number", nil
}

// commentsOf are the comments of a struct's fields in its source.
func commentsOf(t *testing.T, typ reflect.Type) map[string]string {
	t.Helper()
	dir := "."
	if _, below, ok := strings.Cut(typ.PkgPath(), "/cgpu/pkg/"); ok {
		dir = "../../pkg/" + below
	}
	files, err := filepath.Glob(dir + "/*.go")
	if err != nil {
		t.Fatal(err)
	}
	comments := map[string]string{}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || spec.Name.Name != typ.Name() {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					text := f.Comment.Text()
					if text == "" {
						text = f.Doc.Text()
					}
					for _, name := range f.Names {
						comments[name.Name] = strings.TrimPrefix(strings.Join(strings.Fields(text), " "), name.Name+" is ")
					}
				}
			}
			return false
		})
	}
	return comments
}
