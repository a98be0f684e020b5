// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Condition is the type of the node's condition.
const Condition v1.NodeConditionType = "CGPUReady"

// Reasons of the condition. They are an interface.
const (
	ReasonReady         = "Ready"
	ReasonPodsOpen      = "PodsMayTakeGPUs" // ready, but cgpu.toml lets a pod's author pass by the scheduler
	ReasonNoTable       = "NoNodeTable"
	ReasonStaleTable    = "NodeTableStale"
	ReasonNoDriver      = "DriverUnusable" // also a table that nobody can trust
	ReasonUnknownDriver = "DriverVersionUnknown"
	ReasonNoGPUs        = "NoGPUs"
	ReasonOldRuntime    = "ContainerRuntimeTooOld"
	ReasonSharedGPUs    = "GPUsOfTwoFrontEnds"
	ReasonFrontEnd      = "FrontEndNotReady"
	ReasonUnhealthy     = "GPUsUnhealthy" // False if all are
	ReasonLimited       = "FrontEndLimited"
	openText            = `pods = "any" in cgpu.toml: whoever writes a pod can name himself a GPU, past the scheduler and what it ` +
		`promised to others: set pods = "allocated", or "gpushare" with gpushare's own device plugin`
	maxConditionMessage = 1024
)

// State is what the condition is made of.
type State struct {
	Table    *device.Table
	TableErr error
	Fronts   []FrontState
	// Runtime is the node's container runtime, as the Node object has it: "containerd://2.0.5".
	Runtime string
}

// FrontState is how a front end fares.
type FrontState struct {
	Name    string
	Err     error
	Limited string // what pods do not get from it, though it serves them
	Shared  []int  // indices of GPUs that another front end was given too
}

// The front ends. That of DRA needs CDI of the container runtime.
const (
	FrontDRA    = "dra"
	FrontPlugin = "deviceplugin"
)

// podsOpen: a pod's author may take GPUs without an allocation.
func podsOpen(t *device.Table) bool {
	return t != nil && (t.Config.Pods == "" || t.Config.Pods == device.PodsAny)
}

// judge is the condition of a state, without its times: the first thing that is wrong.
func judge(s State) v1.NodeCondition {
	bad := func(reason, format string, args ...any) v1.NodeCondition {
		return v1.NodeCondition{Type: Condition, Status: v1.ConditionFalse, Reason: reason,
			Message: tidy(fmt.Sprintf(format, args...), maxConditionMessage)}
	}
	switch {
	case errors.Is(s.TableErr, device.ErrMissing):
		return bad(ReasonNoTable, "%v: %s", s.TableErr, refreshRemedy)
	case errors.Is(s.TableErr, device.ErrStale):
		return bad(ReasonStaleTable, "%v: %s", s.TableErr, refreshRemedy)
	case s.TableErr != nil:
		return bad(ReasonNoDriver, "%v", s.TableErr)
	case s.Table == nil:
		return bad(ReasonNoTable, "the node was not looked at yet")
	case unknownDriver(s.Table) != nil:
		return bad(ReasonUnknownDriver, "%v: a guard would refuse every container, so no GPU is offered", unknownDriver(s.Table))
	case len(s.Table.GPUs) == 0:
		return bad(ReasonNoGPUs, "the node table has no GPU: does nvidia-smi show any? cgpu doctor tells more")
	}
	for _, f := range s.Fronts {
		if f.Name == FrontDRA && ignoresCDI(s.Runtime) {
			return bad(ReasonOldRuntime, "%s ignores CDI devices, so claims would have no effect: containerd 1.7 or newer is needed for "+
				"--frontends dra; the device plugin works with this one", s.Runtime)
		}
		if len(f.Shared) > 0 {
			return bad(ReasonSharedGPUs, "GPUs %v are in --dra-gpus and in --deviceplugin-gpus, and neither front end offers them: name each "+
				"in one", f.Shared)
		}
	}
	for _, f := range s.Fronts {
		if f.Err != nil {
			return bad(ReasonFrontEnd, "front end %s: %v", f.Name, f.Err)
		}
	}
	sick := health.Unhealthy(s.Table)
	if len(sick) == len(s.Table.GPUs) {
		return bad(ReasonUnhealthy, "%s: cgpu health tells more", strings.Join(sick, ", "))
	}
	c := v1.NodeCondition{Type: Condition, Status: v1.ConditionTrue, Reason: ReasonReady,
		Message: fmt.Sprintf("%d GPUs, driver %s", len(s.Table.GPUs), tidy(s.Table.DriverVersion, 64))}
	if podsOpen(s.Table) {
		c.Reason, c.Message = ReasonPodsOpen, openText
	}
	for _, f := range s.Fronts {
		if f.Limited != "" {
			c.Reason, c.Message = ReasonLimited, tidy(fmt.Sprintf("front end %s: %s", f.Name, f.Limited), maxConditionMessage)
		}
	}
	if len(sick) > 0 {
		c.Reason, c.Message = ReasonUnhealthy, tidy(fmt.Sprintf("of %d GPUs: %s: cgpu health tells more", len(s.Table.GPUs),
			strings.Join(sick, ", ")), maxConditionMessage)
	}
	return c
}

