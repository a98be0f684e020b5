// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// result is one measurement; its JSON form is what -o writes. Durations are nanoseconds.
type result struct {
	Kind               kind
	Nodes, GPUs, Pods  int
	Bound              int  // of Pods
	Stopped            bool // by -limit, before all were bound
	Window, Percent    int
	Attributes, Policy bool
	Capacities         int
	Started            time.Time
	NodesTook          time.Duration // to make nodes and slices
	ClaimsTook         time.Duration
	Slice, Claim       size
	Samples            []sample
	Latency            map[string]time.Duration // percentiles, from before the pod's creation to the event that it is bound
	Phases             map[string]time.Duration // of the scheduler, mean per call
	latencies          []time.Duration
}

// size is that of an object: as etcd holds it, and as JSON.
type size struct{ Protobuf, JSON int }

// sample is the state when Bound pods were bound.
type sample struct {
	Bound             int
	After             time.Duration
	Usage             map[string]usage
	EtcdSize, EtcdUse uint64
}

// weigh measures an object of each sort, with what the apiserver adds.
func (r *result) weigh(ctx context.Context, client kubernetes.Interface) error {
	if !r.Kind.claims() {
		return nil
	}
	s, err := client.ResourceV1().ResourceSlices().Get(ctx, nodeName(0)+"-"+driver, metav1.GetOptions{})
	if err != nil {
		return err
	}
	c, err := client.ResourceV1().ResourceClaims(namespace).Get(ctx, claimName(0), metav1.GetOptions{})
	if err != nil {
		return err
	}
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	r.Slice = size{s.Size(), len(text)}
	if text, err = json.Marshal(c); err != nil {
		return err
	}
	r.Claim = size{c.Size(), len(text)}
	return nil
}

// sampler knows the processes.
type sampler struct {
	cluster cluster
	pids    map[string]int
}

var components = []string{"kube-scheduler", "kube-apiserver", "etcd"}

func newSampler(c cluster, scheduler int) (*sampler, error) {
	s := &sampler{c, map[string]int{"kube-scheduler": scheduler}}
	for _, name := range components[1:] {
		pid, err := c.pid(name)
		if err != nil {
			return nil, err
		}
		s.pids[name] = pid
	}
	return s, nil
}

func (s *sampler) sample(ctx context.Context, r *result, bound int, start time.Time) (err error) {
	x := sample{Bound: bound, After: time.Since(start), Usage: map[string]usage{}}
	for name, pid := range s.pids {
		if x.Usage[name], err = usageOf(pid); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if x.EtcdSize, x.EtcdUse, err = s.cluster.etcdSize(ctx); err != nil {
		return err
	}
	r.Samples = append(r.Samples, x)
	return nil
}

// scheduler takes from its metrics where its time went, and turns latencies into percentiles.
func (r *result) scheduler(m map[string]float64) {
	r.Phases = map[string]time.Duration{}
	mean := func(name, metric, labels string) {
		if n := m[metric+"_count"+labels]; n > 0 {
			r.Phases[name] = time.Duration(m[metric+"_sum"+labels] / n * float64(time.Second))
		}
	}
	mean("attempt", "scheduler_scheduling_attempt_duration_seconds", `{profile="default-scheduler",result="scheduled"}`)
	for _, point := range []string{"PreFilter", "Filter", "PostFilter", "PreScore", "Score", "Reserve", "PreBind", "Bind"} {
		mean(point, "scheduler_framework_extension_point_duration_seconds",
			`{extension_point="`+point+`",profile="default-scheduler",status="Success"}`)
	}
	r.Latency = map[string]time.Duration{}
	slices.Sort(r.latencies)
	for name, p := range map[string]int{"p50": 500, "p90": 900, "p99": 990, "p99.9": 999} {
		if n := len(r.latencies); n > 0 {
			r.Latency[name] = r.latencies[min(n*p/1000, n-1)]
		}
	}
}

func (r *result) print(w io.Writer) {
	fmt.Fprintf(w, "%s: %d nodes × %d GPUs, %d of %d pods, %d waiting at a time\n", r.Kind, r.Nodes, r.GPUs, r.Bound, r.Pods, r.Window)
	if r.Kind.slices() {
		fmt.Fprintf(w, "slices: %d capacities, request policies %v, all attributes %v\n", r.Capacities, r.Policy, r.Attributes)
	}
	fmt.Fprintf(w, "nodes and slices made in %v, claims in %v\n", r.NodesTook.Round(time.Millisecond), r.ClaimsTook.Round(time.Millisecond))
	if r.Slice.JSON > 0 {
		fmt.Fprintf(w, "a slice: %d bytes in etcd, %d as JSON; a claim: %d, %d\n", r.Slice.Protobuf, r.Slice.JSON, r.Claim.Protobuf, r.Claim.JSON)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PODS\tAFTER\tPODS/S\tSCHED CPU/POD\tAPI CPU/POD\tETCD CPU/POD\tSCHED RSS\tAPI RSS\tETCD RSS\tETCD DB\tIN USE")
	for i, x := range r.Samples {
		if i == 0 {
			fmt.Fprintf(t, "0\t0\t-\t-\t-\t-")
		} else {
			last := r.Samples[i-1]
			n := x.Bound - last.Bound
			if n == 0 {
				continue
			}
			fmt.Fprintf(t, "%d\t%v\t%.1f", x.Bound, x.After.Round(100*time.Millisecond), float64(n)/(x.After-last.After).Seconds())
			for _, name := range components {
				each := (x.Usage[name].CPU - last.Usage[name].CPU) / time.Duration(n)
				fmt.Fprintf(t, "\t%v", each.Round(10*time.Microsecond))
			}
		}
		for _, name := range components {
			fmt.Fprintf(t, "\t%s", mib(x.Usage[name].RSS))
		}
		fmt.Fprintf(t, "\t%s\t%s\n", mib(x.EtcdSize), mib(x.EtcdUse))
	}
	_ = t.Flush()
	fmt.Fprintf(w, "from creation to bound: p50 %v, p90 %v, p99 %v, p99.9 %v\n", r.Latency["p50"].Round(time.Millisecond),
		r.Latency["p90"].Round(time.Millisecond), r.Latency["p99"].Round(time.Millisecond), r.Latency["p99.9"].Round(time.Millisecond))
	fmt.Fprint(w, "scheduler, mean:")
	for _, name := range []string{"attempt", "PreFilter", "Filter", "PreScore", "Score", "Reserve", "PreBind", "Bind"} {
		if d, ok := r.Phases[name]; ok {
			fmt.Fprintf(w, " %s %v", name, d.Round(10*time.Microsecond))
		}
	}
	fmt.Fprintln(w)
}

func mib(n uint64) string { return fmt.Sprintf("%d MiB", n>>20) }
