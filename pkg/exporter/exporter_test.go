// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/tally"
)

var update = flag.Bool("update", false, "write the golden files anew")

func value(v float64) *float64 { return &v }
func number(v uint64) *uint64  { return &v }

// full is a node on which there is every series.
func full(t testing.TB) *Exporter {
	n := newNode(t)
	n.container(id(1), "default/train-0/main", gpu0, gpu1)
	n.container(id(2), "web", gpu0)
	n.container(id(3), "", gpu0)
	n.records[1].VGPUs[0].Spill, n.records[1].VGPUs[0].Percent, n.records[1].Paused = 1<<30, 50, true
	n.records[2].Control += ".gone" // nobody answers there
	n.write()
	n.table.Driver = device.DriverNVIDIA
	must(t, n.table.Save(n.dir))
	_, _, err := health.Change(n.dir, func(s health.State) health.State {
		return s.Step(&n.table, health.Seen{Hardware: map[string]device.Hardware{gpu0: {NewXids: []uint64{79}}, gpu1: {}}}, time.Now())
	})
	must(t, err)
	c := New(Options{RunDir: n.dir, Version: "v1", Hardware: func() (map[string]device.Hardware, error) {
		return map[string]device.Hardware{gpu0: {Temperature: value(41), Power: value(70.5), Corrected: number(3), Uncorrected: number(1),
			Xids: number(2)}}, nil
	}})
	return c
}

