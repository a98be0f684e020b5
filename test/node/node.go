// SPDX-License-Identifier: Apache-2.0

// Package node drives the private node that hack/node.sh makes: a dockerd, a containerd, runc and crun with cgpu's
// configuration and run dir in one folder. The conformance suite (test/integration),
// the commands of the pages (test/docs) and the benchmark (test/bench) use it.
package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Node is one private node.
type Node struct {
	Dir    string // all of it, as given to hack/node.sh
	RunDir string // CGPU_RUN_DIR
	Bin    string // cgpu's binaries
	Driver string // "sim" or "nvidia"
	Script string // hack/node.sh
}

// FromEnv finds the node that hack/with-node.sh made for this process.
func FromEnv() (*Node, error) {
	n := &Node{
		Dir:    os.Getenv("CGPU_NODE"),
		RunDir: os.Getenv("CGPU_RUN_DIR"),
		Bin:    os.Getenv("CGPU_BIN"),
		Driver: os.Getenv("CGPU_TEST_DRIVER"),
	}
	if n.Dir == "" || n.RunDir == "" || n.Bin == "" {
		return nil, errors.New(`node: CGPU_NODE="": no private node: run through hack/with-node.sh (make integration)`)
	}
	dir, err := os.Getwd()
	if err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if script := filepath.Join(dir, "hack", "node.sh"); isFile(script) {
			n.Script = script
			return n, nil
		}
	}
	return nil, errors.New("node: hack/node.sh not found above the working folder")
}

// Main runs a package's tests on the node of FromEnv, which it puts into lab.
func Main(m *testing.M, lab **Node) {
	n, err := FromEnv()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	*lab = n
	os.Exit(m.Run())
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// Result is what a command printed and how it ended.
type Result struct {
	Args   []string
	Stdout string
	Stderr string
	Code   int // exit status; -1: killed by a signal or not started
	Took   time.Duration
}

// All is standard output and standard error together, for messages and for searching.
func (r Result) All() string { return r.Stdout + r.Stderr }

func (r Result) String() string {
	return fmt.Sprintf("%s: exit %d after %v\nstdout: %s\nstderr: %s",
		strings.Join(r.Args, " "), r.Code, r.Took.Round(time.Millisecond), r.Stdout, r.Stderr)
}

// Run runs a command with the node's environment plus env and waits for its end, at most two minutes.
func (n *Node) Run(env []string, args ...string) Result {
	return n.RunFor(2*time.Minute, env, args...)
}

// RunFor is Run with another limit of time.
func (n *Node) RunFor(limit time.Duration, env []string, args ...string) Result {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	// Files, not pipes: a detached container keeps what it was given, and a pipe would keep us waiting for its end.
	r := Result{Args: args, Code: -1}
	stdout, err := os.CreateTemp("", "stdout")
	if err != nil {
		r.Stderr = err.Error()
		return r
	}
	defer discard(stdout)
	stderr, err := os.CreateTemp("", "stderr")
	if err != nil {
		r.Stderr = err.Error()
		return r
	}
	defer discard(stderr)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	begin := time.Now()
	err = cmd.Run()
	r.Took = time.Since(begin)
	r.Stdout, r.Stderr = content(stdout), content(stderr)
	if cmd.ProcessState != nil {
		r.Code = cmd.ProcessState.ExitCode()
	}
	if err != nil && r.Code < 0 {
		r.Stderr += "\n" + err.Error()
	}
	return r
}

func content(f *os.File) string {
	text, err := os.ReadFile(f.Name())
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func discard(f *os.File) {
	f.Close()
	os.Remove(f.Name()) //nolint:errcheck // in the temporary folder
}

// Bundle makes an OCI bundle, or makes its config.json anew, with the probe image's files and `runc spec`'s config.json, changed by edit.
func (n *Node) Bundle(dir string, edit func(spec map[string]any)) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("node: bundle: %w", err)
	}
	path := filepath.Join(dir, "config.json")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("node: bundle: %w", err)
	}
	if r := n.Run(nil, "runc", "spec", "--bundle", dir); r.Code != 0 {
		return fmt.Errorf("node: bundle: %s", r)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("node: bundle: %w", err)
	}
	var spec map[string]any
	if err := json.Unmarshal(text, &spec); err != nil {
		return fmt.Errorf("node: bundle: %s: %w", path, err)
	}
	spec["root"] = map[string]any{"path": filepath.Join(n.Dir, "image", "rootfs"), "readonly": true}
	spec["process"].(map[string]any)["terminal"] = false
	edit(spec)
	if text, err = json.MarshalIndent(spec, "", "  "); err != nil {
		return fmt.Errorf("node: bundle: %w", err)
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return fmt.Errorf("node: bundle: %w", err)
	}
	return nil
}

// SetProcess gives a bundle's process its arguments and further environment.
func SetProcess(spec map[string]any, env []string, args ...string) {
	process := spec["process"].(map[string]any)
	process["args"] = args
	all := process["env"].([]any)
	for _, e := range env {
		all = append(all, e)
	}
	process["env"] = all
}
