// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const deploy = "../../deploy"

// TestFresh: what is committed is what the generator makes.
func TestFresh(t *testing.T) {
	files, err := generate(deploy)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if got, err := os.ReadFile(filepath.Join(deploy, name)); err != nil || string(got) != want {
			t.Errorf("%s is stale (%v): go run ./hack/boards", name, err)
		}
	}
	for _, folder := range []string{component, chart} {
		found, err := filepath.Glob(filepath.Join(deploy, folder, "dashboards", "*"))
		if err != nil || len(found) != len(dashboards) {
			t.Errorf("%s: %q, want %d dashboards: %v", folder, found, len(dashboards), err)
		}
	}
}

// place of a panel on the board.
type position struct{ X, Y, W, H int }

type model struct {
	UID, Title, Description string
	Tags                    []string
	SchemaVersion           int
	Time                    struct{ From, To string }
	Templating              struct {
		List []struct {
			Name, Label, Type string
			Datasource        struct{ UID string }
		}
	}
	Panels []struct {
		ID                       int
		Type, Title, Description string
		GridPos                  position
		Datasource               struct{ Type, UID string }
		FieldConfig              struct {
			Defaults  struct{ Unit string }
			Overrides []struct {
				Properties []struct{ ID, Value string }
			}
		}
		Targets []struct{ RefID, Expr, LegendFormat string }
	}
}

// units are those of Grafana's that are used; it shows what it does not know as text behind the number.
var units = []string{"none", "short", "percentunit", "bytes", "celsius", "watt", "cps", "h", "gbytes", "currencyUSD"}

// TestLint: each panel can be found, read and pointed at another Prometheus.
func TestLint(t *testing.T) {
	uids := map[string]bool{}
	for _, d := range dashboards {
		text, err := json.Marshal(d.grafana())
		if err != nil {
			t.Fatal(err)
		}
		var m model
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		if m.UID == "" || uids[m.UID] || m.Title == "" || m.Description == "" || !slices.Contains(m.Tags, "cgpu") || m.Time.From == "" ||
			m.SchemaVersion < 39 {
			t.Errorf("%s: %+v", d.name, m)
		}
		uids[m.UID] = true
		variables := map[string]bool{}
		for _, v := range m.Templating.List {
			if variables[v.Name] || v.Label == "" || v.Type == "query" && v.Datasource.UID != "${datasource}" {
				t.Errorf("%s: variable %+v", d.name, v)
			}
			variables[v.Name] = true
		}
		if m.Templating.List[0].Type != "datasource" {
			t.Errorf("%s: the first variable is %+v", d.name, m.Templating.List[0])
		}
		lintPanels(t, d.name, m, variables)
	}
}

func lintPanels(t *testing.T, name string, m model, variables map[string]bool) {
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, p := range m.Panels {
		where := name + ": " + p.Title
		if p.ID == 0 || ids[p.ID] || p.Title == "" || p.GridPos.W < 1 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("%s: id %d, at %+v", where, p.ID, p.GridPos)
		}
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if taken[at] != "" {
					t.Fatalf("%s: lies on %s", where, taken[at])
				}
				taken[at] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if !strings.HasSuffix(p.Description, ".") || p.Datasource.UID != "${datasource}" ||
			p.Datasource.Type != "prometheus" || len(p.Targets) == 0 {
			t.Errorf("%s: description %q, source %v, %d queries", where, p.Description, p.Datasource, len(p.Targets))
		}
		shown := []string{p.FieldConfig.Defaults.Unit}
		if p.Type == "table" {
			shown = nil
			for _, o := range p.FieldConfig.Overrides {
				shown = append(shown, o.Properties[0].Value)
			}
			if len(shown) != len(p.Targets) {
				t.Errorf("%s: %d units, %d columns", where, len(shown), len(p.Targets))
			}
		}
		for _, u := range shown {
			if !slices.Contains(units, u) {
				t.Errorf("%s: unit %q", where, u)
			}
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.RefID == "" || refs[q.RefID] || q.LegendFormat == "" {
				t.Errorf("%s: query %+v", where, q)
			}
			refs[q.RefID] = true
			for _, v := range regexp.MustCompile(`\$(\w+)`).FindAllStringSubmatch(q.Expr, -1) {
				if !strings.HasPrefix(v[1], "__") && !variables[v[1]] {
					t.Errorf("%s: there is no variable %s", where, v[1])
				}
			}
		}
	}
}
