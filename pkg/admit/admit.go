// SPDX-License-Identifier: Apache-2.0

// Package admit takes a container's config.json to a reservation and to a plan of edits, in three steps: what does it
// ask for (Read), what does that mean in the ledger's terms (Reservation), what is to be edited (Plan).
//
// cgpu-runtime takes these steps for a create, cgpu spec for its dry run: one code, so that the dry run tells the truth.
// What is between the steps (loading the table, reserving, the guard) is theirs.
package admit

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// Ask is a container's config.json and what it asks for.
type Ask struct {
	// Doc is nil for a container that asks for nothing, in a config.json that we cannot edit.
	Doc *spec.Document
	// Quota is nil for a container that is none of our business. Where there are Shares it is what the container says beside.
	Quota *quota.Quota
	// Shares are what Kubernetes allocated to the container. They decide alone which GPUs it gets and how much of each.
	Shares []Share
	// Sandbox: a pod's pause container. It has the pod's annotations and never gets a GPU.
	Sandbox bool
	// Pod: a container of a pod, but not its pause container.
	Pod bool
	// Edited: hooks of ours were taken out of Doc, so that config.json is to be written anew even if nothing else is.
	Edited bool
	name   string
	// fault is why the request of a pod's own words cannot be read. They may not count (Settle).
	fault       error
	env         []string
	annotations map[string]string
}

// Read finds out what a config.json asks for, in cgpu's own words or in those of the dialects that the node has enabled.
func Read(raw []byte, dialects ...quota.Dialect) (*Ask, error) {
	doc, err := spec.Decode(raw)
	if err != nil {
		return leave(raw, err, dialects)
	}
	env, err := doc.Env()
	if err != nil {
		return leave(raw, err, dialects)
	}
	annotations, err := doc.Annotations()
	if err != nil {
		return leave(raw, err, dialects)
	}
	a := &Ask{Doc: doc, Sandbox: spec.IsSandbox(annotations), Pod: spec.IsPod(annotations), name: spec.Name(annotations), env: env,
		annotations: annotations}
	claims, taken, err := doc.TakeShares()
	a.Edited = taken > 0
	if a.Sandbox {
		return a, nil
	}
	if err != nil {
		if left, _ := leave(raw, err, dialects); left != nil {
			return left, nil
		}
		return a, err
	}
	plugin, err := alloc.FromAnnotations(annotations)
	if err == nil && plugin != nil && spec.IsCRIO(annotations) {
		err = fmt.Errorf("admit: annotation %s: below CRI-O a pod's author can write it, so it counts for nothing: ask with a ResourceClaim",
			alloc.AnnotationShares)
	}
	if err != nil {
		return a, err
	}
	if a.Shares, err = allocated(claims, plugin); err != nil {
		return a, err
	}
	if len(a.Shares) > 0 {
		a.Quota, err = quota.Beside(env, annotations)
		return a, err
	}
	a.Quota, err = quota.FromSpec(env, annotations, dialects...)
	if a.Pod && err != nil {
		a.Quota, a.fault, err = &quota.Quota{}, err, nil
	}
	return a, err
}

// leave is Read for a config.json that we cannot edit; why says so. It is left to the low-level runtime, which reads what we do not,
// unless the container asks for something, in any of the ways in which that could be read.
func leave(raw []byte, why error, dialects []quota.Dialect) (*Ask, error) {
	env, annotations, err := spec.Words(raw)
	if err != nil || bytes.Contains(raw, []byte(strings.TrimSuffix(alloc.Prefix, "/"))) {
		return nil, why
	}
	if q, err := quota.FromSpec(env, annotations, dialects...); q != nil || err != nil {
		return nil, why
	}
	return &Ask{}, nil
}

// Name is what people call the container, where the engine told; "" of one that could not be read.
func (a *Ask) Name() string {
	if a == nil {
		return ""
	}
	return a.name
}

// Missed tells what looks as if the container were to have a vGPU, of one that gets none.
func (a *Ask) Missed(dialects []quota.Dialect) []string {
	if a.Sandbox || a.Quota != nil {
		return nil
	}
	return quota.Missed(a.env, a.annotations, dialects...)
}

