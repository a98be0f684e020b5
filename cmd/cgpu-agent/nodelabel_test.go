// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

func TestPatchLabel(t *testing.T) {
	client := fake.NewSimpleClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"other": "stays"}}})
	label := func() (string, bool) {
		node, err := client.CoreV1().Nodes().Get(t.Context(), "n", metav1.GetOptions{})
		if err != nil || node.Labels["other"] != "stays" {
			t.Errorf("%v, labels %v", err, node.Labels)
		}
		value, ok := node.Labels[nodeLabel]
		return value, ok
	}
	for _, c := range []struct {
		verb string
		want bool
	}{{"set", true}, {"set", true}, {"remove", false}, {"remove", false}} {
		if err := patchLabel(t.Context(), client, "n", c.verb, slog.New(slog.DiscardHandler)); err != nil {
			t.Error(err)
		}
		if value, ok := label(); ok != c.want || ok && value != "true" {
			t.Errorf("%s: %q, %v", c.verb, value, ok)
		}
	}
	// An API server that is away: it is tried again until the pod ends.
	ctx, cancel := context.WithCancel(t.Context())
	client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		cancel()
		return true, nil, errors.New("away")
	})
	if err := patchLabel(ctx, client, "n", "set", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "away") {
		t.Errorf("got %v", err)
	}
}

func TestNodeLabelUsage(t *testing.T) {
	for _, args := range [][]string{{"node-label"}, {"node-label", "take"}, {"node-label", "set", "more"}, {"node-label", "set", "--twice"}} {
		err := command(t.Context(), append([]string{"--node-name=n"}, args...))
		if _, ok := errors.AsType[usageError](err); !ok {
			t.Errorf("%q: %v", args, err)
		}
	}
}
