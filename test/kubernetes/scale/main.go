// SPDX-License-Identifier: Apache-2.0

// Command scale measures what thousands of vGPU claims cost the real scheduler and apiserver: nodes that are objects only,
// their ResourceSlices, and for each claim a pod that the scheduler must place. test/kubernetes/scale/run.sh starts the control
// plane for it; docs/measurements.md has the figures.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

type options struct {
	dir                       string
	port                      int
	nodes, gpus, pods         int
	capacities                int
	kind                      kind
	attributes, policy        bool
	window, clients           int
	qps, parallelism, percent int
	gates                     string
	limit                     time.Duration
	profile, out              string
}

func main() {
	var o options
	var k string
	flag.StringVar(&o.dir, "dir", os.Getenv("CGPU_K8S_DIR"), "`folder` of the control plane (CGPU_K8S_DIR)")
	flag.IntVar(&o.port, "port", 16440, "its PORT_BASE; the scheduler takes port + 8")
	flag.IntVar(&o.nodes, "nodes", 1000, "nodes")
	flag.IntVar(&o.gpus, "gpus", 8, "GPUs of a node")
	flag.IntVar(&o.pods, "pods", 0, "pods; 0: 2.5 for each GPU, one where they take whole GPUs")
	flag.StringVar(&k, "kind", "shared", "what a pod asks for: shared, near, whole, extended, classic, gpu-mem or none")
	flag.BoolVar(&o.attributes, "attributes", true, "devices have all attributes, else their UUID only")
	flag.BoolVar(&o.policy, "policy", true, "capacities have a requestPolicy")
	flag.IntVar(&o.capacities, "capacities", 3, "of a device: 1 memory, 2 and cores, 3 and containers")
	flag.IntVar(&o.window, "window", 100, "pods that wait for the scheduler at a time")
	flag.IntVar(&o.clients, "clients", 8, "requests of this program at a time")
	flag.IntVar(&o.qps, "qps", 5000, "requests a second that the scheduler allows itself")
	flag.IntVar(&o.parallelism, "parallelism", 16, "of the scheduler")
	flag.IntVar(&o.percent, "percent", 0, "percentageOfNodesToScore; 0: the scheduler's choice")
	flag.StringVar(&o.gates, "gates", "", "feature gates of the scheduler")
	flag.DurationVar(&o.limit, "limit", 10*time.Minute, "no more pods are made after this time")
	flag.StringVar(&o.profile, "profile", "", "write a CPU profile of the scheduler, of 20 s in the middle, to this `file`")
	flag.StringVar(&o.out, "o", "", "append the result as a line of JSON to this `file`")
	flag.Parse()
	o.kind = kind(k)
	if err := o.check(); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(2)
	}
	if err := run(context.Background(), o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func (o *options) check() error {
	switch {
	case o.dir == "":
		return fmt.Errorf(`-dir "": want the folder of a control plane: test/kubernetes/scale/run.sh makes one`)
	case !slices.Contains(kinds, o.kind):
		return fmt.Errorf("-kind %q: want one of %v", o.kind, kinds)
	case o.capacities < 1 || o.capacities > 3:
		return fmt.Errorf("-capacities %d: want 1 to 3", o.capacities)
	case o.nodes < 1 || o.gpus < 1 || o.window < 1 || o.clients < 1:
		return fmt.Errorf("-nodes, -gpus, -window, -clients: want positive numbers")
	}
	if o.pods == 0 {
		if o.pods = o.nodes * o.gpus; !o.kind.whole() {
			o.pods = o.pods * 5 / 2
		}
	}
	return nil
}

// run is one measurement.
func run(ctx context.Context, o options, w io.Writer) error {
	c := newCluster(o.dir, o.port)
	config, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig("admin"))
	if err != nil {
		return err
	}
	config.QPS = -1 // the apiserver holds us back, not the client
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.WarningHandler = rest.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	r := result{Kind: o.kind, Nodes: o.nodes, GPUs: o.gpus, Pods: o.pods, Window: o.window, Percent: o.percent, Attributes: o.attributes,
		Policy: o.policy, Capacities: o.capacities, Started: time.Now()}
	if err := populate(ctx, client, o, &r); err != nil {
		return err
	}
	if err := r.weigh(ctx, client); err != nil {
		return err
	}
	scheduler, err := c.scheduler(o.qps, o.parallelism, o.percent, o.gates)
	if err != nil {
		return err
	}
	defer end(scheduler)
	s, err := newSampler(c, scheduler.Process.Pid)
	if err != nil {
		return err
	}
	if err := load(ctx, c, client, o, s, &r); err != nil {
		return err
	}
	text, err := c.get(ctx, c.schedulerURL()+"/metrics")
	if err != nil {
		return err
	}
	r.scheduler(metrics(text))
	r.print(w)
	if o.out == "" {
		return nil
	}
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(o.out, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if _, err = f.Write(append(line, '\n')); err == nil {
		err = f.Close()
	}
	return err
}

func end(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// each calls f for 0 to n-1, so many at a time; it returns the first error.
func each(n, atATime int, f func(i int) error) error {
	numbers := make(chan int)
	var once sync.Once
	var first error
	failed := make(chan struct{})
	var wg sync.WaitGroup
	for range atATime {
		wg.Go(func() {
			for i := range numbers {
				if err := f(i); err != nil {
					once.Do(func() { first = err; close(failed) })
				}
			}
		})
	}
loop:
	for i := range n {
		select {
		case numbers <- i:
		case <-failed:
			break loop
		}
	}
	close(numbers)
	wg.Wait()
	return first
}

// populate makes everything but the pods.
func populate(ctx context.Context, client kubernetes.Interface, o options, r *result) error {
	for _, class := range classes() {
		if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	s := shape{shared: o.kind != kindClassic, attributes: o.attributes, policy: o.policy, capacities: o.capacities}
	start := time.Now()
	err := each(o.nodes, o.clients, func(i int) error {
		n := node(i, o.gpus, o.kind)
		made, err := client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		made.Status = n.Status
		if _, err = client.CoreV1().Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil || !o.kind.slices() {
			return err
		}
		_, err = client.ResourceV1().ResourceSlices().Create(ctx, slice(i, o.gpus, s), metav1.CreateOptions{})
		return err
	})
	r.NodesTook = time.Since(start)
	if err != nil || !o.kind.claims() {
		return err
	}
	start = time.Now()
	err = each(o.pods, o.clients, func(i int) error {
		_, err := client.ResourceV1().ResourceClaims(namespace).Create(ctx, claim(i, o.kind, o.capacities), metav1.CreateOptions{})
		return err
	})
	r.ClaimsTook = time.Since(start)
	return err
}

// load makes the pods, no more at a time than the window, and waits for the scheduler to bind them.
func load(ctx context.Context, c cluster, client kubernetes.Interface, o options, s *sampler, r *result) error {
	type bound struct {
		name string
		at   time.Time
	}
	binds := make(chan bound, o.pods)
	factory := informers.NewSharedInformerFactory(client, 0)
	informer := factory.Core().V1().Pods().Informer()
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(before, after any) {
		if b, a := before.(*corev1.Pod), after.(*corev1.Pod); b.Spec.NodeName == "" && a.Spec.NodeName != "" {
			binds <- bound{a.Name, time.Now()}
		}
	}})
	if err != nil {
		return err
	}
	done := make(chan struct{})
	defer close(done)
	factory.Start(done)
	factory.WaitForCacheSync(done)

	window := make(chan struct{}, o.window)
	var mu sync.Mutex
	created := map[string]time.Time{}
	start := time.Now()
	limit := time.After(o.limit)
	stop := make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		failed <- each(o.pods, o.clients, func(i int) error {
			select {
			case window <- struct{}{}:
			case <-stop:
				return nil
			}
			mu.Lock()
			created[podName(i)] = time.Now()
			mu.Unlock()
			_, err := client.CoreV1().Pods(namespace).Create(ctx, pod(i, o.kind), metav1.CreateOptions{})
			return err
		})
	}()
	profiled := o.profile == ""
	if err := s.sample(ctx, r, 0, start); err != nil {
		return err
	}
	step := max(o.pods/10, 1)
	for n := 0; n < o.pods; {
		select {
		case b := <-binds:
			n++
			mu.Lock()
			r.latencies = append(r.latencies, b.at.Sub(created[b.name]))
			mu.Unlock()
			<-window
			if n%step == 0 || n == o.pods {
				if err := s.sample(ctx, r, n, start); err != nil {
					return err
				}
				fmt.Fprintf(os.Stderr, "%s: %d of %d pods after %v\n", o.kind, n, o.pods, time.Since(start).Round(time.Second))
			}
			if !profiled && n >= o.pods/2 {
				profiled = true
				go func() {
					if err := c.profile(ctx, 20, o.profile); err != nil {
						fmt.Fprintln(os.Stderr, "scale: profile:", err)
					}
				}()
			}
		case err := <-failed:
			if err != nil {
				return err
			}
			failed = nil
		case <-limit:
			close(stop)
			r.Stopped = true
			if err := s.sample(ctx, r, n, start); err != nil {
				return err
			}
			r.Bound = n
			return nil
		case <-time.After(time.Minute):
			return fmt.Errorf("%d of %d pods: none was bound in a minute; is there no room? %s", n, o.pods, strings.Join(pending(ctx, client), "; "))
		}
	}
	r.Bound = o.pods
	return nil
}

// pending says of a few pods why they wait.
func pending(ctx context.Context, client kubernetes.Interface) (why []string) {
	list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=", Limit: 3})
	if err != nil {
		return []string{err.Error()}
	}
	for _, p := range list.Items {
		for _, c := range p.Status.Conditions {
			why = append(why, p.Name+": "+c.Message)
		}
	}
	return why
}