// unknownDriver is why a guard of cgpu's refuses each container of the node, also with a whole GPU: it has no tables for the
// driver. The simulated driver is asked for the version that it imitates, as the guard does.
func unknownDriver(t *device.Table) error {
	if !t.Guarded() {
		return nil
	}
	_, err := rm.ForDriver(t.DriverVersion, t.Config.AllowUnknownDriver)
	return err
}

// offered is what of a table the front ends may offer: the GPUs, if containers that have them would start.
func offered(t *device.Table) *device.Table {
	if t == nil || unknownDriver(t) == nil {
		return t
	}
	none := *t
	none.GPUs = nil
	return &none
}

// ignoresCDI: the container runtime starts a container without the CDI devices that it was given, and does not say so.
// containerd has CDI since 1.7.
func ignoresCDI(runtime string) bool {
	version, ok := strings.CutPrefix(runtime, "containerd://")
	if !ok {
		return false
	}
	one, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	two, _, _ := strings.Cut(rest, ".")
	major, err := strconv.Atoi(one)
	if err != nil {
		return false
	}
	minor, err := strconv.Atoi(two)
	return err == nil && (major < 1 || major == 1 && minor < 7)
}

// heartbeat is how often a condition that does not change is written, as the kubelet does with its own.
const heartbeat = 5 * time.Minute

// reporter writes the condition.
type reporter struct {
	client    kubernetes.Interface
	node      string
	podEvents *podEvents
	metrics   *Metrics
	log       *slog.Logger
	states    chan State // the latest that was not looked at
	every     time.Duration
	now       func() time.Time

	state   State
	written v1.NodeCondition // what the API server has
	known   bool             // written was read from there, or written
}

func newReporter(client kubernetes.Interface, node string, news *podEvents, metrics *Metrics, log *slog.Logger) *reporter {
	return &reporter{client: client, node: node, podEvents: news, metrics: metrics, log: log, states: make(chan State, 1),
		every: heartbeat, now: time.Now}
}

// report hands over a state; it does not wait. One that was not looked at yet is replaced.
func (r *reporter) report(s State) {
	select {
	case <-r.states:
	default:
	}
	select {
	case r.states <- s:
	default: // another was faster, with one that is as good
	}
}

// run writes the condition when it changes and every few minutes. While the API server does not answer, it tries again,
// less and less often, with what is true then.
func (r *reporter) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	have, fails := false, 0
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-r.states:
			s.Runtime = r.state.Runtime
			r.state = s
			if have && (fails > 0 || !r.differs()) {
				continue // the timer is running
			}
			have = true
		case <-timer.C:
		}
		wait := r.every
		if err := r.write(ctx); err != nil {
			if ctx.Err() != nil {
				return
			}
			wait = retry(fails)
			if fails++; fails == 1 {
				r.log.Warn("node condition not written", "err", err)
			}
			r.metrics.Add("condition_write_failures_total", 1)
		} else if fails > 0 {
			fails = 0
			r.log.Info("node condition written again")
		}
		timer.Reset(wait)
	}
}

// differs: the condition is not what the API server has.
func (r *reporter) differs() bool {
	c := judge(r.state)
	return !r.known || c.Status != r.written.Status || c.Reason != r.written.Reason || c.Message != r.written.Message
}

// write reads the node, for its container runtime may be another one now, and patches its condition.
func (r *reporter) write(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	n, err := r.client.CoreV1().Nodes().Get(ctx, r.node, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("agent: node %s: %w", r.node, err)
	}
	r.state.Runtime = n.Status.NodeInfo.ContainerRuntimeVersion
	var was v1.NodeCondition
	for _, c := range n.Status.Conditions {
		if c.Type == Condition {
			was = c
		}
	}
	c := judge(r.state)
	now := metav1.NewTime(r.now().Truncate(time.Second))
	c.LastHeartbeatTime, c.LastTransitionTime = now, was.LastTransitionTime
	if was.Status != c.Status || was.LastTransitionTime.IsZero() || was.LastTransitionTime.After(now.Time) {
		c.LastTransitionTime = now
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []v1.NodeCondition{c}}})
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	if _, err := r.client.CoreV1().Nodes().Patch(ctx, r.node, types.StrategicMergePatchType, patch, metav1.PatchOptions{},
		"status"); err != nil {
		return fmt.Errorf("agent: condition of node %s: %w", r.node, err)
	}
	if was.Status != c.Status || was.Reason != c.Reason {
		r.log.Info("node condition", "status", c.Status, "reason", c.Reason, "message", c.Message)
		r.podEvents.node(n.UID, c)
	}
	r.written, r.known = c, true
	return nil
}
