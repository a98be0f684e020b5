// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// nodeUse is a node's use of its GPUs: what its cgpu-agent answers to /v1/smi.
type nodeUse struct {
	Name string `json:"node"`
	schema.Node
}

// owner is the pod that a container of the ledger is of, by namespace, name, and container; empty where it is of none.
type owner struct{ Namespace, Pod, Container string }

func top(ctx context.Context, args []string, w, warnings io.Writer) error {
	var c connection
	a := agents{}
	var format string
	f := newFlags(w, "kubectl cgpu top [pods|nodes] [NODE...] [flags]",
		"Shows what containers use of their shares now: each node's cgpu-agent is asked through the API server (pods/proxy, with your\n"+
			"rights). UTIL is the part of the GPU's time in the last second, where the driver tells it.")
	c.flags(f)
	f.StringVar(&a.namespace, "agent-namespace", "cgpu-system", "`namespace` of cgpu-agent")
	f.StringVar(&a.selector, "agent-selector", "app.kubernetes.io/name=cgpu,app.kubernetes.io/component=agent", "`labels` of its pods")
	f.IntVar(&a.port, "agent-port", 9470, "its `port`")
	f.StringVarP(&format, "output", "o", "", "`format`: json")
	if err := parse(f, args); err != nil {
		return err
	}
	if format != "" && format != "json" {
		return usageError{fmt.Errorf("top: -o %q: want json", format)}
	}
	what, nodes := "pods", f.Args()
	if len(nodes) > 0 && (nodes[0] == "pods" || nodes[0] == "nodes" || nodes[0] == "pod" || nodes[0] == "node") {
		what, nodes = strings.TrimSuffix(nodes[0], "s")+"s", nodes[1:]
	}
	client, namespace, err := c.client()
	if err != nil {
		return err
	}
	uses, err := a.ask(ctx, client, nodes, warner(warnings))
	if err != nil {
		return err
	}
	switch {
	case format == "json":
		return terminal.EncodeJSON(w, uses, "  ")
	case what == "nodes":
		return printTopNodes(w, uses)
	}
	return printTopPods(w, uses, namespace)
}

// agents says where they are found.
type agents struct {
	namespace, selector string
	port                int
}

// askTimeout bounds the wait for one agent; it waits less than a second for its guards.
const askTimeout = 5 * time.Second

// ask asks the agents of some nodes, or of all. One that does not answer is a warning; if none does, it is an error.
func (a agents) ask(ctx context.Context, client kubernetes.Interface, nodes []string, warn func(string, ...any)) ([]nodeUse, error) {
	list, err := client.CoreV1().Pods(a.namespace).List(ctx, metav1.ListOptions{LabelSelector: a.selector})
	if err != nil {
		return nil, fmt.Errorf("list the pods of cgpu-agent: %w", err)
	}
	pods := slices.DeleteFunc(list.Items, func(p corev1.Pod) bool {
		return p.Spec.NodeName == "" || p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil || len(nodes) > 0 &&
			!slices.Contains(nodes, p.Spec.NodeName)
	})
	for _, name := range nodes {
		if !slices.ContainsFunc(pods, func(p corev1.Pod) bool { return p.Spec.NodeName == name }) {
			return nil, fmt.Errorf("top: node %q: no cgpu-agent runs there (--agent-namespace %s, --agent-selector %s)", name, a.namespace,
				a.selector)
		}
	}
	if len(pods) == 0 {
		return nil, fmt.Errorf("top: no cgpu-agent runs (--agent-namespace %s, --agent-selector %s): is it installed?", a.namespace, a.selector)
	}
	uses := make([]nodeUse, len(pods))
	errs := make([]error, len(pods))
	slots := make(chan struct{}, 16)
	var wg sync.WaitGroup
	for i, p := range pods {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			uses[i], errs[i] = a.one(ctx, client, p)
		})
	}
	wg.Wait()
	answered := []nodeUse{}
	for i, p := range pods {
		if errs[i] != nil {
			warn("node %s: %v", p.Spec.NodeName, errs[i])
			continue
		}
		answered = append(answered, uses[i])
	}
	if len(answered) == 0 {
		return nil, errors.New("top: no cgpu-agent answered")
	}
	slices.SortFunc(answered, func(a, b nodeUse) int { return strings.Compare(a.Name, b.Name) })
	return answered, nil
}

