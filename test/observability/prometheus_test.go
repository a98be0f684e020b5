// SPDX-License-Identifier: Apache-2.0

// Package observability holds rules, dashboards and monitors to Prometheus' own engine and to its operator's types. It stands for promtool
// and for a server with a database: to build those takes minutes.
package observability

import (
	"context"
	"maps"
	"math"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/template"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

const rulesFile = "../../deploy/components/observability/rules.yaml"

var promqlParser = parser.NewParser(parser.Options{})

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// rulesOf reads a file of rules as Prometheus does, which tries expressions and templates.
func rulesOf(t testing.TB, file string) []rulefmt.RuleGroup {
	t.Helper()
	groups, errs := rulefmt.ParseFile(file, false, model.UTF8Validation, promqlParser, promslog.NewNopLogger())
	for _, err := range errs {
		t.Fatal(err)
	}
	return groups.Groups
}

// sample is a float at a time in milliseconds.
type sample struct {
	t int64
	f float64
}

func (s sample) T() int64                      { return s.t }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.f }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }

type series struct {
	labels  labels.Labels
	samples []chunks.Sample
}

// prometheus has series in memory, and evaluates rules over them in virtual time.
type prometheus struct {
	t        testing.TB
	engine   *promql.Engine
	byLabels map[uint64]*series
	groups   []rulefmt.RuleGroup
	recorded map[string]map[uint64]labels.Labels // at the step before, by group and rule
	active   map[string]map[uint64]alert         // of alerts, by their names
}

// alert is one since it became active.
type alert struct {
	since               time.Time
	firing              bool
	labels, annotations map[string]string
}

func newPrometheus(t testing.TB, groups []rulefmt.RuleGroup) *prometheus {
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 50e6, Timeout: 10 * time.Minute, LookbackDelta: 5 * time.Minute, Parser: promqlParser})
	t.Cleanup(func() { engine.Close() })
	return &prometheus{t: t, engine: engine, groups: groups, byLabels: map[uint64]*series{},
		recorded: map[string]map[uint64]labels.Labels{}, active: map[string]map[uint64]alert{}}
}

func (p *prometheus) add(l labels.Labels, at time.Time, f float64) {
	s := p.byLabels[l.Hash()]
	if s == nil {
		s = &series{labels: l}
		p.byLabels[l.Hash()] = s
	}
	s.samples = append(s.samples, sample{at.UnixMilli(), f})
}

func (p *prometheus) pick(_ bool, hints *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	var list []storage.Series
	for _, s := range p.byLabels {
		if slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(s.labels.Get(m.Name)) }) {
			continue
		}
		from, _ := slices.BinarySearchFunc(s.samples, hints.Start, func(s chunks.Sample, at int64) int { return int(s.T() - at) })
		list = append(list, storage.NewListSeries(s.labels, s.samples[from:]))
	}
	slices.SortFunc(list, func(a, b storage.Series) int { return labels.Compare(a.Labels(), b.Labels()) })
	return &seriesSet{list: list}
}

type seriesSet struct {
	list []storage.Series
	next int
}

func (s *seriesSet) Next() bool                      { s.next++; return s.next <= len(s.list) }
func (s *seriesSet) At() storage.Series              { return s.list[s.next-1] }
func (*seriesSet) Err() error                        { return nil }
func (*seriesSet) Warnings() annotations.Annotations { return nil }

// query is what an expression is at a time.
func (p *prometheus) query(expr string, at time.Time) promql.Vector {
	p.t.Helper()
	source := &storage.MockQueryable{MockQuerier: &storage.MockQuerier{SelectMockFunction: p.pick}}
	q, err := p.engine.NewInstantQuery(context.Background(), source, nil, expr, at)
	must(p.t, err)
	defer q.Close()
	r := q.Exec(context.Background())
	if r.Err != nil {
		p.t.Fatalf("%s: %v", expr, r.Err)
	}
	if s, ok := r.Value.(promql.Scalar); ok {
		return promql.Vector{{T: s.T, F: s.V}}
	}
	v, err := r.Vector()
	must(p.t, err)
	return slices.Clone(v)
}

// evaluate evaluates every rule once.
func (p *prometheus) evaluate(at time.Time) {
	for _, g := range p.groups {
		for _, r := range g.Rules {
			if r.Record != "" {
				p.record(r, at)
			} else {
				p.alert(r, at)
			}
		}
	}
}

func (p *prometheus) record(r rulefmt.Rule, at time.Time) {
	now := map[uint64]labels.Labels{}
	for _, v := range p.query(r.Expr, at) {
		b := labels.NewBuilder(v.Metric).Set(model.MetricNameLabel, r.Record)
		for name, text := range r.Labels {
			b.Set(name, text)
		}
		l := b.Labels()
		if now[l.Hash()].Len() > 0 {
			p.t.Fatalf("%s: %s is there twice", r.Record, l)
		}
		now[l.Hash()] = l
		p.add(l, at, v.F)
	}
	for h, l := range p.recorded[r.Record] {
		if now[h].Len() == 0 {
			p.add(l, at, math.Float64frombits(value.StaleNaN))
		}
	}
	p.recorded[r.Record] = now
}

func (p *prometheus) alert(r rulefmt.Rule, at time.Time) {
	now := map[uint64]alert{}
	for _, v := range p.query(r.Expr, at) {
		own := v.Metric.Map()
		delete(own, model.MetricNameLabel)
		data := template.AlertTemplateData(maps.Clone(own), nil, "", v)
		a := alert{since: at, labels: own, annotations: map[string]string{}}
		for name, text := range r.Labels {
			a.labels[name] = p.expand(text, data, at)
		}
		a.labels["alertname"] = r.Alert
		for name, text := range r.Annotations {
			a.annotations[name] = p.expand(text, data, at)
		}
		h := labels.FromMap(a.labels).Hash()
		if _, twice := now[h]; twice {
			p.t.Fatalf("%s: %v is there twice", r.Alert, a.labels)
		}
		if before, ok := p.active[r.Alert][h]; ok {
			a.since = before.since
		}
		a.firing = at.Sub(a.since) >= time.Duration(r.For)
		now[h] = a
	}
	p.active[r.Alert] = now
}

func (p *prometheus) expand(text string, data any, at time.Time) string {
	query := func(_ context.Context, expr string, at time.Time) (promql.Vector, error) {
		return p.query(expr, at), nil
	}
	text = "{{$labels := .Labels}}{{$value := .Value}}" + text
	e := template.NewTemplateExpander(context.Background(), text, "", data, model.TimeFromUnixNano(at.UnixNano()), query, &url.URL{}, nil)
	s, err := e.Expand()
	must(p.t, err)
	return s
}
