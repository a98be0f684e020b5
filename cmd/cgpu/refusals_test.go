// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The sources of what a user may read when a container does not start.
var refusing = []string{
	"../../pkg/quota/*.go", "../../pkg/admit/*.go", "../../pkg/ledger/*.go",
	"../../pkg/spec/*.go", "../../pkg/launch/*.go", "../../pkg/sched/policy.go", "../../pkg/sched/share.go", "../../pkg/rm/abi.go",
	"../../pkg/rm/version.go",
	"../../pkg/device/load.go", "../../pkg/domain/domain.go", "../../pkg/alloc/*.go", "../cgpu-runtime/*.go", "../cgpu-podresources/*.go",
	"../../pkg/decision/*.go", "../../pkg/nri/*.go", "../cgpu-hook/main.go", "../cgpu-hook/job.go", "../cgpu-hook/root.go",
	"../cgpu-hook/ldcache.go", "../cgpu-hook/bind.go", "../../pkg/inside/inside.go", "../../pkg/mount/mount.go",
	"../../pkg/nvmlclient/limits.go", "../cgpu-refresh/limits.go",
}

// Every refusal in the code has a row in docs/troubleshooting.md, and no row there is of a refusal that is gone.
func TestRefusalsAreExplained(t *testing.T) {
	text, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n## Every refusal\n")
	if !ok {
		t.Fatal("docs/troubleshooting.md has no section Every refusal")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	fragments := map[string]bool{} // to whether it is in use
	for line := range strings.Lines(section) {
		if strings.HasPrefix(line, "| `") {
			for _, m := range placeholder.FindAllStringSubmatch(splitRow(strings.TrimSpace(line))[0], -1) {
				fragments[m[1]] = false
			}
		}
	}
	for _, m := range refusals(t) {
		explained := false
		for f := range fragments {
			if inOrder(strings.Split(f, "…"), m.text) {
				fragments[f], explained = true, true
			}
		}
		if !explained {
			t.Errorf("%s: %q: no row of docs/troubleshooting.md explains it", m.where, m.text)
		}
	}
	for f, used := range fragments {
		if !used {
			t.Errorf("docs/troubleshooting.md explains %q, which nothing says", f)
		}
	}
}

func inOrder(parts []string, text string) bool {
	for _, p := range parts {
		_, rest, ok := strings.Cut(text, p)
		if !ok {
			return false
		}
		text = rest
	}
	return true
}

type refusal struct{ where, text string }

// refusals collects the messages from the code: what is given to the functions that make errors, and reasons that are
// returned or put into a Refusal. What is not a text there stands as "…".
func refusals(t *testing.T) (all []refusal) {
	t.Helper()
	set := token.NewFileSet()
	for _, pattern := range refusing {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			add := func(e ast.Expr, start string) {
				text := flat(e)
				if twoWords.MatchString(text) && strings.HasPrefix(text, start) {
					p := set.Position(e.Pos())
					all = append(all, refusal{filepath.Base(filepath.Dir(p.Filename)) + "/" + filepath.Base(p.Filename) + ":" + strconv.Itoa(p.Line),
						text})
				}
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.CallExpr:
					if slices.Contains([]string{"bad", "refuse", "New", "Errorf", "RefuseTime", "RefuseSpill", "RefuseDomain"}, functionName(n)) &&
						len(n.Args) > 0 {
						add(n.Args[0], "")
					}
				case *ast.ValueSpec:
					for i, name := range n.Names {
						if strings.HasPrefix(name.Name, "want") && i < len(n.Values) {
							add(n.Values[i], "want ")
						}
					}
				case *ast.CompositeLit:
					if flatName(n.Type) == "Reason" && len(n.Elts) > 0 {
						add(n.Elts[0], "")
					}
					for _, e := range n.Elts {
						if kv, ok := e.(*ast.KeyValueExpr); ok && flatName(kv.Key) == "Reason" {
							add(kv.Value, "")
						}
					}
				case *ast.AssignStmt:
					for i, left := range n.Lhs {
						if i >= len(n.Rhs) {
							break
						}
						if s, ok := left.(*ast.SelectorExpr); ok && s.Sel.Name == "Reason" {
							add(n.Rhs[i], "")
						}
						if flatName(left) == "want" {
							add(n.Rhs[i], "want ")
						}
					}
				case *ast.ReturnStmt:
					for _, e := range n.Results {
						for _, start := range []string{"is ", "has ", "there is "} {
							add(e, start)
						}
					}
				}
				return true
			})
		}
	}
	if len(all) < 80 {
		t.Errorf("only %d refusals found in the code", len(all))
	}
	return all
}

var (
	// A message without two words in a row only names what it wraps.
	twoWords   = regexp.MustCompile(`[a-zA-Z]{2,},? [a-zA-Z]{2,}`)
	formatVerb = regexp.MustCompile(`%[a-z]`)
)

func functionName(c *ast.CallExpr) string {
	if s, ok := c.Fun.(*ast.SelectorExpr); ok {
		return s.Sel.Name
	}
	return flatName(c.Fun)
}

func flatName(e ast.Expr) string {
	if id, ok := e.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

// flat is the text of a string expression.
func flat(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			if s, err := strconv.Unquote(e.Value); err == nil {
				return strings.ReplaceAll(formatVerb.ReplaceAllString(s, "…"), "%%", "%")
			}
		}
	case *ast.BinaryExpr:
		return flat(e.X) + flat(e.Y)
	case *ast.ParenExpr:
		return flat(e.X)
	case *ast.CallExpr:
		if functionName(e) == "Sprintf" {
			return flat(e.Args[0])
		}
	}
	return "…"
}
