// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

const (
	nodeLabelName = "node-label"
	// nodeLabel is on nodes where cgpu is installed. The agent and cgpu's pods go there.
	nodeLabel = "node-restriction.kubernetes.io/cgpu"
)

// labelRetry is the pause before the API server is asked again.
const labelRetry = 5 * time.Second

// labelNode is what cgpu-installer's pods do with the API server, in a container that has nothing of the host: the label is set when the
// installation on this node is done, and removed when it is undone: the agent, which gives claims back, is there until then. After that it
// stays, as a DaemonSet's pods have to.
func labelNode(ctx context.Context, f flags, args []string) error {
	if len(args) != 1 || args[0] != "set" && args[0] != "remove" {
		return usageError{fmt.Errorf("%s %q: want set or remove; see cgpu-agent --help", nodeLabelName, args)}
	}
	node, err := f.node()
	if err != nil {
		return err
	}
	client, err := connect(f.values["kubeconfig"], ownPace)
	if err != nil {
		return err
	}
	log := logger(f.values["log-format"], os.Stderr)
	if err := patchLabel(ctx, client, node, args[0], log); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// patchLabel tries until it is done: a node without it gets no pods, so there is nothing that would be worth giving up for.
func patchLabel(ctx context.Context, client kubernetes.Interface, node, verb string, log *slog.Logger) error {
	value := `"true"`
	if verb == "remove" {
		value = "null"
	}
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, nodeLabel, value)
	for {
		_, err := client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{})
		if err == nil {
			log.Info("node label: done", "what", verb, "node", node, "label", nodeLabel)
			return nil
		}
		log.Error("node label: is tried again", "what", verb, "node", node, "label", nodeLabel, "error", err)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s %s: node %s: %w", nodeLabelName, verb, node, err)
		case <-time.After(labelRetry):
		}
	}
}
