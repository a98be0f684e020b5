// SPDX-License-Identifier: Apache-2.0

package main

import "fmt"

// dashboard is one of Grafana's, as far as ours differ.
type dashboard struct {
	name, title, about string
	from               string // the time that is shown at first, to now
	variables          []variable
	rows               []row
}

// variable is chosen at the top of a dashboard: the values of a label, or, without one, a text.
type variable struct {
	name, title   string
	series, label string
	one           bool   // one value at a time, and none for all
	text          string // at first
}

type row struct {
	title  string
	panels []panel
}

// panel is a picture of some queries. Every query has the same unit, but in tables, where a column has its own.
type panel struct {
	kind                 kind
	title, about, unit   string
	width                int // of 24
	queries              []query
	stacked              bool
	redAbove, redBelow   float64 // for numbers; 0: no limit
	labels, labelColumns []string
}

type kind string

const (
	number kind = "stat"
	lines  kind = "timeseries"
	table  kind = "table"
)

// query is in PromQL; legend is the name of a line, or the title of a column.
type query struct{ expr, legend, unit string }

type object map[string]any

// source is Prometheus, as the reader chooses it.
var source = object{"type": "prometheus", "uid": "${datasource}"}

// grafana is the dashboard in Grafana's model.
func (d dashboard) grafana() object {
	list := []object{{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}}
	for _, v := range d.variables {
		list = append(list, v.grafana())
	}
	return object{
		"uid": "cgpu-" + d.name, "title": d.title, "description": d.about, "tags": []string{"cgpu"}, "schemaVersion": 39, "version": 1,
		"editable": true, "graphTooltip": 1, "refresh": "30s", "timezone": "browser", "time": object{"from": d.from, "to": "now"},
		"annotations": object{"list": []object{}}, "templating": object{"list": list}, "panels": d.panels(),
		"links": []object{{"type": "dashboards", "title": "cgpu", "tags": []string{"cgpu"}, "keepTime": true, "includeVars": true}},
	}
}

func (v variable) grafana() object {
	if v.series == "" {
		return object{"name": v.name, "label": v.title, "type": "textbox", "query": v.text, "hide": 0}
	}
	query := fmt.Sprintf("label_values(%s, %s)", v.series, v.label)
	o := object{"name": v.name, "label": v.title, "type": "query", "datasource": source, "definition": query, "hide": 0,
		"query": object{"query": query, "refId": v.name}, "refresh": 2, "sort": 1, "multi": !v.one, "includeAll": !v.one}
	if !v.one {
		o["allValue"] = ".*" // also of series without the label
		o["current"] = object{"text": "All", "value": "$__all"}
	}
	return o
}

// panels lays them out: rows of 24 from left to right.
func (d dashboard) panels() (list []object) {
	id, y := 1, 0
	for _, r := range d.rows {
		list = append(list, object{"id": id, "type": "row", "title": r.title, "collapsed": false, "panels": []object{},
			"gridPos": place(0, y, 24, 1)})
		id, y = id+1, y+1
		x, height := 0, 0
		for _, p := range r.panels {
			if x+p.width > 24 {
				x, y, height = 0, y+height, 0
			}
			h := map[kind]int{number: 4, lines: 8, table: 9}[p.kind]
			o := p.grafana()
			o["id"], o["gridPos"] = id, place(x, y, p.width, h)
			list = append(list, o)
			id, x, height = id+1, x+p.width, max(height, h)
		}
		y += height
	}
	return list
}

func place(x, y, w, h int) object { return object{"x": x, "y": y, "w": w, "h": h} }

func (p panel) grafana() object {
	defaults := object{"unit": p.unit, "noValue": "-"}
	o := object{"type": string(p.kind), "title": p.title, "description": p.about, "datasource": source, "targets": p.targets()}
	overrides := []object{}
	switch p.kind {
	case number:
		o["options"] = object{"reduceOptions": object{"calcs": []string{"lastNotNull"}}, "colorMode": "value", "graphMode": "none"}
		defaults["thresholds"] = p.thresholds()
	case lines:
		o["options"] = object{"legend": object{"displayMode": "table", "placement": "bottom", "calcs": []string{"mean", "max"}},
			"tooltip": object{"mode": "multi", "sort": "desc"}}
		custom := object{"fillOpacity": 10, "showPoints": "never"}
		if p.stacked {
			custom["stacking"], custom["fillOpacity"] = object{"mode": "normal"}, 30
		}
		defaults["custom"], defaults["min"] = custom, 0
	case table:
		names := object{}
		for i, name := range p.labels {
			names[name] = p.labelColumns[i]
		}
		for i, q := range p.queries {
			if len(p.queries) == 1 {
				names["Value"] = q.legend
			}
			names["Value #"+ref(i)] = q.legend
			overrides = append(overrides, object{"matcher": object{"id": "byName", "options": q.legend},
				"properties": []object{{"id": "unit", "value": q.unit}}})
		}
		o["transformations"] = []object{{"id": "merge", "options": object{}},
			{"id": "organize", "options": object{"excludeByName": object{"Time": true}, "renameByName": names}}}
		o["options"] = object{"showHeader": true}
	}
	o["fieldConfig"] = object{"defaults": defaults, "overrides": overrides}
	return o
}

func (p panel) targets() (list []object) {
	for i, q := range p.queries {
		t := object{"refId": ref(i), "expr": q.expr, "legendFormat": q.legend, "datasource": source}
		if p.kind != lines {
			t["instant"], t["range"] = true, false
		}
		if p.kind == table {
			t["format"] = "table"
		}
		list = append(list, t)
	}
	return list
}

func ref(i int) string { return string(rune('A' + i)) }

func (p panel) thresholds() object {
	steps := []object{{"color": "text", "value": nil}}
	switch {
	case p.redAbove != 0:
		steps = append(steps, object{"color": "red", "value": p.redAbove})
	case p.redBelow != 0:
		steps = []object{{"color": "red", "value": nil}, {"color": "text", "value": p.redBelow}}
	}
	return object{"mode": "absolute", "steps": steps}
}
