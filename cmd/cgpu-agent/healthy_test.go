// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opencgpu/cgpu/pkg/agent"
)

// The command finds the agent of its node and pod by the variables that both have.
func TestHealthy(t *testing.T) {
	t.Setenv("NODE_NAME", "healthy-test")
	t.Setenv("POD_UID", t.TempDir())
	s, err := parse(t)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(args ...string) error { return command(t.Context(), args) }
	if err := ask("healthy"); err == nil || !strings.Contains(err.Error(), "does it run") {
		t.Errorf("without an agent: %v", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		client := fake.NewClientset(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.node}})
		done <- agent.Run(ctx, agent.Options{Node: s.node, Client: client, RunDir: t.TempDir(), Probe: agent.ProbeSocket(s.node, s.podUID),
			Log: logger("text", devNull(t))})
	}()
	eventually(t, "healthy", func() error { return ask("healthy") })
	if err := ask("healthy", "--ready"); err == nil || !strings.Contains(err.Error(), "node") {
		t.Errorf("ready without a table: %v", err)
	}
	if err := ask("--pod-uid", "another", "healthy"); err == nil {
		t.Error("another pod's agent answers")
	}
	for _, args := range [][]string{{"healthy", "x"}, {"healthy", "--x"}} {
		if err := ask(args...); !isUsage(err) {
			t.Errorf("%v: %v", args, err)
		}
	}
	stop()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("does not end")
	}
}

func isUsage(err error) bool {
	_, ok := errors.AsType[usageError](err)
	return ok
}