// TestSeries: the whole text of a node.
func TestSeries(t *testing.T) {
	got := scrape(t, full(t))
	lines := strings.Split(got, "\n")
	for i, line := range lines { // what the machine says, not the node
		for _, name := range []string{"cgpu_guards_resident_memory_bytes "} {
			if strings.HasPrefix(line, name) {
				lines[i] = name + "…"
			}
		}
	}
	got = strings.Join(lines, "\n")
	const path = "testdata/metrics.txt"
	if *update {
		must(t, os.MkdirAll("testdata", 0o755))
		must(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	must(t, err)
	if string(want) != got {
		t.Errorf("%s differs; go test ./pkg/exporter -update writes it anew:\n%s", path, got)
	}
	for _, s := range all {
		if !strings.Contains(got, "\n"+s.name+"{") && !strings.Contains(got, "\n"+s.name+" ") {
			t.Errorf("%s: is not in %s", s.name, path)
		}
	}
}

// TestLint: names and units are as promtool wants them.
func TestLint(t *testing.T) {
	problems, err := promlint.New(strings.NewReader(scrape(t, full(t)))).Lint()
	must(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if problems, err := testutil.GatherAndLint(full(t)); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

// TestDocs: docs/metrics.md has every series, in the words of the code.
func TestDocs(t *testing.T) {
	const path, begin, end = "../../docs/metrics.md", "<!-- series -->\n", "<!-- end -->\n"
	text, err := os.ReadFile(path)
	must(t, err)
	before, rest, found := strings.Cut(string(text), begin)
	_, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s: has no %q and %q", path, begin, end)
	}
	got := before + begin + tables() + end + after
	if *update {
		must(t, os.WriteFile(path, []byte(got), 0o644))
	} else if got != string(text) {
		t.Errorf("%s is not what the code says; go test ./pkg/exporter -update writes it anew", path)
	}
}

func tables() string {
	var b strings.Builder
	for i, title := range []string{"Of the node", "Of each GPU", "Of each container on a GPU", "Of each container"} {
		fmt.Fprintf(&b, "\n### %s\n\n", title)
		if labels := scopeLabels[scope(i)]; labels != nil {
			fmt.Fprintf(&b, "Labels: `%s`.\n\n", strings.Join(labels, "`, `"))
		}
		b.WriteString("| series | type | labels | meaning |\n|---|---|---|---|\n")
		for _, s := range all {
			if s.of == scope(i) {
				more := ""
				if len(s.labels) > 0 {
					more = "`" + strings.Join(s.labels, "`, `") + "`"
				}
				kind := strings.ToLower(s.kind.String())
				fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", s.name, kind, more, s.help)
			}
		}
	}
	b.WriteString("\n")
	return b.String()
}

// series parses a scrape as Prometheus does, and has the number of series by the labels id and gpu.
func parsed(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	must(t, err)
	return families
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// TestFew: a vGPU has twelve series at most, with those of its container.
func TestFew(t *testing.T) {
	count := map[string]int{}
	for _, f := range parsed(t, scrape(t, full(t))) {
		for _, m := range f.GetMetric() {
			if label(m, "gpu") == gpu0 || label(m, "gpu") == "" {
				count[label(m, "id")]++
			}
		}
	}
	for id, n := range count {
		if id != "" && n > 12 {
			t.Errorf("%s has %d series", id, n)
		}
	}
	if len(count) != 4 {
		t.Errorf("%v", count)
	}
}

// TestAbsent: what is not known is not zero.
func TestAbsent(t *testing.T) {
	n := newNode(t)
	n.records = []ledger.Record{{ID: "a", Nonce: strings.Repeat("a", 16), Native: []string{gpu0}}}
	n.write()
	got := scrape(t, New(Options{RunDir: n.dir, Hardware: func() (map[string]device.Hardware, error) { // the simulated driver has none
		return map[string]device.Hardware{gpu0: {Temperature: value(0)}}, nil
	}}))
	for _, name := range []string{"cgpu_gpu_temperature", "cgpu_gpu_power", "cgpu_gpu_ecc", "cgpu_gpu_xid", "cgpu_nvml_up",
		"cgpu_gpu_seconds_total",
		"cgpu_container_memory", "cgpu_container_gpu_", "cgpu_container_denied", "cgpu_container_trapped"} {
		if strings.Contains(got, name) {
			t.Errorf("%s is there:\n%s", name, got)
		}
	}
	for _, want := range []string{"cgpu_up 1\n", `native="true"`, `cgpu_gpu_slots_free{gpu="` + gpu0 + `",index="0"} 0`,
		"cgpu_container_guard_up{"} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is missing:\n%s", want, got)
		}
	}
	got = scrape(t, New(Options{RunDir: t.TempDir()}))
	if !strings.Contains(got, "cgpu_up 0\n") || strings.Contains(got, "cgpu_containers") {
		t.Errorf("without a node: %s", got)
	}
}

// TestHostile: names that tenants choose make one short value of valid text each, and no two series alike.
func TestHostile(t *testing.T) {
	n := newNode(t)
	evil := "a\"} 1\nevil_total{x=\"\\\xff\xfe\u202e\x1b[2J" + strings.Repeat("€", 1000)
	n.container(id(1), evil, gpu0)
	n.container(id(1), evil, gpu0) // another root's
	n.container("web", "a/b/c", gpu0)
	n.container("web", "a/b/c", gpu0)
	n.container("web/"+evil, "/x//", gpu0)
	n.container("other", "web", gpu0)
	families := parsed(t, scrape(t, New(Options{RunDir: n.dir})))
	if families["evil_total"] != nil || len(families["cgpu_container_info"].GetMetric()) != 6 {
		t.Errorf("%v", families["cgpu_container_info"])
	}
	ids := map[string]bool{}
	for _, m := range families["cgpu_container_info"].GetMetric() {
		if ids[label(m, "id")] {
			t.Errorf("two have the id %q", label(m, "id"))
		}
		ids[label(m, "id")] = true
		for _, l := range m.GetLabel() {
			if len(l.GetValue()) > maxLabel+20 || !utf8.ValidString(l.GetValue()) || strings.ContainsAny(l.GetValue(), "\n\x1b\u202e") {
				t.Errorf("%s=%q", l.GetName(), l.GetValue())
			}
		}
	}
	if !ids["web"] || !ids["000000000001"] {
		t.Errorf("%v", ids)
	}
}

// TestEnded: what a container had that ended between two scrapes is in the GPU's counters, and in none twice.
func TestEnded(t *testing.T) {
	n := newNode(t)
	n.container(id(1), "", gpu0)
	c := New(Options{RunDir: n.dir})
	now := time.Now()
	c.now = func() time.Time { return now }
	total := func() float64 {
		now = now.Add(time.Minute)
		all := parsed(t, scrape(t, c))
		of := func(name string) float64 { return all[name].GetMetric()[0].GetCounter().GetValue() }
		waiting, throttled, entitled := of("cgpu_gpu_waiting_seconds_total"), of("cgpu_gpu_throttled_seconds_total"),
			of("cgpu_gpu_entitled_seconds_total")
		if waiting != 10*throttled || entitled != 8*throttled || waiting*6 != of("cgpu_gpu_seconds_total")*10 {
			t.Errorf("%v s waited, %v throttled, %v entitled", waiting, throttled, entitled)
		}
		return of("cgpu_gpu_seconds_total")
	}
	if got := total(); got != 1.5 {
		t.Fatalf("%v s", got)
	}
	f := n.container(id(2), "", gpu0) // never scraped while it lives
	f.Release()
	n.records = n.records[:1]
	n.write()
	for range 2 {
		must(t, tally.Fold(n.dir))
		if got := total(); got != 3 {
			t.Errorf("%v s after the second container's end", got)
		}
	}
}

// TestWork: a scrape asks each guard once, and nobody if there was one a moment ago.
func TestWork(t *testing.T) {
	n := newNode(t)
	for i := range 10 {
		n.container(id(i), "", gpu0, gpu1)
	}
	c := New(Options{RunDir: n.dir})
	now := time.Now()
	c.now = func() time.Time { return now }
	for i, want := range []int64{10, 10, 20} {
		scrape(t, c)
		if got := n.asked.Load(); got != want {
			t.Errorf("scrape %d: %d questions, want %d", i, got, want)
		}
		now = now.Add(Fresh * 6 / 10)
	}
}

// TestDescribe: the table has each name once, and labels in an order that does not depend on a map's.
func TestDescribe(t *testing.T) {
	var names []string
	for _, s := range all {
		names = append(names, s.name)
		if !strings.HasSuffix(s.help, ".") {
			t.Errorf("%s: %q: want a sentence", s.name, s.help)
		}
	}
	slices.Sort(names)
	if len(slices.Compact(names)) != len(all) {
		t.Error("a name is there twice")
	}
	if device.EnforceGuard == device.EnforcePreload {
		t.Error("labels have no meaning")
	}
}

// BenchmarkScrape: 64 vGPUs on one node.
func BenchmarkScrape(b *testing.B) {
	n := newNode(b)
	for i := range 64 {
		n.container(id(i), fmt.Sprintf("default/train-%d/main", i), []string{gpu0, gpu1}[i%2])
	}
	c := New(Options{RunDir: n.dir})
	now := time.Now()
	c.now = func() time.Time { now = now.Add(time.Minute); return now }
	begin := cpu(b)
	for b.Loop() {
		must(b, c.Text(io.Discard))
	}
	b.ReportMetric(float64(cpu(b)-begin)/float64(b.N)/1e6, "cpu-ms/op") // of the guards that this test plays, too
}

// cpu is what this process has used, in nanoseconds.
func cpu(b *testing.B) int64 {
	var u unix.Rusage
	must(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return u.Utime.Nano() + u.Stime.Nano()
}
