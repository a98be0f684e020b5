// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/golden"
)

const root = "../.."

// TestSkips: no test skips but by this package, and docs/internals/testing.md lists what is skipped in CI (-update writes the list).
func TestSkips(t *testing.T) {
	var rows []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if path != root && strings.HasPrefix(name, ".") || path == filepath.Join(root, "pkg/testenv") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		where, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		found, err := skips(where, text)
		rows = append(rows, found...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(rows)
	inDocument(t, strings.Join(rows, ""))
}

// skips returns a row for each call of Skip in a Go file, and fails for a test that skips by itself.
func skips(file string, text []byte) (rows []string, err error) {
	fset := token.NewFileSet()
	tree, err := parser.ParseFile(fset, file, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, decl := range tree.Decls {
		ast.Inspect(decl, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, method.Sel.Name) {
				return true
			}
			if of, ok := method.X.(*ast.Ident); !ok || of.Name != "testenv" {
				err = fmt.Errorf("%s: skips by itself: pkg/testenv has functions for it", fset.Position(call.Pos()))
				return true
			}
			f, inFunc := decl.(*ast.FuncDecl)
			reason, literal := call.Args[1].(*ast.BasicLit)
			if !inFunc || !literal {
				err = fmt.Errorf("%s: testenv.Skip with a reason that is not a literal", fset.Position(call.Pos()))
				return true
			}
			why, _ := strconv.Unquote(reason.Value)
			rows = append(rows, fmt.Sprintf("| `%s`, %s | %s |\n", file, f.Name.Name, why))
			return true
		})
	}
	return rows, err
}

// inDocument compares the rows with those of docs/internals/testing.md.
func inDocument(t *testing.T, rows string) {
	name := filepath.Join(root, "docs/internals/testing.md")
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	table := regexp.MustCompile(`(?m)^\| skipped in CI \| when, or why \|\n\|---\|---\|\n((?:\|.*\n)*)`)
	at := table.FindSubmatchIndex(text)
	if at == nil {
		t.Fatal("docs/internals/testing.md has no table of what is skipped in CI")
	}
	if *golden.Update {
		if err := os.WriteFile(name, slices.Concat(text[:at[2]], []byte(rows), text[at[3]:]), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got := string(text[at[2]:at[3]]); got != rows {
		t.Errorf("docs/internals/testing.md lists\n%swhere the code skips\n%s"+
			"go test ./pkg/testenv -update writes it; a test that needs something is to call testenv.Lacks", got, rows)
	}
}

func TestOwnSkips(t *testing.T) {
	const head = "package x\n\nfunc f(t *testing.T) {\n\t"
	for text, want := range map[string]string{
		`t.Skip("no GPU")`:                   "skips by itself",
		`r.t.Skipf("no %s", gpu)`:            "skips by itself",
		`t.SkipNow()`:                        "skips by itself",
		`testenv.Skip(t, why)`:               "not a literal",
		`testenv.Skip(t, "on a GPU", gpu)`:   "",
		`testenv.Lacks(t, "no %s", program)`: "",
	} {
		rows, err := skips("x_test.go", []byte(head+text+"\n}\n"))
		if err == nil != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
		if listed := strings.Contains(text, "on a GPU"); listed != slices.Equal(rows, []string{"| `x_test.go`, f | on a GPU |\n"}) {
			t.Errorf("%s: %q", text, rows)
		}
	}
}

// ended is a test that notes how it is ended.
type ended struct {
	testing.TB
	skipped, failed bool
	said            string
}

func (e *ended) Helper()                     {}
func (e *ended) Skip(args ...any)            { e.skipped, e.said = true, fmt.Sprint(args...) }
func (e *ended) Skipf(f string, args ...any) { e.skipped, e.said = true, fmt.Sprintf(f, args...) }
func (e *ended) Fatalf(f string, args ...any) {
	e.failed, e.said = true, fmt.Sprintf(f, args...)
	panic(e)
}

func TestEnds(t *testing.T) {
	for _, ci := range []string{"", "1"} {
		t.Setenv("CI", ci)
		for name, end := range map[string]func(testing.TB){
			"lacks":   func(t testing.TB) { Lacks(t, "no %s", "GPU") },
			"program": func(t testing.TB) { NeedsProgram(t, "cgpu-no-such-program") },
		} {
			e := &ended{}
			func() {
				defer func() { _ = recover() }()
				end(e)
			}()
			if e.failed != (ci != "") || e.skipped != (ci == "") || e.said == "" {
				t.Errorf("CI=%q, %s: %+v", ci, name, e)
			}
		}
		e := &ended{}
		Skip(e, "on a GPU:", 7)
		if !e.skipped || e.failed || e.said != "on a GPU: 7" {
			t.Errorf("CI=%q, skip: %+v", ci, e)
		}
	}
}