// Reservation puts what is asked into the terms of the ledger. The caller has identified the container and itself in
// r: ID, Nonce, Bundle, launcher, guard, runtime.
func (a *Ask) Reservation(r ledger.Record, table *device.Table, runDir string) (ledger.Request, error) {
	if r.ID == "" || strings.ContainsAny(r.ID, "/\x00") || r.ID == "." || r.ID == ".." {
		return ledger.Request{}, fmt.Errorf("admit: container id %q: want letters, digits and the signs . _ + -", r.ID)
	}
	r.Name = a.name
	var err error
	if r.Cgroup, err = a.Doc.Cgroup(); err != nil {
		return ledger.Request{}, err
	}
	r.Preload, r.DriverOnly = table.Config.Unguarded() != "", table.Config.Enforcement == device.EnforceDriver
	r.DriverLimits = table.Config.DriverLimits
	// The simulated driver needs a guard in preload mode too: it plays the kernel, and enforces nothing then.
	if !r.Preload || table.Driver == device.DriverSim {
		r.Socket = filepath.Join(runDir, "g", r.Nonce+".sock")
		r.Control = filepath.Join(runDir, "g", r.Nonce+".ctl")
	}
	request := ledger.Request{Overcommit: table.Config.Overcommit, Card: table.Config.Card(),
		MaxSpill: table.Config.MaxSpill.Of(table.HostMemory)}
	for _, g := range table.GPUs {
		request.GPUs = append(request.GPUs, ledger.GPU{UUID: g.UUID, Index: g.Index, Memory: g.Memory})
	}
	request.Record = r
	fill := a.ask
	if len(a.Shares) > 0 {
		fill = a.allot
	}
	if err := fill(&request, table); err != nil {
		return ledger.Request{}, err
	}
	return request, a.join(&request.Record, &table.Config)
}

// ask puts what the container asks for itself into a reservation.
func (a *Ask) ask(request *ledger.Request, table *device.Table) error {
	if err := spec.UseInjected(a.Doc, a.Quota, table.GPUs); err != nil {
		return err
	}
	r := &request.Record
	if r.Preload {
		if err := a.Quota.RefuseUnguarded(table.Config.Unguarded(), r.DriverOnly); err != nil {
			return err
		}
	}
	var known []quota.GPU
	uuids := map[int]string{}
	for _, g := range table.GPUs {
		known = append(known, quota.GPU{Index: g.Index, UUID: g.UUID, Memory: g.Memory})
		uuids[g.Index] = g.UUID
	}
	grants, native, err := a.Quota.Resolve(known)
	if err != nil {
		return err
	}
	slice := ledger.VGPU{Slice: a.Quota.Slice}
	slice.Weigh()
	if a.Quota.NeedsPlacement() {
		memory, err := a.Quota.Placed()
		if err != nil {
			return err
		}
		request.Place = &ledger.Placement{Policy: table.Config.Placement, Memory: memory, Slice: slice, Avoid: unhealthy(table)}
	}
	for _, index := range native {
		r.Native = append(r.Native, uuids[index])
	}
	for _, grant := range grants {
		slice.UUID, slice.Limit = uuids[grant.Index], grant.Limit
		r.VGPUs = append(r.VGPUs, slice)
	}
	return nil
}

// unhealthy are the GPUs on which nobody is placed, and why.
func unhealthy(table *device.Table) map[string]string {
	list := map[string]string{}
	for _, g := range table.GPUs {
		if g.Fault != "" {
			list[g.UUID] = "unhealthy: " + g.Fault
		}
	}
	return list
}

// Refused turns the ledger's refusal of a reservation into one that names the variable to change, where it is the
// limit that no GPU has or has room for, the share of a GPU's time, or the spill that does not fit.
func (a *Ask) Refused(err error) error {
	if misfit, ok := errors.AsType[*quota.Error](err); ok && len(a.Shares) == 0 {
		return a.Quota.Misfit(misfit, "")
	}
	r, ok := errors.AsType[*ledger.Refusal](err)
	if !ok || !r.Memory && !r.Time && !r.Spill || len(a.Shares) > 0 {
		return err
	}
	reason := r.Reason
	switch {
	case r.GPU.UUID == "":
	case r.Memory: // which goes on with what others have
		reason = r.GPU.String() + ": " + reason
	default:
		reason += fmt.Sprintf(" (GPU %d, %s)", r.GPU.Index, r.GPU.UUID)
	}
	refuse := a.Quota.RefuseTime
	switch {
	case r.Spill:
		refuse = a.Quota.RefuseSpill
	case r.Memory:
		refuse = a.Quota.RefuseMemory
	}
	if named := refuse(reason, r.Remedy); named != nil {
		return named
	}
	return err
}

// Plan says what goes into config.json for a reservation. Hook, RunDir and Version are the caller's to fill in, and Preload,
// for which one has to look into the image.
func (a *Ask) Plan(record ledger.Record, table *device.Table) (spec.Plan, error) {
	p := spec.NewPlan(record, table)
	drm, err := a.Doc.DRM()
	for _, n := range drm {
		if IsNVIDIA(n) {
			p.Hidden = append(p.Hidden, n)
		}
	}
	if err != nil {
		return p, err
	}
	return p, a.limiter(&p)
}

// IsNVIDIA asks the kernel whether a node below /dev/dri is an NVIDIA card's: with it one can allocate memory of the
// card past the guard.
func IsNVIDIA(n device.Node) bool {
	driver, err := os.Readlink(fmt.Sprintf("/sys/dev/char/%d:%d/device/driver", n.Major, n.Minor))
	return err == nil && filepath.Base(driver) == "nvidia"
}
