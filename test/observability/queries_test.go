// SPDX-License-Identifier: Apache-2.0

package observability

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"sigs.k8s.io/yaml"
)

// exported is what the exporter says of a node on which there is every series (pkg/exporter's TestSeries).
func exported(t *testing.T) map[string]*dto.MetricFamily {
	t.Helper()
	text, err := os.ReadFile("../../pkg/exporter/testdata/metrics.txt")
	must(t, err)
	p := expfmt.NewTextParser(model.LegacyValidation)
	families, err := p.TextToMetricFamilies(strings.NewReader(strings.ReplaceAll(string(text), "…", "1"))) // what depends on the machine
	must(t, err)
	return families
}

// series with their labels: the exporter's, those that the rules record, Prometheus' own, and DCGM's that a rule joins.
func knownSeries(t *testing.T) map[string][]string {
	known := map[string][]string{
		"ALERTS":              {"alertname", "alertstate", "severity", "instance"},
		"DCGM_FI_DEV_FB_USED": {"UUID", "gpu"},
	}
	for name, f := range exported(t) {
		known[name] = []string{"instance"}
		for _, m := range f.Metric {
			for _, l := range m.Label {
				known[name] = append(known[name], l.GetName())
			}
		}
	}
	for _, g := range rulesOf(t, rulesFile) {
		for _, r := range g.Rules {
			if r.Record != "" {
				e, err := promqlParser.ParseExpr(r.Expr)
				must(t, err)
				known[r.Record] = e.(*parser.AggregateExpr).Grouping // none: of the whole cluster
			}
		}
	}
	return known
}

// checkQuery: every series and every label in an expression is there.
func checkQuery(t *testing.T, where, expr string, known map[string][]string) {
	t.Helper()
	e, err := promqlParser.ParseExpr(expr)
	if err != nil {
		t.Errorf("%s: %s: %v", where, expr, err)
		return
	}
	var have, want []string
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			if _, ok := known[n.Name]; !ok {
				t.Errorf("%s: %s: there is no series %s", where, expr, n.Name)
			}
			have = append(have, known[n.Name]...)
			for _, m := range n.LabelMatchers {
				if m.Name != model.MetricNameLabel && !slices.Contains(known[n.Name], m.Name) {
					t.Errorf("%s: %s: %s has no label %s", where, expr, n.Name, m.Name)
				}
			}
		case *parser.AggregateExpr:
			want = append(want, n.Grouping...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				want = append(want, n.VectorMatching.MatchingLabels...)
			}
		}
		return nil
	})
	for _, name := range want {
		if !slices.Contains(have, name) {
			t.Errorf("%s: %s: nothing has a label %s", where, expr, name)
		}
	}
}

// TestQueries: rules and the examples of autoscaling name series and labels that are there.
func TestQueries(t *testing.T) {
	known := knownSeries(t)
	for _, g := range rulesOf(t, rulesFile) {
		for _, r := range g.Rules {
			checkQuery(t, r.Record+r.Alert, r.Expr, known)
		}
	}
	var adapter struct {
		Rules struct {
			Custom []struct{ SeriesQuery, MetricsQuery string }
		}
	}
	const folder = "../../deploy/examples/autoscaling/"
	read(t, folder+"prometheus-adapter.yaml", &adapter)
	for _, r := range adapter.Rules.Custom {
		name, _, _ := strings.Cut(r.SeriesQuery, "{")
		q := strings.NewReplacer("<<.Series>>", name, "<<.LabelMatchers>>", `namespace="a",pod="b"`, "<<.GroupBy>>", "pod").
			Replace(r.MetricsQuery)
		checkQuery(t, "prometheus-adapter.yaml", q, known)
		checkQuery(t, "prometheus-adapter.yaml", r.SeriesQuery, known)
	}
	var keda struct {
		Spec struct {
			Triggers []struct{ Metadata struct{ Query string } }
		}
	}
	read(t, folder+"keda.yaml", &keda)
	for _, r := range keda.Spec.Triggers {
		checkQuery(t, "keda.yaml", r.Metadata.Query, known)
	}
	if len(adapter.Rules.Custom) == 0 || len(keda.Spec.Triggers) == 0 {
		t.Errorf("%+v, %+v: want queries", adapter, keda)
	}
	for _, name := range []string{"observability.md", "observability.zh-CN.md"} {
		page, err := os.ReadFile("../../docs/" + name)
		must(t, err)
		blocks := regexp.MustCompile("(?s)```promql\n(.*?)```").FindAllStringSubmatch(string(page), -1)
		if len(blocks) < 5 {
			t.Errorf("docs/%s has %d blocks of queries", name, len(blocks))
		}
		for _, block := range blocks {
			for q := range strings.SplitSeq(strings.TrimSpace(block[1]), "\n\n") {
				checkQuery(t, "docs/"+name, q, known)
			}
		}
	}
}

