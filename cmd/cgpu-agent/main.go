// SPDX-License-Identifier: Apache-2.0

// Cgpu-agent runs on each GPU node of a Kubernetes cluster, as a DaemonSet or as a service of the node: it offers the node's
// GPUs to pods in shares, by a DRA driver, a device plugin or both, and tells the API server how the node is.
//
// It is the only program of cgpu that links Kubernetes' libraries, and containers do not need it to live: see
// docs/internals/agent.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/opencgpu/cgpu/pkg/agent"
	"github.com/opencgpu/cgpu/pkg/device"
)

var version = "unknown" // set by the linker

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := command(ctx, os.Args[1:]); err != nil {
		text := strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", " ")
		fmt.Fprintln(os.Stderr, "cgpu-agent:", strings.TrimPrefix(text, "cgpu-agent: "))
		if _, usage := errors.AsType[usageError](err); usage {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

// usageError is a command line that cannot be understood; exit status 2.
type usageError struct{ error }

// command does what the arguments say.
func command(ctx context.Context, args []string) error {
	f, rest, err := readFlags(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		printHelp(os.Stdout)
		return nil
	case err != nil:
		return usageError{err}
	case f.version:
		fmt.Println("cgpu-agent version", version)
		return nil
	case len(rest) > 0 && rest[0] == healthyName:
		return healthy(f, rest[1:])
	case len(rest) > 0 && rest[0] == nodeLabelName:
		return labelNode(ctx, f, rest[1:])
	case len(rest) > 0:
		return usageError{fmt.Errorf("%q: want no arguments; see cgpu-agent --help", rest[0])}
	}
	s, err := settingsOf(f)
	if err != nil {
		return usageError{err}
	}
	return run(ctx, s)
}

// run connects the parts and is the agent until ctx ends.
func run(ctx context.Context, s settings) error {
	log := logger(s.logFormat, os.Stderr)
	klog.SetSlogLogger(log)
	boundMemory()
	client, err := connect(s.kubeconfig, ownPace)
	if err != nil {
		return err
	}
	log.Info("starts", "version", version, "node", s.node, "frontends", strings.Join(s.frontEnds, ","))
	division := divisionOf(s)
	pods := agent.NewPods(client, s.node, s.names, log)
	err = agent.Run(ctx, agent.Options{Node: s.node, Client: client, RunDir: device.RunDir(), Pods: pods,
		FrontEnds: frontEnds(s, client, pods, division, log), Division: division, Health: s.health,
		Probe: agent.ProbeSocket(s.node, s.podUID), SMI: s.smi, Web: s.web, Version: version, Log: log})
	if err == nil {
		log.Info("ends; containers that run are not touched")
	}
	return err
}

func logger(format string, w *os.File) *slog.Logger {
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, nil))
	}
	return slog.New(slog.NewTextHandler(w, nil))
}

// hostName is the name under which the kubelet registers a node when it is told no other.
func hostName() (string, error) {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "", errors.New("--node-name: the host has no name: set it, in a pod from spec.nodeName")
	}
	return strings.ToLower(name), nil
}

// absolute refuses a path that would depend on where the agent was started.
func absolute(flag, path string) (string, error) {
	if path == "" && flag == "hook" {
		return "", nil
	}
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("--%s %q: want an absolute path", flag, path)
	}
	return filepath.Clean(path), nil
}
