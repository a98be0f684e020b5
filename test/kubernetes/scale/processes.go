// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cluster is a running control plane of test/kubernetes/k8s.sh, in control-plane mode.
type cluster struct {
	dir  string // CGPU_K8S_DIR
	port int    // PORT_BASE
	http *http.Client
}

func newCluster(dir string, port int) cluster {
	// The certificates of the control plane are made by itself at each start, on this machine.
	return cluster{dir: dir, port: port,
		http: &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}}
}

func (c cluster) kubeconfig(user string) string {
	return filepath.Join(c.dir, "run", user+".kubeconfig")
}
func (c cluster) schedulerURL() string { return fmt.Sprintf("https://127.0.0.1:%d", c.port+8) }

// scheduler starts a kube-scheduler in place of k8s.sh's, which must be stopped: with a client that is not held back, and with
// its profiles open to this program. percent is percentageOfNodesToScore; 0: the scheduler's own choice.
func (c cluster) scheduler(qps, parallelism, percent int, gates string) (*exec.Cmd, error) {
	path := filepath.Join(c.dir, "run", "scale-scheduler.yaml")
	text := fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: %q, qps: %d, burst: %d, contentType: application/vnd.kubernetes.protobuf}
leaderElection: {leaderElect: false}
parallelism: %d
`, c.kubeconfig("scheduler"), qps, 2*qps, parallelism)
	if percent > 0 {
		text += fmt.Sprintf("percentageOfNodesToScore: %d\n", percent)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(c.dir, "log", "scale-scheduler.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	args := []string{"--config=" + path, "--secure-port=" + strconv.Itoa(c.port+8), "--bind-address=127.0.0.1",
		"--cert-dir=" + filepath.Join(c.dir, "pki", "scale-scheduler"), "--authentication-tolerate-lookup-failure",
		"--authorization-always-allow-paths=/readyz,/metrics,/debug/pprof/*"}
	if gates != "" {
		args = append(args, "--feature-gates="+gates)
	}
	cmd := exec.Command(filepath.Join(c.dir, "bin", "kube-scheduler"), args...)
	cmd.Stdout, cmd.Stderr = log, log
	// It ends with this program, however that ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		if _, err = c.get(context.Background(), c.schedulerURL()+"/readyz"); err == nil {
			return cmd, nil
		}
		if time.Now().After(deadline) {
			_ = cmd.Process.Kill()
			return nil, fmt.Errorf("kube-scheduler: is not ready after a minute; log: %s: %w", log.Name(), err)
		}
	}
}

func (c cluster) get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, resp.Status)
	}
	return body, err
}

// profile writes a CPU profile of the scheduler.
func (c cluster) profile(ctx context.Context, seconds int, path string) error {
	body, err := c.get(ctx, fmt.Sprintf("%s/debug/pprof/profile?seconds=%d", c.schedulerURL(), seconds))
	if err != nil {
		return err
	}
	return os.WriteFile(path, body, 0o644)
}

// pid of a component that k8s.sh started.
func (c cluster) pid(name string) (int, error) {
	text, err := os.ReadFile(filepath.Join(c.dir, "run", "pid", name))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// usage is what a process has used.
type usage struct {
	CPU time.Duration // user and system, since its start
	RSS uint64        // bytes, now
}

func usageOf(pid int) (u usage, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u, err
	}
	// Behind the name, which may have spaces: the state is field 3, utime 14, stime 15, rss 24.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	number := func(field int) uint64 { n, _ := strconv.ParseUint(fields[field-3], 10, 64); return n }
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux that Go runs on
	return usage{CPU: time.Duration(number(14)+number(15)) * tick, RSS: number(24) * uint64(os.Getpagesize())}, nil
}

// metrics are the samples of a component, by name with labels.
func metrics(text []byte) map[string]float64 {
	m := map[string]float64{}
	lines := bufio.NewScanner(strings.NewReader(string(text)))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			if v, err := strconv.ParseFloat(line[i+1:], 64); err == nil {
				m[line[:i]] = v
			}
		}
	}
	return m
}

// etcdSize is what etcd has on disk, and what of that is in use.
func (c cluster) etcdSize(ctx context.Context) (total, inUse uint64, err error) {
	text, err := c.get(ctx, fmt.Sprintf("http://127.0.0.1:%d/metrics", c.port))
	if err != nil {
		return 0, 0, err
	}
	m := metrics(text)
	return uint64(m["etcd_mvcc_db_total_size_in_bytes"]), uint64(m["etcd_mvcc_db_total_size_in_use_in_bytes"]), nil
}
