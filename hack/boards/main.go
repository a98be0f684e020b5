// SPDX-License-Identifier: Apache-2.0

// Boards writes what Grafana and Prometheus are given: dashboards, from the panels in dashboards.go, and copies of the rules.
//
//	go run ./hack/boards
package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Folders below deploy.
const (
	component = "components/observability"
	chart     = "helm/cgpu/files"
)

func main() {
	if err := run("deploy"); err != nil {
		fmt.Fprintln(os.Stderr, "boards:", err)
		os.Exit(1)
	}
}

// run writes every file.
func run(deploy string) error {
	files, err := generate(deploy)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(deploy, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(files[name]), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// generate makes the files by their names below deploy. What kustomize and helm read must be in their own folders, so there are copies.
func generate(deploy string) (map[string]string, error) {
	rules, err := os.ReadFile(filepath.Join(deploy, component, "rules.yaml"))
	if err != nil {
		return nil, err
	}
	files := map[string]string{
		component + "/prometheusrule.yaml": prometheusRule(string(rules)),
		chart + "/rules.yaml":              string(rules),
	}
	for _, d := range dashboards {
		var text strings.Builder
		e := json.NewEncoder(&text)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false) // queries stay readable
		if err := e.Encode(d.grafana()); err != nil {
			return nil, fmt.Errorf("%s: %w", d.name, err)
		}
		for _, folder := range []string{component, chart} {
			files[folder+"/dashboards/"+d.name+".json"] = text.String()
		}
	}
	return files, nil
}

// prometheusRule puts the rules into an object of Prometheus' operator.
func prometheusRule(rules string) string {
	var b strings.Builder
	b.WriteString(`# Made of rules.yaml by go run ./hack/boards.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: cgpu
  namespace: cgpu-system
spec:
`)
	_, groups, _ := strings.Cut(rules, "\ngroups:\n")
	for line := range strings.Lines("groups:\n" + groups) {
		if line != "\n" {
			line = "  " + line
		}
		b.WriteString(line)
	}
	return b.String()
}