// mostAnswer bounds what is read of an agent: 4096 vGPUs are some 3 MiB.
const mostAnswer = 32 << 20

// one asks the agent of a node.
func (a agents) one(ctx context.Context, client kubernetes.Interface, p corev1.Pod) (u nodeUse, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	body, err := client.CoreV1().Pods(p.Namespace).ProxyGet("http", p.Name, strconv.Itoa(a.port), "v1/smi", nil).Stream(ctx)
	if err != nil {
		if apierrors.IsForbidden(err) {
			return u, fmt.Errorf("%w: you need get on pods/proxy in namespace %s", err, p.Namespace)
		}
		if apierrors.IsNotFound(err) {
			return u, errors.New("its cgpu-agent has no /v1/smi: it was started with --smi off, or is older")
		}
		return u, err
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, mostAnswer))
	if err != nil {
		return u, err
	}
	if err := json.Unmarshal(text, &u); err != nil {
		return u, fmt.Errorf("cgpu-agent's answer: %w", err)
	}
	if u.Schema != schema.Version {
		return u, fmt.Errorf("cgpu-agent's answer is of version %d of its JSON: this plugin reads version %d; it must be as new as the agent",
			u.Schema, schema.Version)
	}
	u.Name = p.Spec.NodeName
	return u, nil
}

// ownerOf reads the name that the runtime gave a container of a pod. A name is made by whoever starts the container; of a pod the
// kubelet does, and the three parts cannot have a slash.
func ownerOf(v schema.VGPU) owner {
	parts := strings.Split(v.Name, "/")
	if len(parts) != 3 {
		return owner{Container: cmp.Or(v.Name, terminal.Cut(v.ID, 12))}
	}
	return owner{parts[0], parts[1], parts[2]}
}

func printTopPods(w io.Writer, uses []nodeUse, namespace string) error {
	type line struct {
		owner
		node  string
		cells []string
	}
	var lines []line
	for _, u := range uses {
		for _, g := range u.GPUs {
			for _, v := range g.VGPUs {
				o := ownerOf(v)
				if namespace != "" && o.Namespace != namespace {
					continue
				}
				used, util, state := mib(v.Used), "", v.State
				if v.Compute != nil && v.Compute.Exact {
					util = percent(v.Compute.Utilization)
				}
				if v.State != "running" && v.State != "starting" {
					used, util = "?", "?"
				}
				if v.Paused && !v.Native && v.State == "running" {
					state = "paused"
				}
				limit := mib(v.Limit)
				if v.Native {
					limit = "whole GPU"
				}
				lines = append(lines, line{o, u.Name, []string{o.Namespace, o.Pod, o.Container, u.Name, strconv.Itoa(g.Index), used, limit, util,
					strconv.FormatUint(v.Denied, 10), state}})
			}
		}
	}
	slices.SortStableFunc(lines, func(a, b line) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Pod, b.Pod), strings.Compare(a.Container, b.Container),
			strings.Compare(a.node, b.node))
	})
	t := newTable(w)
	t.row("NAMESPACE", "POD", "CONTAINER", "NODE", "GPU", "USED", "LIMIT", "UTIL", "DENIED", "STATE")
	for _, l := range lines {
		t.row(l.cells...)
	}
	return t.Flush()
}

func printTopNodes(w io.Writer, uses []nodeUse) error {
	t := newTable(w)
	t.row("NODE", "GPU", "NAME", "USED", "RESERVED", "TOTAL", "UTIL", "POLICY", "VGPUS")
	for _, u := range uses {
		for _, g := range u.GPUs {
			util := ""
			if g.Utilization != nil {
				util = percent(*g.Utilization)
			}
			t.row(u.Name, strconv.Itoa(g.Index), terminal.Cut(g.Name, 24), mib(g.Used), mib(g.Reserved), mib(g.Total), util, g.Policy,
				strconv.Itoa(len(g.VGPUs)))
		}
	}
	return t.Flush()
}

// mib rounds up: what shows as 0 is nothing.
func mib(b quota.Bytes) string {
	return strconv.FormatUint(uint64((b+quota.MiB-1)/quota.MiB), 10) + "MiB"
}

// percent is a part such as "12.5%".
func percent(p schema.Percent) string { return fmt.Sprintf("%g%%", p) }
