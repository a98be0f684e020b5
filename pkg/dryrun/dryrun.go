// SPDX-License-Identifier: Apache-2.0

// Package dryrun says what cgpu-runtime would do with a container, without doing it.
package dryrun

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/admit"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
	"github.com/opencgpu/cgpu/pkg/suggest"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

// DryRun does what cgpu-runtime does on create, on paper. The steps are those of create in cmd/cgpu-runtime/main.go.
type DryRun struct {
	RunDir  string
	Version string
	Table   string // node.json to judge by; empty for this node's
	Hook    string
	ID      string
	Folder  string // of config.json
}

// Edit returns the config.json that runc would get, and the reasons, one a line.
func (d DryRun) Edit(raw []byte, env []string) (edited []byte, reasons string, err error) {
	if raw, err = setEnv(raw, env); err != nil {
		return nil, "", err
	}
	may := spec.MaySpeak(raw)
	enabled, err := d.dialects(may)
	if err != nil {
		return nil, "", err
	}
	ask, err := admit.Read(raw, enabled...)
	switch {
	case err != nil:
		return nil, "", err
	case ask.Sandbox && ask.Edited:
		return ask.Doc.Encode(), "passed through without the shares of GPUs: a pod's pause container never gets one\n", nil
	case ask.Sandbox:
		return raw, "passed through unchanged: a pod's pause container never gets a GPU\n", nil
	case ask.Quota == nil:
		return raw, "passed through unchanged: no vGPU asked for (neither CGPU_MEM nor ALIYUN_COM_GPU_MEM_CONTAINER is set, or " +
			"CGPU_DISABLE is)\n" +
			unheard(raw, may, enabled) + unheeded(ask.Missed(enabled)), nil
	}
	t, err := d.load()
	if err != nil {
		return nil, "", err
	}
	units := func(c spec.PodContainer) (quota.Units, error) {
		if d.Table != "" {
			return quota.Units{}, errors.New("spec: --table: only the kubelet of the node itself can tell what gpushare's device plugin allocated")
		}
		return launch.AskKubelet(t.Config.PodResources, c)
	}
	if err := ask.Settle(t, units); err != nil {
		return nil, "", err
	}
	record, err := d.reserve(ask, t)
	if err != nil {
		return nil, "", err
	}
	plan, err := ask.Plan(record, t)
	if err != nil {
		return nil, "", err
	}
	plan.RunDir, plan.Hook, plan.Version = d.RunDir, d.Hook, d.Version
	if err := spec.Apply(ask.Doc, plan); err != nil {
		return nil, "", err
	}
	return ask.Doc.Encode(), explain(ask, record, plan), nil
}

// dialects are those that count on the node, if the container may use any.
func (d DryRun) dialects(may []quota.Dialect) ([]quota.Dialect, error) {
	if len(may) == 0 {
		return nil, nil
	}
	t, err := d.load()
	if err != nil {
		return nil, err
	}
	return t.Config.Dialects, nil
}

// unheard tells which dialects a container asks in that the node does not have enabled.
func unheard(raw []byte, may, enabled []quota.Dialect) string {
	var b strings.Builder
	for _, d := range may {
		if slices.Contains(enabled, d) {
			continue
		}
		if ask, err := admit.Read(raw, d); err != nil || ask.Quota != nil {
			fmt.Fprintf(&b, "it asks for one in dialect %s, which cgpu.toml does not enable: dialects = [\"%s\"]\n", d, d)
		}
	}
	return b.String()
}

// load reads the table to judge by.
func (d DryRun) load() (*device.Table, error) {
	if d.Table == "" {
		return node.Load(d.RunDir)
	}
	text, err := os.ReadFile(d.Table)
	if err != nil {
		return nil, err
	}
	t := new(device.Table)
	if err := json.Unmarshal(text, t); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Table, err)
	}
	return t, t.Validate()
}

// nonce stands in the output where every create has a number of its own.
const nonce = "0000000000000000"

// reserve lets the ledger's own code decide, over a copy.
func (d DryRun) reserve(ask *admit.Ask, t *device.Table) (ledger.Record, error) {
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		return ledger.Record{}, err
	}
	mine := ledger.Record{ID: d.ID, Nonce: nonce, Bundle: "/", LauncherPID: os.Getpid(), LauncherStart: start}
	request, err := ask.Reservation(mine, t, d.RunDir)
	if err != nil {
		return ledger.Record{}, err
	}
	if err := admit.GivePage(&request, d.RunDir); err != nil {
		return ledger.Record{}, err
	}
	dir, err := os.MkdirTemp("", "cgpu-spec-")
	if err != nil {
		return ledger.Record{}, err
	}
	defer os.RemoveAll(dir)
	if d.Table == "" {
		text, err := os.ReadFile(ledger.File(d.RunDir))
		if err == nil {
			err = os.WriteFile(ledger.File(dir), text, 0o600)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return ledger.Record{}, err
		}
	}
	copied := ledger.Open(dir)
	records, err := copied.List()
	for _, r := range records {
		if r.ID == d.ID && d.isBundle(r.Bundle) { // the container may run already; a create would find it gone
			err = errors.Join(err, copied.Release(r.Nonce))
		}
	}
	if err != nil {
		return ledger.Record{}, err
	}
	record, err := copied.Reserve(request)
	return record, ask.Refused(err)
}

// isBundle says whether config.json is of a record's bundle: others can have a container of the same ID.
func (d DryRun) isBundle(folder string) bool {
	a, aerr := os.Stat(d.Folder)
	b, berr := os.Stat(folder)
	return aerr == nil && berr == nil && os.SameFile(a, b)
}

