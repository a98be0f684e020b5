// Cgpu-agent runs on each GPU node of a Kubernetes cluster, as a DaemonSet or as a service of the node: it offers the node's
// GPUs to pods in shares, by a DRA driver, a device plugin or both, and tells the API server how the node is.
//
// It is the only program of cgpu that links Kubernetes' libraries, and containers do not need it to live: see
// docs/internals/agent.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"
	"k8s.io/klog/v2"

	"github.com/opencgpu/cgpu/pkg/agent"
	"github.com/opencgpu/cgpu/pkg/device"
)

var version = "unknown" // set by the linker

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := app().RunContext(ctx, os.Args); err != nil {
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

func app() *cli.App {
	return &cli.App{
		Name:            "cgpu-agent",
		Usage:           "offers a node's GPUs to pods of Kubernetes, in shares",
		Version:         version,
		HideHelpCommand: true,
		Description: "The state of the node is below " + device.DefaultRunDir + " (CGPU_RUN_DIR names another folder). Containers that run\n" +
			"do not need the agent: it can be stopped and replaced at any time.",
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return usageError{err} },
		ExitErrHandler: func(*cli.Context, error) {}, // main prints and exits
		Flags:          flags(),
		Commands:       []*cli.Command{healthyCommand()},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usageError{fmt.Errorf("%q: want no arguments; see cgpu-agent --help", c.Args().First())}
			}
			s, err := settingsOf(c)
			if err != nil {
				return usageError{err}
			}
			return run(c.Context, s)
		},
	}
}

func flags() []cli.Flag {
	env := func(name string) []string { return []string{"CGPU_AGENT_" + name} }
	return []cli.Flag{
		&cli.StringFlag{Name: "node-name", EnvVars: append(env("NODE_NAME"), "NODE_NAME"), Usage: "`NAME` of this node in the cluster (default: the host's name)"},
		&cli.StringFlag{Name: "frontends", EnvVars: env("FRONTENDS"), Value: frontDRA, Usage: "`LIST` of dra, deviceplugin"},
		&cli.StringFlag{Name: "dra-gpus", EnvVars: env("DRA_GPUS"), Usage: "`LIST` of indices or UUIDs of GPUs for the DRA driver (default: all)"},
		&cli.StringFlag{Name: "deviceplugin-gpus", EnvVars: env("DEVICEPLUGIN_GPUS"), Usage: "`LIST` of indices or UUIDs of GPUs for the device plugin (default: all)"},
		&cli.StringFlag{Name: "memory-unit", EnvVars: env("MEMORY_UNIT"), Value: "GiB", Usage: "`UNIT` of aliyun.com/gpu-mem: GiB, MiB or a size such as 256MiB"},
		&cli.StringFlag{Name: "kubeconfig", EnvVars: append(env("KUBECONFIG"), "KUBECONFIG"), Usage: "`FILE` that tells how to reach the API server (default: as pods do)"},
		&cli.StringFlag{Name: "cdi-dir", EnvVars: env("CDI_DIR"), Value: "/var/run/cdi", Usage: "`FOLDER` from which the container runtime reads CDI specs"},
		&cli.StringFlag{Name: "kubelet-dir", EnvVars: env("KUBELET_DIR"), Value: "/var/lib/kubelet", Usage: "`FOLDER` of the kubelet"},
		&cli.StringFlag{Name: "hook", EnvVars: env("HOOK"), Usage: "`PATH` of cgpu-hook on the host (default: as the node table tells)"},
		&cli.StringFlag{Name: "health-address", EnvVars: env("HEALTH_ADDRESS"), Value: ":9470", Usage: "`ADDRESS` of /healthz, /readyz and /metrics; none: nowhere"},
		&cli.StringFlag{Name: "smi", EnvVars: env("SMI"), Value: "on", Usage: "on or off: whether /v1/smi answers there, for kubectl cgpu top; it tells names of containers, limits and use"},
		&cli.StringFlag{Name: "log-format", EnvVars: env("LOG_FORMAT"), Value: "text", Usage: "`FORMAT` of the lines on standard error: text or json"},
		&cli.StringFlag{Name: "pod-uid", EnvVars: append(env("POD_UID"), "POD_UID"), Usage: "`UID` of the agent's pod: two agents may then run side by side while a DaemonSet is updated"},
	}
}

// run connects the parts and is the agent until ctx ends.
func run(ctx context.Context, s settings) error {
	log := logger(s.logFormat, os.Stderr)
	klog.SetSlogLogger(log)
	boundMemory()
	client, err := connect(s.kubeconfig)
	if err != nil {
		return err
	}
	log.Info("starts", "version", version, "node", s.node, "frontends", strings.Join(s.frontEnds, ","))
	division := divisionOf(s)
	err = agent.Run(ctx, agent.Options{Node: s.node, Client: client, RunDir: device.RunDir(), FrontEnds: frontEnds(s, client, division, log), Division: division, Health: s.health, Probe: agent.ProbeSocket(s.node, s.podUID), SMI: s.smi, Version: version, Log: log})
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
