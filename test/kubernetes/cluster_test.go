// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

// Package kubernetes is the suite on real Kubernetes: etcd, apiserver, scheduler, controller-manager, kubelet, containerd
// or CRI-O, and cgpu with the simulated driver, on this machine and in namespaces of its own (k8s.sh). Its tests do what users do,
// with kubectl, and look at what the node then has: the ledger, guards, CDI files, and the driver as a pod sees it.
//
// Run it by `make kubernetes`.
package kubernetes

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// cluster is the one that k8s.sh made.
type cluster struct {
	dir    string // CGPU_K8S_DIR
	client kubernetes.Interface
}

const nodeName = "node1"

var (
	lab  *cluster
	keep = flag.Bool("keep", false, "leave the cluster up at the end")
)

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	lab = &cluster{dir: os.Getenv("CGPU_K8S_DIR")}
	if lab.dir == "" {
		lab.dir = filepath.Join(os.TempDir(), "cgpu-k8s")
	}
	if out, err := lab.script("down"); err != nil {
		return 0, fmt.Errorf("%w\n%s", err, out)
	}
	if !*keep {
		defer lab.script("down") //nolint:errcheck // there is nobody left to tell
	}
	if out, err := lab.script("up", "node"); err != nil {
		return 0, fmt.Errorf("%w\n%s", err, out)
	}
	var err error
	if lab.client, err = kube.Client(lab.dir); err != nil {
		return 0, err
	}
	if err := lab.deploy(); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// crio is whether CRI-O is below the kubelet, and not containerd.
func crio() bool { return os.Getenv("CGPU_TEST_CRI") == "crio" }

// needsDevicePlugin skips a test of what only the device plugin does.
func needsDevicePlugin(t *testing.T) {
	t.Helper()
	if crio() {
		testenv.Skip(t, "below CRI-O: the device plugin's allocations are refused (TestDevicePluginBelowCRIO)")
	}
}

// path is that of a file in the cluster's folder; node that of a file of the node.
func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }
func (c *cluster) node(name string) string { return filepath.Join(c.dir, "run/ns", name) }

// script runs a verb of k8s.sh.
func (c *cluster) script(args ...string) (string, error) { return c.scriptWith(nil, args...) }

func (c *cluster) scriptWith(env []string, args ...string) (string, error) {
	cmd := exec.Command("./k8s.sh", args...)
	cmd.Env = append(append(os.Environ(), "CGPU_K8S_DIR="+c.dir), env...)
	// Files, not pipes: what it starts keeps them.
	out, err := os.CreateTemp("", "k8s")
	if err != nil {
		return "", err
	}
	defer os.Remove(out.Name()) //nolint:errcheck // in the temporary folder
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	err = cmd.Run()
	text, readErr := os.ReadFile(out.Name())
	if err != nil {
		err = fmt.Errorf("k8s.sh %s: %w", strings.Join(args, " "), err)
	}
	return string(text), errors.Join(err, readErr)
}

