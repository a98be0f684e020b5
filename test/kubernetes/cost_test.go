// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// startTimes are how long containerd took to create and start each container, from its log.
func startTimes(t *testing.T) map[string]time.Duration {
	t.Helper()
	text, err := os.ReadFile(lab.path("log/containerd.log"))
	if err != nil {
		t.Fatal(err)
	}
	begun, took := map[string]time.Time{}, map[string]time.Duration{}
	for _, m := range regexp.MustCompile(`(?m)^time="([^"]+)" level=info msg="StartContainer for \\"([0-9a-f]+)\\"( returns successfully)?"`).
		FindAllStringSubmatch(string(text), -1) {
		at, err := time.Parse(time.RFC3339Nano, m[1])
		if err != nil {
			t.Fatal(err)
		}
		if m[3] == "" {
			begun[m[2]] = at
		} else {
			took[m[2]] = at.Sub(begun[m[2]])
		}
	}
	return took
}

var rounds = flag.Int("rounds", 5, "of TestCost; 21 for figures")

// What it costs: one pod after the other, of four kinds by turns. Figures are printed, not judged, but for gross ones: time
// on a shared machine proves little.
func TestCost(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	kinds := []struct {
		name     string
		manifest func(name string) string
	}{
		{"runc", func(name string) string {
			return podOf(name, "", `containers: [{name: c, image: "localhost/probe:cgpu", command: [sleep, "1000"]}]`)
		}},
		{"cgpu, no GPU", func(name string) string {
			return pod(name, `containers: [{name: c, image: "localhost/probe:cgpu", command: [sleep, "1000"]}]`)
		}},
		{"cgpu, claim", func(name string) string {
			return claim(name, "1Gi", "") + "\n---\n" + pod(name, withClaim(name, "sleep 1000"))
		}},
		{"cgpu, gpu-mem", func(name string) string { return pod(name, withMemory(1, "sleep 1000")) }},
	}
	ids := map[string][]string{}
	for i := range *rounds {
		for k, kind := range kinds {
			name := fmt.Sprintf("p%d-%d", i, k)
			s.apply(kind.manifest(name))
			s.reaches(name, corev1.PodRunning)
			id := strings.TrimPrefix(s.get(name).Status.ContainerStatuses[0].ContainerID, "containerd://")
			ids[kind.name] = append(ids[kind.name], id)
			s.kubectl("delete", "pod", name, "--force", "--wait=false")
		}
	}
	took := startTimes(t)
	medians := map[string]time.Duration{}
	tell := func(what string, all []time.Duration) {
		slices.Sort(all)
		medians[what] = all[len(all)/2]
		t.Logf("%-28s median %v, least %v, of %d", what+":", all[len(all)/2].Round(100*time.Microsecond),
			all[0].Round(100*time.Microsecond), len(all))
	}
	for _, kind := range kinds {
		var all []time.Duration
		for _, id := range ids[kind.name] {
			all = append(all, took[id])
		}
		tell(kind.name, all)
	}
	for kind, all := range startsBeside(t, *rounds) {
		tell("without a pod, "+kind, all)
	}
	for _, kind := range []string{"runc", "none", "share"} {
		if medians["without a pod, "+kind] == 0 {
			t.Errorf("no start without a pod: %s", kind)
		}
	}
	if medians["cgpu, claim"] > medians["runc"]+3*time.Second {
		t.Errorf("a share costs %v", medians["cgpu, claim"]-medians["runc"])
	}
	for _, line := range prepareTimes(t) {
		t.Log(line)
	}
	t.Logf("memory of cgpu-agent: %s", agentMemory(t))
}

// startsBeside are how long starts of containers took around which no pod is, by kind.
func startsBeside(t *testing.T, rounds int) map[string][]time.Duration {
	t.Helper()
	script, err := filepath.Abs("beside.sh")
	if err != nil {
		t.Fatal(err)
	}
	out := lab.must(t, "exec", "env", "PATH="+lab.path("bin")+":"+os.Getenv("PATH"),
		script, lab.path("images/probe.tar"), lab.path("run/runc"), "/opt/cgpu/bin/cgpu-runtime", strconv.Itoa(rounds))
	starts := map[string][]time.Duration{}
	for line := range strings.Lines(out) {
		kind, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		took, err := time.ParseDuration(text + "ms")
		if err != nil {
			t.Fatalf("%q: %v\n%s", line, err, out)
		}
		starts[kind] = append(starts[kind], took)
	}
	return starts
}

// prepareTimes are what the kubelet measured of its calls to the driver.
func prepareTimes(t *testing.T) []string {
	t.Helper()
	metrics, err := lab.kubectl("", "get", "--raw", "/api/v1/nodes/"+nodeName+"/proxy/metrics")
	if err != nil {
		t.Fatal(err)
	}
	value := func(name, method string) float64 {
		m := regexp.MustCompile(`(?m)^dra_grpc_operations_duration_seconds_` + name + `\{[^}]*` + method + `"[^}]*\} (\S+)$`).
			FindStringSubmatch(metrics)
		if m == nil {
			return 0
		}
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	var lines []string
	for _, method := range []string{"NodePrepareResources", "NodeUnprepareResources"} {
		sum, count := value("sum", method), value("count", method)
		if count == 0 {
			t.Errorf("the kubelet has no time of %s", method)
			continue
		}
		lines = append(lines, fmt.Sprintf("%s: %.1f ms on average of %.0f calls, %.0f of them above 100 ms", method, 1000*sum/count, count,
			count-value("bucket", method+`"[^}]*le="0.1`)))
	}
	return lines
}
