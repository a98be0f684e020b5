// SPDX-License-Identifier: Apache-2.0

package observability

import (
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"
)

// TestRules: each alert waits, says how bad it is, and has a paragraph in the documentation; nothing there is about one that is gone.
func TestRules(t *testing.T) {
	page, err := os.ReadFile("../../docs/observability.md")
	must(t, err)
	const link = "https://github.com/opencgpu/cgpu/blob/main/docs/observability.md#"
	names := map[string]bool{}
	for _, g := range rulesOf(t, rulesFile) {
		for _, r := range g.Rules {
			if r.Record != "" {
				continue
			}
			names[r.Alert] = true
			a := r.Annotations
			if r.For == 0 || !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) || a["summary"] == "" ||
				a["description"] == "" {
				t.Errorf("%s: for %v, labels %v, annotations %v", r.Alert, r.For, r.Labels, a)
			}
			if a["runbook_url"] != link+strings.ToLower(r.Alert) || !strings.Contains(string(page), "\n### "+r.Alert+"\n") {
				t.Errorf("%s: %s, or docs/observability.md has no such heading", r.Alert, a["runbook_url"])
			}
		}
	}
	for _, heading := range regexp.MustCompile(`(?m)^### (Cgpu\w+)$`).FindAllStringSubmatch(string(page), -1) {
		if !names[heading[1]] {
			t.Errorf("docs/observability.md: there is no alert %s", heading[1])
		}
	}
	chinese, err := os.ReadFile("../../docs/observability.zh-CN.md")
	must(t, err)
	told := map[string]bool{}
	for _, name := range regexp.MustCompile(`\bCgpu\w+`).FindAllString(string(chinese), -1) {
		told[name] = true
	}
	if diff := gocmp.Diff(names, told); diff != "" {
		t.Errorf("docs/observability.zh-CN.md: -alerts +told:\n%s", diff)
	}
}

// unitTest is a file of `promtool test rules`, as far as ours use its format.
type unitTest struct {
	RuleFiles []string       `yaml:"rule_files"`
	Every     model.Duration `yaml:"evaluation_interval"`
	Tests     []struct {
		Name     string         `yaml:"name"`
		Interval model.Duration `yaml:"interval"`
		Input    []struct {
			Series string `yaml:"series"`
			Values string `yaml:"values"`
		} `yaml:"input_series"`
		Alerts []struct {
			At    model.Duration `yaml:"eval_time"`
			Alert string         `yaml:"alertname"`
			Want  []struct {
				Labels      map[string]string `yaml:"exp_labels"`
				Annotations map[string]string `yaml:"exp_annotations"`
			} `yaml:"exp_alerts"`
		} `yaml:"alert_rule_test"`
		Queries []struct {
			Expr string         `yaml:"expr"`
			At   model.Duration `yaml:"eval_time"`
			Want []struct {
				Labels string  `yaml:"labels"`
				Value  float64 `yaml:"value"`
			} `yaml:"exp_samples"`
		} `yaml:"promql_expr_test"`
	} `yaml:"tests"`
}

// TestDay: what the rules say of a scripted day. Every alert is seen to fire and to be silent.
func TestDay(t *testing.T) {
	files, err := filepath.Glob("*.test.yaml")
	must(t, err)
	fired, silent := map[string]bool{}, map[string]bool{}
	for _, file := range files {
		f, err := os.Open(file)
		must(t, err)
		defer f.Close()
		var u unitTest
		d := yaml.NewDecoder(f)
		d.KnownFields(true)
		must(t, d.Decode(&u))
		for i := range u.Tests {
			t.Run(u.Tests[i].Name, func(t *testing.T) { u.run(t, i, fired, silent) })
		}
	}
	for _, g := range rulesOf(t, rulesFile) {
		for _, r := range g.Rules {
			if r.Alert != "" && (!fired[r.Alert] || !silent[r.Alert]) {
				t.Errorf("%s: tested firing %v, silent %v: want both", r.Alert, fired[r.Alert], silent[r.Alert])
			}
		}
	}
}

func (u unitTest) run(t *testing.T, i int, fired, silent map[string]bool) {
	start, test := time.Unix(0, 0).UTC(), u.Tests[i]
	p := newPrometheus(t, nil)
	for _, file := range u.RuleFiles {
		p.groups = append(p.groups, rulesOf(t, file)...)
	}
	for _, in := range test.Input {
		l, values, err := promqlParser.ParseSeriesDesc(in.Series + " " + in.Values)
		must(t, err)
		for n, v := range values {
			if !v.Omitted {
				p.add(l, start.Add(time.Duration(n)*time.Duration(test.Interval)), v.Value)
			}
		}
	}
	var last time.Duration
	for _, a := range test.Alerts {
		last = max(last, time.Duration(a.At))
	}
	for _, q := range test.Queries {
		last = max(last, time.Duration(q.At))
	}
	for at := time.Duration(0); at <= last; at += time.Duration(u.Every) {
		p.evaluate(start.Add(at))
		for _, want := range test.Alerts {
			if time.Duration(want.At) != at {
				continue
			}
			var got, wanted []map[string]string
			for _, a := range p.active[want.Alert] {
				if a.firing {
					got = append(got, flat(a.labels, a.annotations))
				}
			}
			for _, w := range want.Want {
				all := maps.Clone(w.Labels)
				all["alertname"] = want.Alert
				wanted = append(wanted, flat(all, w.Annotations))
			}
			order(got)
			order(wanted)
			if diff := gocmp.Diff(wanted, got); diff != "" {
				t.Errorf("%s at %v (-want +got):\n%s", want.Alert, at, diff)
			}
			fired[want.Alert] = fired[want.Alert] || len(got) > 0
			silent[want.Alert] = silent[want.Alert] || len(got) == 0
		}
		for _, q := range test.Queries {
			if time.Duration(q.At) == at {
				u.compare(t, p, i, q.Expr, start.Add(at))
			}
		}
	}
}

// compare holds what an expression is to what it should be.
func (u unitTest) compare(t *testing.T, p *prometheus, i int, expr string, at time.Time) {
	t.Helper()
	got := map[string]float64{}
	for _, v := range p.query(expr, at) {
		got[v.Metric.String()] = v.F
	}
	for _, q := range u.Tests[i].Queries {
		if q.Expr != expr || time.Duration(q.At) != at.Sub(time.Unix(0, 0)) {
			continue
		}
		for _, w := range q.Want {
			l, err := promqlParser.ParseMetric(w.Labels)
			must(t, err)
			// Sums of floats: as near as promtool wants them.
			if f, ok := got[l.String()]; !ok || math.Abs(f-w.Value) > 1e-6*math.Abs(w.Value) {
				t.Errorf("%s at %v: %v, want %s %v", expr, at, got, l, w.Value)
			}
		}
		if len(q.Want) != len(got) {
			t.Errorf("%s at %v: %v, want %d", expr, at, got, len(q.Want))
		}
	}
}

func flat(labels, annotations map[string]string) map[string]string {
	all := map[string]string{}
	for k, v := range labels {
		all["label "+k] = v
	}
	for k, v := range annotations {
		all["annotation "+k] = v
	}
	return all
}

func order(list []map[string]string) {
	slices.SortFunc(list, func(a, b map[string]string) int {
		return strings.Compare(a["annotation summary"]+a["label gpu"], b["annotation summary"]+b["label gpu"])
	})
}