func (c *cluster) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.script(args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// kubectl gives input to kubectl.
func (c *cluster) kubectl(input string, args ...string) (string, error) {
	return kube.Kubectl(c.dir, input, args...)
}

// ledger is what the node has given away. It is read without the lock: every change lands by rename.
func (c *cluster) ledger() ([]ledger.Record, error) { return ledger.Open(c.node("run/cgpu")).List() }

// claimFiles are the CDI specs of claims.
func (c *cluster) claimFiles() []string {
	files, _ := filepath.Glob(c.node("run/cdi/*")) //nolint:errcheck // the pattern is right
	return files
}

// session is a user's: a namespace of the test's own.
type session struct {
	*testing.T
	ns string
}

// login makes the namespace. At the end of the test everything in it is deleted, and nothing of it may be left on the node.
func login(t *testing.T) session {
	t.Helper()
	// One test that leaves the node down must not look like twenty that fail.
	lab.must(t, "check")
	s := session{t, strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name()))}
	ctx := context.Background()
	if _, err := lab.client.CoreV1().Namespaces().
		Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.ns}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			s.explain()
		}
		s.deleteAll()
		noTrace(t)
		lab.client.CoreV1().Namespaces().Delete(ctx, s.ns, metav1.DeleteOptions{}) //nolint:errcheck // the namespace is empty
	})
	kube.Until(t, waitLimit, "the default ServiceAccount", func() error {
		_, err := lab.client.CoreV1().ServiceAccounts(s.ns).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	return s
}

// deleteAll deletes pods and claims and waits for their end.
func (s session) deleteAll() {
	s.Helper()
	out, err := lab.kubectl("", "-n", s.ns, "delete", "deployments,jobs,pods,resourceclaims,resourceclaimtemplates", "--all",
		"--wait=true", "--timeout=120s")
	if err != nil {
		s.Errorf("%v\n%s", err, out)
	}
}

// noTrace fails the test unless the node holds nothing any more: no reservation, no guard, no claim.
func noTrace(t *testing.T) {
	t.Helper()
	kube.Until(t, waitLimit, "the node gives everything back", func() error {
		records, err := lab.ledger()
		if err != nil {
			return err
		}
		if len(records) > 0 {
			return fmt.Errorf("the ledger holds %s", describe(records))
		}
		if files := lab.claimFiles(); len(files) > 0 {
			return fmt.Errorf("CDI files: %v", files)
		}
		if out, err := lab.script("exec", "pgrep", "-a", "cgpu-guard"); err == nil {
			return fmt.Errorf("guards: %s", out)
		}
		return nil
	})
}

func describe(records []ledger.Record) string {
	var b strings.Builder
	for _, r := range records {
		fmt.Fprintf(&b, "%.12s %s", r.ID, r.Name)
		for _, v := range r.VGPUs {
			fmt.Fprintf(&b, " %s %v", v.UUID, v.Limit)
		}
		fmt.Fprintf(&b, " %v; ", r.Native)
	}
	return b.String()
}

// explain logs what is known of pods, events and the node.
func (s session) explain() {
	if out, err := lab.script("check"); err != nil {
		s.Logf("%v\n%s", err, out)
	}
	for _, args := range []string{"-n " + s.ns + " get pods,resourceclaims -o wide", "-n " + s.ns + " get events --sort-by=.lastTimestamp",
		"get resourceslices -o wide", "-n cgpu-system logs daemonset/cgpu-agent --tail=20"} {
		out, err := lab.kubectl("", strings.Fields(args)...)
		s.Logf("%s %v", out, err)
	}
}

// kubectl is kubectl in the session's namespace; the test ends where it fails.
func (s session) kubectl(args ...string) string {
	s.Helper()
	out, err := lab.kubectl("", append([]string{"-n", s.ns}, args...)...)
	if err != nil {
		s.Fatal(err)
	}
	return out
}

// apply is kubectl apply of manifests.
func (s session) apply(manifests ...string) {
	s.Helper()
	if err := s.tryApply(manifests...); err != nil {
		s.Fatal(err)
	}
}

// tryApply is apply that may be refused.
func (s session) tryApply(manifests ...string) error {
	_, err := lab.kubectl(strings.Join(manifests, "\n---\n"), "-n", s.ns, "apply", "-f", "-")
	return err
}

// get is the pod as the API server has it.
func (s session) get(pod string) *corev1.Pod {
	s.Helper()
	p, err := lab.client.CoreV1().Pods(s.ns).Get(context.Background(), pod, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return p
}

// waitLimit is long enough for a busy machine.
const waitLimit = 90 * time.Second

// settled is nil once the pod runs, has ended or was refused.
func (s session) settled(pod string) error {
	p := s.get(pod)
	if p.Status.Phase != corev1.PodPending || waiting(p) != "" && !strings.HasPrefix(waiting(p), "ContainerCreating") {
		return nil
	}
	return fmt.Errorf("is %s: %s %s", p.Status.Phase, conditions(p), waiting(p))
}

// reaches waits until the pod is in that phase.
func (s session) reaches(pod string, phase corev1.PodPhase) {
	s.Helper()
	kube.Until(s.T, waitLimit, "pod "+pod+" "+string(phase), func() error {
		p, err := lab.client.CoreV1().Pods(s.ns).Get(context.Background(), pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Status.Phase == phase {
			return nil
		}
		if p.Status.Phase == corev1.PodFailed {
			s.Fatalf("pod %s failed: %s", pod, waiting(p))
		}
		return fmt.Errorf("is %s: %s %s", p.Status.Phase, conditions(p), waiting(p))
	})
}

func conditions(p *corev1.Pod) string {
	var said []string
	for _, c := range p.Status.Conditions {
		if c.Status != corev1.ConditionTrue && c.Message != "" {
			said = append(said, c.Message)
		}
	}
	return strings.Join(said, "; ")
}

// waiting is why containers of the pod do not run.
func waiting(p *corev1.Pod) string {
	var said []string
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil {
			said = append(said, w.Reason+": "+w.Message)
		}
		if e := c.State.Terminated; e != nil && e.ExitCode != 0 {
			said = append(said, fmt.Sprintf("ended with %d: %s: %s", e.ExitCode, e.Reason, e.Message))
		}
	}
	return strings.Join(said, "; ")
}

// output waits for the pod's good end and is what it printed.
func (s session) output(pod string) string {
	s.Helper()
	kube.Until(s.T, waitLimit, "pod "+pod+" ends", func() error {
		p := s.get(pod)
		switch p.Status.Phase {
		case corev1.PodSucceeded:
			return nil
		case corev1.PodFailed:
			s.Fatalf("pod %s failed: %s: %s", pod, waiting(p), s.kubectl("logs", pod, "--all-containers"))
		}
		return fmt.Errorf("is %s: %s %s", p.Status.Phase, conditions(p), waiting(p))
	})
	return s.kubectl("logs", pod)
}

// refused waits until a container of the pod could not be made and says so in all of these words.
func (s session) refused(pod string, words ...string) {
	s.Helper()
	s.hears(pod, words...)
	if phase := s.get(pod).Status.Phase; phase == corev1.PodRunning || phase == corev1.PodSucceeded {
		s.Fatalf("pod %s is %s", pod, phase)
	}
}

// hears waits for an event of the pod, or a reason why it waits, with all of these words.
func (s session) hears(pod string, words ...string) {
	s.Helper()
	kube.Until(s.T, waitLimit, fmt.Sprintf("pod %s is told %q", pod, words), func() error {
		events, err := lab.client.CoreV1().Events(s.ns).
			List(context.Background(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
		if err != nil {
			return err
		}
		p := s.get(pod)
		said := []string{waiting(p), conditions(p)}
		for _, e := range events.Items {
			said = append(said, e.Reason+": "+e.Message)
		}
		for _, text := range said {
			if containsAll(text, words) {
				return nil
			}
		}
		return errors.New(strings.Join(said, "\n"))
	})
}

func containsAll(text string, words []string) bool {
	for _, w := range words {
		if !strings.Contains(text, w) {
			return false
		}
	}
	return true
}

// pending waits until the scheduler has said that the pod finds no place, for this reason.
func (s session) pending(pod string, words ...string) {
	s.Helper()
	kube.Until(s.T, waitLimit, "pod "+pod+" pending", func() error {
		p := s.get(pod)
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && containsAll(c.Message, words) {
				return nil
			}
		}
		return fmt.Errorf("is %s: %s", p.Status.Phase, conditions(p))
	})
}

// exec runs a command in a container of the pod.
func (s session) exec(pod string, command ...string) string {
	s.Helper()
	return s.kubectl(append([]string{"exec", pod, "--"}, command...)...)
}

// holds are the records of the pod's containers, by the container's name.
func (s session) holds(pod string) map[string]ledger.Record {
	s.Helper()
	all, err := lab.ledger()
	if err != nil {
		s.Fatal(err)
	}
	byID := map[string]ledger.Record{}
	for _, r := range all {
		byID[r.ID] = r
	}
	held := map[string]ledger.Record{}
	for _, c := range s.get(pod).Status.ContainerStatuses {
		_, id, _ := strings.Cut(c.ContainerID, "://")
		if r, ok := byID[id]; ok {
			held[c.Name] = r
		}
	}
	return held
}

// errorOf is err, or where that is nil what was seen instead; nil without either.
func errorOf(err error, format string, a ...any) error {
	if err != nil || format == "" {
		return err
	}
	return fmt.Errorf(format, a...)
}
