// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/deviceplugin"
)

// The flags are Go's own, and not those of the other programs: their library makes its help with text/template, which calls methods
// by name, and with that in a program Go's linker keeps every method of Kubernetes' types, 19 MB of them.

// option is a flag. Its value comes from the command line, or the first of its variables that is set, or is the one given here.
type option struct {
	name, metavar, usage, value string
	variables                   []string // beside CGPU_AGENT_NAME
}

var options = []option{
	{name: "node-name", metavar: "NAME", usage: "this node in the cluster (default: the host's name)", variables: []string{"NODE_NAME"}},
	{name: "frontends", metavar: "LIST", value: frontDRA,
		usage: "of dra, deviceplugin; or " + strings.Join(decision.Names(), ", ") + " alone: follows that scheduler"},
	{name: "dra-gpus", metavar: "LIST", usage: "of indices or UUIDs of GPUs for the DRA driver (default: all)"},
	{name: "deviceplugin-gpus", metavar: "LIST", usage: "of indices or UUIDs of GPUs for the device plugin (default: all)"},
	{name: "memory-resource", metavar: "NAME", usage: "what pods call the device plugin's memory, such as tencent.com/vcuda-memory",
		value: deviceplugin.ResourceMemory},
	{name: "percent-resource", metavar: "NAME", usage: "what they call its percentage, such as tencent.com/vcuda-core",
		value: deviceplugin.ResourcePercent},
	{name: "memory-unit", metavar: "UNIT", usage: "of aliyun.com/gpu-mem: GiB, MiB or a size such as 256MiB", value: "GiB"},
	{name: "kubeconfig", metavar: "FILE", usage: "that tells how to reach the API server (default: as pods do)",
		variables: []string{"KUBECONFIG"}},
	{name: "cdi-dir", metavar: "FOLDER", usage: "from which the container runtime reads CDI specs", value: "/var/run/cdi"},
	{name: "nri-socket", metavar: "PATH", usage: "of the container engine's NRI, for another scheduler", value: "/var/run/nri/nri.sock"},
	{name: "kubelet-dir", metavar: "FOLDER", usage: "of the kubelet", value: "/var/lib/kubelet"},
	{name: "hook", metavar: "PATH", usage: "of cgpu-hook on the host (default: as the node table tells)"},
	{name: "health-address", metavar: "ADDRESS", usage: "of /healthz, /readyz and /metrics; none: nowhere", value: ":9470"},
	{name: "smi", metavar: "on|off", usage: "whether names of containers, limits and use are told there: at /v1/smi, for kubectl cgpu " +
		"top, and in /metrics", value: "on"},
	{name: "web", metavar: "on|off", usage: "whether the page of cgpu web is there, at /web/, for kubectl port-forward", value: "off"},
	{name: "log-format", metavar: "FORMAT", usage: "of the lines on standard error: text or json", value: "text"},
	{name: "pod-uid", metavar: "UID", usage: "of the agent's pod: two agents may then run side by side while a DaemonSet is updated",
		variables: []string{"POD_UID"}},
}

// environment are the option's variables; the first that is set counts.
func (o option) environment() []string {
	return append([]string{"CGPU_AGENT_" + strings.ToUpper(strings.ReplaceAll(o.name, "-", "_"))}, o.variables...)
}

// flags are the values of a command line.
type flags struct {
	values  map[string]string
	version bool
}

// readFlags reads flags up to the first argument that is none.
func readFlags(args []string) (f flags, rest []string, err error) {
	f.values = map[string]string{}
	set := flag.NewFlagSet("cgpu-agent", flag.ContinueOnError)
	set.SetOutput(io.Discard) // main prints what is wrong
	set.BoolVar(&f.version, "version", false, "")
	set.BoolVar(&f.version, "v", false, "")
	for _, o := range options {
		f.values[o.name] = o.value
		for _, name := range o.environment() {
			if value, ok := os.LookupEnv(name); ok {
				f.values[o.name] = value
				break
			}
		}
		set.Func(o.name, "", func(value string) error { f.values[o.name] = value; return nil })
	}
	err = set.Parse(args)
	return f, set.Args(), err
}

func printHelp(w io.Writer) {
	fmt.Fprintf(w, `cgpu-agent [FLAGS]                   offers a node's GPUs to pods of Kubernetes, in shares
cgpu-agent [FLAGS] healthy [--ready] asks the agent of this node and pod, which runs, whether it is well: exit status 0, or 1 and why not;
                                     --ready: and whether every front end serves
cgpu-agent [FLAGS] node-label set|remove
                                     sets the label node-restriction.kubernetes.io/cgpu=true on this node, or takes it away, and stays
                                     until it is stopped, as pods of cgpu-installer do

The state of the node is below %s (CGPU_RUN_DIR names another folder). Containers that run do not need the agent: it can be
stopped and replaced at any time. healthy needs what tells agents apart, --node-name and --pod-uid, before its name, or their variables:
an exec probe has those of the container.

`, device.DefaultRunDir)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, o := range options {
		usage := o.usage
		if o.value != "" {
			usage += " (default: " + o.value + ")"
		}
		fmt.Fprintf(t, "  --%s %s\t%s [$%s]\n", o.name, o.metavar, usage, strings.Join(o.environment(), ", $"))
	}
	fmt.Fprint(t, "  --version, -v\tprints the version\n  --help, -h\tprints this\n")
	_ = t.Flush()
}
