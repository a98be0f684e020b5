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

	"github.com/opencgpu/cgpu/pkg/cluster"
	"github.com/opencgpu/cgpu/pkg/doctor"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/gc"
	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/inspect"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/manual"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/view"
)

// docs/json.md lists every field that a script can read, from the types that are printed. Who renames one sees it in the page's diff, and
// has to raise schema.Version.
func TestJSONDocs(t *testing.T) {
	const path = "../../docs/json.md"
	got := fmt.Sprintf(jsonHead, schema.Version)
	for _, c := range []struct {
		command, note string
		value         any
	}{
		{"cgpu smi -o json", "", schema.Node{}},
		{"cgpu ps -o json", "A list.", []schema.GPUProcess{}},
		{"cgpu events -o json", "An object on each line.", event.Event{}},
		{"cgpu policy -o json", "A list.", []schema.Policy{}},
		{"cgpu health -o json", "", view.Health{}},
		{"cgpu doctor -o json", "", doctor.Report{}},
		{"cgpu upgrade -o json", "", schema.Upgrade{}},
		{"cgpu gc -o json", "", gc.Done{}},
		{"cgpu install -o json", "`uninstall` prints the same.", schema.Install{}},
		{"cgpu km --once -o json", "A list.", []schema.KMFile{}},
		{"cgpu config check -o json", "", configView{}},
		{"cgpu version -o json", "", versionView{}},
		{"cgpu inspect", "It is JSON always.", inspect.Dossier{}},
		{"kubectl cgpu inspect -o json", "", cluster.Cluster{}},
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

Every command that lists something, or changes a GPU or a container, prints JSON with ` + "`-o json`" + `. ` + "`set`, `pause`, `resume` and `refresh`" + `
print what ` + "`smi`" + ` does, the first three of their container alone; ` + "`policy` and `health clear`" + ` print the state after their change. This page
is generated from the types in the code (` + "`go test ./cmd/cgpu -run TestJSONDocs -update`" + `), and a test holds it up to date.

Version of the schema: **%d** (` + "`cgpu version -o json`, field `schema`" + `). Fields may be added under the same version. It goes up when one is
renamed, taken away, or means something else. A field with "may be absent" is left out where there is nothing to say.

A name ends with its unit: ` + "`_bytes`, `_seconds`, or `_percent`, of a GPU's time, with a tenth; `percent`" + ` alone is the share that was
asked for. Priorities (best-effort, default, high) and policies ([policies.md](policies.md)) are names. Points in time are RFC 3339.

Version 2 came before the first release; [CHANGELOG.md](../CHANGELOG.md) says what each field of version 1 is now.
`

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
		if unit, ok := units[strings.TrimPrefix(kind, "list of ")]; ok && !strings.HasSuffix(name, unit) {
			t.Errorf("%v.%s: %q does not end with %q", typ, f.Name, name, unit)
		}
		if strings.ToLower(name) != name {
			t.Errorf("%v.%s: %q: want words with _ between them", typ, f.Name, name)
		}
		if strings.Contains(options, "omit") {
			kind += ", may be absent"
		}
		all = append(all, jsonField{prefix + name, kind, comments[f.Name]})
		if inner != nil && !strings.HasPrefix(comments[f.Name], "as cgpu") && inner != reflect.TypeFor[ledger.Record]() {
			all = append(all, fieldsOf(t, f.Type, prefix+name)...)
		}
	}
	return all
}

// units are the ends of names, by kind. Of those without one, names are to be printed, or schema.Percent and schema.Seconds.
var units = map[string]string{"bytes": "_bytes", "percent": "_percent", "seconds": "_seconds", "per mille": "?",
	"nanoseconds": "?", "code": "?"}

// kindOf says what a value is; inner is set for one with fields.
func kindOf(typ reflect.Type) (kind string, inner reflect.Type) {
	switch typ {
	case reflect.TypeFor[quota.Bytes]():
		return "bytes", nil
	case reflect.TypeFor[schema.Percent]():
		return "percent", nil
	case reflect.TypeFor[schema.Seconds]():
		return "seconds", nil
	case reflect.TypeFor[sched.Permille]():
		return "per mille", nil
	case reflect.TypeFor[time.Duration]():
		return "nanoseconds", nil
	case reflect.TypeFor[quota.Priority](), reflect.TypeFor[sched.Policy]():
		return "code", nil
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
