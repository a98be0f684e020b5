// SPDX-License-Identifier: Apache-2.0

package observability

import (
	"os"
	"slices"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"sigs.k8s.io/yaml"
)

// TestObjects: Prometheus' operator knows every field, and a node's series have one name whoever scrapes them.
func TestObjects(t *testing.T) {
	const folder = "../../deploy/components/"
	var rule monitoring.PrometheusRule
	strict(t, folder+"observability/prometheusrule.yaml", &rule)
	if want := len(rulesOf(t, rulesFile)); len(rule.Spec.Groups) != want {
		t.Errorf("%d groups, want %d", len(rule.Spec.Groups), want)
	}
	var pods monitoring.PodMonitor
	strict(t, folder+"pod-monitor/podmonitor.yaml", &pods)
	checkRelabelings(t, pods.Spec.PodMetricsEndpoints[0].RelabelConfigs)
	var service monitoring.ServiceMonitor
	strict(t, folder+"service-monitor/servicemonitor.yaml", &service)
	checkRelabelings(t, service.Spec.Endpoints[0].RelabelConfigs)
}

// checkRelabelings: instance is the node, and the agent's own pod is not taken for the one that has a GPU.
func checkRelabelings(t *testing.T, list []monitoring.RelabelConfig) {
	t.Helper()
	if len(list) != 2 || list[0].TargetLabel != "instance" ||
		!slices.Equal(list[0].SourceLabels, []monitoring.LabelName{"__meta_kubernetes_pod_node_name"}) ||
		list[1].Action != "labeldrop" || list[1].Regex != "namespace|pod|container|service|endpoint" {
		t.Errorf("%+v", list)
	}
}

func strict(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	must(t, yaml.UnmarshalStrict(text, into))
}