// explain tells in lines what was asked, granted and edited.
func explain(ask *admit.Ask, r ledger.Record, p spec.Plan) string {
	var b strings.Builder
	asked := ask.Quota
	for _, s := range ask.Shares {
		fmt.Fprintf(&b, "share    %s\n", s.Text())
	}
	for _, name := range slices.Sorted(maps.Keys(asked.Asked)) {
		fmt.Fprintf(&b, "asked    %s=%s\n", name, terminal.Printable(asked.Asked[name]))
	}
	for _, d := range asked.Dialects {
		fmt.Fprintf(&b, "dialect  %s\n", d)
	}
	for _, name := range asked.Unmapped {
		fmt.Fprintf(&b, "ignored  %s, which has no meaning in cgpu\n", name)
	}
	b.WriteString(unheeded(asked.Ignored))
	if len(ask.Shares) > 0 && len(asked.Asked) > 0 {
		fmt.Fprintf(&b, "beside   the shares the pod's own words can only lower, but for pod_settings in cgpu.toml\n")
	}
	if len(ask.Shares) == 0 && asked.NeedsPlacement() {
		fmt.Fprintf(&b, "placed   on this GPU, because none was named\n")
	}
	for _, g := range p.GPUs {
		if g.Native {
			fmt.Fprintf(&b, "granted  GPU %d (%s, %s): the whole card, %v\n", g.Index, terminal.Printable(g.Name), view.ShortUUID(g.UUID), g.Memory)
		} else {
			fmt.Fprintf(&b, "granted  GPU %d (%s, %s): %v of %v\n", g.Index, terminal.Printable(g.Name), view.ShortUUID(g.UUID), g.Limit, g.Memory)
		}
	}
	for i, v := range r.VGPUs {
		each, on := ", on each sliced GPU", ""
		if len(ask.Shares) > 0 {
			each, on = ", on "+view.ShortUUID(v.UUID), " on "+view.ShortUUID(v.UUID)
		} else if i > 0 {
			break // all slices of a container that asks itself are alike
		}
		if v.Spill > 0 {
			fmt.Fprintf(&b, "spill    %v of host memory beyond the limit%s\n", v.Spill, each)
		}
		fmt.Fprintf(&b, "compute  weight %d, percent %s, priority %s%s\n", v.Weight, view.OrNone(v.Percent), v.Priority, on)
	}
	fmt.Fprintf(&b, "nodes    %s\n", paths(p.Nodes()))
	if len(p.Hidden) > 0 {
		fmt.Fprintf(&b, "hidden   %s\n", paths(p.Hidden))
	}
	fmt.Fprintf(&b, "driver   %s, %s, %s\n", terminal.Plural(len(p.Mounts), "file"), terminal.Plural(len(p.Links), "link"),
		terminal.Plural(len(p.LibDirs), "library folder"))
	if p.Limiter != "" {
		fmt.Fprintf(&b, "limiter  %s\n", p.Limiter)
	}
	switch {
	case r.DriverOnly:
		b.WriteString("enforced by NVIDIA's driver, memory alone; time is not shared out (limits in cgpu.toml)\n")
	case r.Preload && r.DriverLimits:
		b.WriteString("enforced by the preload library, and memory by NVIDIA's driver; a program can walk around both " +
			"(enforcement, limits in cgpu.toml)\n")
	case r.Preload:
		b.WriteString("enforced by the preload library only; a program can walk around it (enforcement in cgpu.toml)\n")
	default:
		fmt.Fprintf(&b, "enforced by the guard, which answers the driver calls over %s\n", p.Socket)
		if r.DriverLimits {
			b.WriteString("         and memory by NVIDIA's driver, too (limits in cgpu.toml)\n")
		}
		return b.String()
	}
	if p.Socket != "" {
		fmt.Fprintf(&b, "guard    plays the kernel for the simulated driver over %s, and enforces nothing\n", p.Socket)
	}
	return b.String()
}

// unheeded tells in lines which of a container's words do nothing, each with the name that was probably meant.
func unheeded(words []string) string {
	var known []string
	for _, n := range quota.Names() {
		known = append(known, n.Variable, n.Native, n.Annotation)
	}
	var b strings.Builder
	for _, what := range words {
		name, _, _ := strings.Cut(what, ",")
		fmt.Fprintf(&b, "ignored  %s%s\n", what, suggest.DidYouMean(name, known))
	}
	return b.String()
}

func paths(nodes []device.Node) string {
	var list []string
	for _, n := range nodes {
		list = append(list, n.Path)
	}
	return strings.Join(list, " ")
}

// setEnv puts variables into a config.json as docker run -e does: each replaces those of its name. Without any, the
// text stays as it is.
func setEnv(raw []byte, env []string) ([]byte, error) {
	if len(env) == 0 {
		return raw, nil
	}
	var root, process map[string]json.RawMessage
	if err := json.Unmarshal(raw, &root); err != nil {
		return nil, fmt.Errorf("config.json: %w", err)
	}
	if text, ok := root["process"]; ok {
		if err := json.Unmarshal(text, &process); err != nil {
			return nil, fmt.Errorf("config.json: process: %w", err)
		}
	}
	if process == nil {
		return nil, errors.New("config.json: no process to set variables for")
	}
	var has []string
	if text, ok := process["env"]; ok {
		if err := json.Unmarshal(text, &has); err != nil {
			return nil, fmt.Errorf("config.json: process.env: %w", err)
		}
	}
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		has = slices.DeleteFunc(has, func(h string) bool { return strings.HasPrefix(h, name+"=") })
		has = append(has, e)
	}
	var err error
	if process["env"], err = json.Marshal(has); err != nil {
		return nil, err
	}
	if root["process"], err = json.Marshal(process); err != nil {
		return nil, err
	}
	return json.Marshal(root)
}
