// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// watch looks at the ledger all the time, until stop, and keeps what is wrong with it: more of a GPU than there is, or a
// share that two containers hold.
type watch struct {
	stop  chan struct{}
	done  sync.WaitGroup
	looks int
	most  int
	wrong []string
}

func watchLedger() *watch {
	w := &watch{stop: make(chan struct{})}
	w.done.Go(func() {
		for {
			select {
			case <-w.stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			records, err := lab.ledger()
			if err != nil {
				w.wrong = append(w.wrong, err.Error())
				continue
			}
			w.looks++
			w.most = max(w.most, len(records))
			if said := overbooked(records); said != "" && len(w.wrong) < 10 {
				w.wrong = append(w.wrong, said)
			}
		}
	})
	return w
}

func (w *watch) end(t *testing.T) {
	t.Helper()
	close(w.stop)
	w.done.Wait()
	t.Logf("looked at the ledger %d times, at most %d containers at once", w.looks, w.most)
	if len(w.wrong) > 0 || w.looks == 0 {
		t.Errorf("the ledger: %s", strings.Join(w.wrong, "\n"))
	}
}

// overbooked says what of the records cannot be; cards of 15 GiB, shares of one container each.
func overbooked(records []ledger.Record) string {
	held := map[string]quota.Bytes{}
	shares := map[string]string{}
	for _, r := range records {
		for _, v := range r.VGPUs {
			held[v.UUID] += v.Limit
		}
		for _, uuid := range r.Native {
			held[uuid] += 15 * quota.GiB
		}
		for _, a := range r.Allocated {
			if other, twice := shares[a.ID]; twice {
				return fmt.Sprintf("share %s is held by %s and %s", a.ID, other, r.ID)
			}
			shares[a.ID] = r.ID
		}
	}
	for uuid, sum := range held {
		if sum > 15*quota.GiB {
			return fmt.Sprintf("%v of GPU %s: %s", sum, uuid, describe(records))
		}
	}
	return ""
}

// pods makes n pods, every other with a claim of 3Gi and with 3 units of gpu-mem, in one go.
func (s session) pods(n int, command string) {
	s.Helper()
	var manifests []string
	for i := range n {
		name := fmt.Sprintf("p%d", i)
		if i%2 == 0 {
			manifests = append(manifests, claim(name, "3Gi", ""), pod(name, withClaim(name, command)))
		} else {
			manifests = append(manifests, pod(name, withMemory(3, command)))
		}
	}
	s.apply(manifests...)
}

// phases counts the namespace's pods by phase.
func (s session) phases() map[corev1.PodPhase]int {
	s.Helper()
	list, err := lab.client.CoreV1().Pods(s.ns).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	n := map[corev1.PodPhase]int{}
	for i := range list.Items {
		n[list.Items[i].Status.Phase]++
		if p := &list.Items[i]; p.Status.Phase == corev1.PodFailed {
			s.Errorf("pod %s failed: %s", p.Name, waiting(p))
		}
	}
	return n
}

func (s session) reach(n int, phase corev1.PodPhase, limit time.Duration) {
	s.Helper()
	kube.Until(s.T, limit, fmt.Sprintf("%d pods %s", n, phase), func() error {
		if p := s.phases(); p[phase] != n {
			if s.Failed() {
				s.FailNow()
			}
			return fmt.Errorf("%v", p)
		}
		return nil
	})
}

// A hundred pods for four GPUs, which hold twenty at once: all have their turn, and at no moment is a byte given twice.
func TestHundredPods(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	w := watchLedger()
	begin := time.Now()
	s.pods(100, "cgpu-probe alloc 2900MiB")
	s.reach(100, corev1.PodSucceeded, 10*time.Minute)
	took := time.Since(begin)
	w.end(t)
	t.Logf("100 pods in %v: %v each", took.Round(time.Second), (took / 100).Round(10*time.Millisecond))
	t.Logf("memory of cgpu-agent: %s", agentMemory(t))
}

// The node is full: the ledger holds what the claims consume, no more, no less.
func TestLedgerEqualsClaims(t *testing.T) {
	needsDevicePlugin(t)
	s := login(t)
	w := watchLedger()
	s.pods(22, "sleep 1000")
	s.reach(20, corev1.PodRunning, 5*time.Minute)
	s.pending("p20", "cannot allocate all claims")
	s.pending("p21", "Insufficient aliyun.com/gpu-mem")
	w.end(t)
	records, err := lab.ledger()
	if err != nil {
		t.Fatal(err)
	}
	held := map[string]quota.Bytes{}
	for _, r := range records {
		for _, a := range r.Allocated {
			held[a.ID] = r.VGPUs[0].Limit
		}
	}
	if len(held) != 20 {
		t.Errorf("the ledger has %d allocations, want 20: %s", len(held), describe(records))
	}
	claims, err := lab.client.ResourceV1().ResourceClaims(s.ns).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	allocated := 0
	for _, c := range claims.Items {
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			allocated++
			memory := r.ConsumedCapacity["memory"]
			if id := string(c.UID) + "/" + string(*r.ShareID); held[id] != quota.Bytes(memory.Value()) {
				t.Errorf("claim %s consumes %v, the ledger holds %v of %s", c.Name, memory.String(), held[id], id)
			}
		}
	}
	if allocated != 10 || len(lab.claimFiles()) != 10 {
		t.Errorf("%d claims are allocated, CDI files %v, want 10", allocated, lab.claimFiles())
	}
}