func read(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	must(t, yaml.Unmarshal(text, into))
}

// dashboard is one as Grafana reads it.
type dashboard struct {
	Title      string
	Templating struct {
		List []struct {
			Name, Type string
			Query      any
		}
	}
	Panels []struct {
		Title, Type string
		Targets     []struct{ Expr, LegendFormat string }
	}
}

// TestPanels: over an hour of the exporter's series every query of every dashboard has an answer, with the labels that its legend names.
func TestPanels(t *testing.T) {
	p, end := hour(t)
	files, err := filepath.Glob("../../deploy/components/observability/dashboards/*.json")
	must(t, err)
	if len(files) != 4 {
		t.Fatalf("%q: want 4", files)
	}
	known := knownSeries(t)
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		var d dashboard
		must(t, json.Unmarshal(text, &d))
		values := []string{"$__rate_interval", "5m", "$__range", "1h"}
		for _, v := range d.Templating.List {
			switch q := v.Query.(type) {
			case map[string]any: // {query: label_values(SERIES, LABEL)}
				values = append(values, "$"+v.Name, ".*")
				m := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`).FindStringSubmatch(q["query"].(string))
				expr := strings.NewReplacer(values...).Replace(m[1])
				checkQuery(t, d.Title, "count by ("+m[2]+") ("+expr+")", known)
			case string:
				values = append(values, "$"+v.Name, q)
			}
		}
		fill := strings.NewReplacer(values...)
		for _, panel := range d.Panels {
			for _, target := range panel.Targets {
				where, expr := d.Title+": "+panel.Title, fill.Replace(target.Expr)
				checkQuery(t, where, expr, known)
				checkAnswer(t, p, end, where, expr, target.LegendFormat)
			}
		}
	}
}

// TestHAMiNames: each series by HAMi's name has an answer, with the labels by which HAMi's dashboard selects and names.
func TestHAMiNames(t *testing.T) {
	p, end := hour(t)
	known := knownSeries(t)
	for _, g := range rulesOf(t, "../../examples/observability/hami-names.yaml") {
		for _, r := range g.Rules {
			legend := "{{podnamespace}} {{podname}} {{ctrname}} {{vdeviceid}} {{deviceuuid}}"
			switch name := r.Record; {
			case strings.HasPrefix(name, "Host"):
				legend = "{{nodeid}} {{deviceidx}} {{deviceuuid}}"
			case strings.HasPrefix(name, "hami_vgpu_"), strings.HasPrefix(name, "hami_container_"):
				legend = "{{namespace}} {{pod}} {{container}} {{vdevice_index}} {{device_uuid}}"
			case strings.HasPrefix(name, "hami_"):
				legend = "{{node}} {{device_index}} {{device_uuid}}"
			}
			checkQuery(t, r.Record, r.Expr, known)
			checkAnswer(t, p, end, r.Record, r.Expr, legend)
		}
	}
}

func checkAnswer(t *testing.T, p *prometheus, at time.Time, where, expr, legend string) {
	t.Helper()
	got := p.query(expr, at)
	if len(got) == 0 {
		t.Errorf("%s: %s: has no series", where, expr)
	}
	for _, m := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(legend, -1) {
		found := false
		for _, v := range got {
			found = found || v.Metric.Get(m[1]) != ""
		}
		if !found {
			t.Errorf("%s: %s: nothing has the legend's label %s", where, expr, m[1])
		}
	}
}

// hour is one in which two exporters were scraped each minute and all their counters grew, with what the rules recorded. Containers of the
// second are all in pods: of the first some are not, and those have series that no other has.
func hour(t *testing.T) (*prometheus, time.Time) {
	p := newPrometheus(t, rulesOf(t, rulesFile))
	families, at := exported(t), time.Unix(0, 0).UTC()
	names := slices.Sorted(maps.Keys(families))
	for i := range 61 {
		at = time.Unix(int64(60*i), 0).UTC()
		for _, name := range names {
			for _, m := range families[name].Metric {
				value := m.GetGauge().GetValue()
				if m.Counter != nil {
					value = m.Counter.GetValue() + float64(10*i)
				}
				for _, instance := range []string{"node-1", "node-2"} {
					own := map[string]string{model.MetricNameLabel: name, "instance": instance}
					for _, l := range m.Label {
						switch {
						case l.GetValue() != "": // as Prometheus has it: an empty label is none
							own[l.GetName()] = l.GetValue()
						case instance == "node-2":
							own[l.GetName()] = "other"
						}
					}
					p.add(labels.FromMap(own), at, value)
				}
			}
		}
		p.evaluate(at)
	}
	return p, at
}
