// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/opencgpu/cgpu/pkg/exporter"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

const exporterToken = "0123456789abcdef"

// exporting runs cgpu exporter until the test's end, and has its address.
func exporting(t *testing.T) (address, tokenFile string) {
	t.Helper()
	tokenFile = filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(tokenFile, []byte(exporterToken), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(lab.Bin, "cgpu"), "exporter", "--listen", "127.0.0.1:0", "--token-file", tokenFile)
	cmd.Env = append(os.Environ(), "CGPU_RUN_DIR="+lab.RunDir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("cgpu exporter: %v", err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line[strings.LastIndexByte(line, ' ')+1 : len(line)-1], tokenFile
}

type samples map[string]*dto.MetricFamily

// scrape reads the exporter as Prometheus does, later than what it remembers.
func scrape(t *testing.T, address string) samples {
	t.Helper()
	time.Sleep(exporter.Fresh)
	r, err := http.NewRequest("GET", "http://"+address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+exporterToken)
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatal(answer.Status, err)
	}
	return families
}

// of is the sum of a family's series with a label; NaN where there is none. An empty label is every series'.
func (s samples) of(name, label, value string) float64 {
	sum, found := 0.0, false
	for _, m := range s[name].GetMetric() {
		has := label == ""
		for _, l := range m.GetLabel() {
			has = has || l.GetName() == label && l.GetValue() == value
		}
		if has {
			found = true
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	if !found {
		return math.NaN()
	}
	return sum
}

// TestMetrics: what the exporter tells of a container is what cgpu smi shows; a guard's kill and a container's end lose no count.
func TestMetrics(t *testing.T) {
	noTrace(t)
	gpus(t)
	address, _ := exporting(t)
	before := max(0, scrape(t, address).of("cgpu_gpu_denied_allocations_total", "", ""))
	id := container{name: "counted", env: sizeOf("128MiB"), cmd: []string{"cgpu-probe", "hold", "64MiB"}}.ready(t)
	for range 3 {
		wantRefused(t, execIn(id, "cgpu-probe", "alloc", "65MiB"), noMemory)
	}
	var s samples
	of := func(name string) float64 { return s.of("cgpu_container_"+name, "container", "counted") }
	eventually(t, 30*time.Second, func() string { // a guard is waited for only a moment
		s = scrape(t, address)
		if v := smiOf(t, id); of("memory_used_bytes") != float64(v.Used) || of("memory_limit_bytes") != float64(v.Limit) ||
			of("denied_allocations_total") != 3 ||
			of("guard_up") != 1 || of("trapped_calls_total") < 1 || s.of("cgpu_container_info", "container_id", id) != 1 ||
			s.of("cgpu_container_info", "id", id[:12]) != 1 {
			return fmt.Sprintf("%v, cgpu smi %+v", s["cgpu_container_info"], v)
		}
		return ""
	})
	killGuard(t, id)
	s = scrape(t, address)
	if of("guard_up") != 0 || of("denied_allocations_total") != 3 || !math.IsNaN(of("memory_used_bytes")) {
		t.Errorf("without a guard: up %v, %v denied, %v used", of("guard_up"), of("denied_allocations_total"), of("memory_used_bytes"))
	}
	docker(t, "rm", "-f", id)
	cgpu(t, "gc")
	// Nobody scrapes while this one lives.
	wantRefused(t, container{env: sizeOf("128MiB"), cmd: []string{"cgpu-probe", "alloc", "129MiB"}}.try(t), noMemory)
	eventually(t, 5*time.Second, func() string {
		if s = scrape(t, address); s.of("cgpu_gpu_denied_allocations_total", "", "") != before+4 || s["cgpu_container_info"] != nil {
			return fmt.Sprintf("%v denied, want %v; %v", s.of("cgpu_gpu_denied_allocations_total", "", ""), before+4, s["cgpu_container_info"])
		}
		return ""
	})
}

// TestMetricsTime: GPU seconds are the driver's own, within a hundredth.
func TestMetricsTime(t *testing.T) {
	simOnly(t)
	noTrace(t)
	address, _ := exporting(t)
	gpu := newLanes(t).take(t)
	begin := time.Now()
	id, other := busy(t, on(gpu)), busy(t, on(gpu))
	time.Sleep(3 * time.Second)
	for _, c := range []string{id, other} { // so that it is the same number now and then
		cgpu(t, "pause", c)
	}
	var last float64
	eventually(t, 10*time.Second, func() string {
		got := scrape(t, address).of("cgpu_container_gpu_seconds_total", "id", id[:12])
		want := spentBy(t, gpu, id).gpuTime[0].Seconds()
		last = got
		if paused := scrape(t, address).of("cgpu_container_info", "paused", "true"); paused != 2 {
			return fmt.Sprintf("%v are paused", paused)
		}
		if math.Abs(got-want) > want/100 || want < 0.1 {
			return fmt.Sprintf("%v s, the driver says %v", got, want)
		}
		return ""
	})
	var s samples
	var entitled, waiting, throttled float64
	eventually(t, 10*time.Second, func() string { // the series are made once a second
		s = scrape(t, address)
		of := func(what string) float64 { return s.of("cgpu_container_gpu_"+what+"_seconds_total", "id", id[:12]) }
		if entitled, waiting, throttled = of("entitled"), of("waiting"), of("throttled"); throttled > 0 {
			return ""
		}
		return fmt.Sprintf("%v throttled by a pause", throttled)
	})
	if lived := time.Since(begin).Seconds(); entitled < last/2 || entitled > lived || waiting < last/10 {
		t.Errorf("of two alike one had %v s of %v: %v entitled, %v waited", last, lived, entitled, waiting)
	}
	docker(t, "rm", "-f", id, other)
	s = scrape(t, address)
	for what, had := range map[string]float64{"": last, "entitled_": entitled, "waiting_": waiting, "throttled_": throttled} {
		if got := s.of("cgpu_gpu_"+what+"seconds_total", "index", strconv.Itoa(gpu)); got < had {
			t.Errorf("%v s %safter the containers' end, one had %v", got, what, had)
		}
	}
}

// TestPrometheus: a real one takes every series, and has the values.
func TestPrometheus(t *testing.T) {
	program := os.Getenv("CGPU_PROMETHEUS")
	if program == "" {
		testenv.Skip(t, "CGPU_PROMETHEUS is not set; test/prometheus/build.sh builds one, in 10 to 20 minutes, and prints its path")
	}
	noTrace(t)
	gpus(t)
	address, token := exporting(t)
	container{name: "scraped", env: sizeOf("128MiB"), cmd: []string{"cgpu-probe", "hold", "64MiB"}}.ready(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	own := l.Addr().String()
	l.Close()
	dir := t.TempDir()
	config := fmt.Sprintf(`{global: {scrape_interval: 1s}, scrape_configs: [{job_name: cgpu, authorization: {credentials_file: %q}, static_configs: [{targets: [%q]}]}]}`, token, address)
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--config.file", filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path", filepath.Join(dir, "data"),
		"--web.listen-address", own, "--log.level", "warn")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}()
	want := scrape(t, address)
	n := 0
	for _, f := range want {
		n += len(f.GetMetric())
	}
	for q, value := range map[string]float64{
		`up{job="cgpu"}`: 1,
		`cgpu_container_memory_used_bytes{container="scraped"}`: want.of("cgpu_container_memory_used_bytes",
			"container", "scraped"),
		`cgpu_container_memory_used_bytes * on (id, gpu) group_left (weight) cgpu_container_info`: want.of("cgpu_container_memory_used_bytes",
			"container", "scraped"),
		`scrape_samples_scraped{job="cgpu"} == bool scrape_samples_post_metric_relabeling`: 1,
		fmt.Sprintf(`count({__name__=~"cgpu_.+"}) == bool %d`, n):                          1,
		`count(count by (gpu) (cgpu_gpu_memory_bytes))`:                                    float64(len(gpus(t))),
	} {
		eventually(t, 30*time.Second, func() string {
			if got, text := query(own, q); got != value {
				return fmt.Sprintf("%s: %v, want %v: %s", q, got, value, text)
			}
			return ""
		})
	}
}

// query asks Prometheus for one number.
func query(address, q string) (float64, string) {
	answer, err := http.Get("http://" + address + "/api/v1/query?query=" + url.QueryEscape(q))
	if err != nil {
		return math.NaN(), err.Error()
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	var v struct {
		Data struct {
			Result []struct{ Value [2]any }
		}
	}
	if json.Unmarshal(text, &v) != nil || len(v.Data.Result) != 1 {
		return math.NaN(), string(text)
	}
	number, _ := strconv.ParseFloat(fmt.Sprint(v.Data.Result[0].Value[1]), 64)
	return number, string(text)
}
