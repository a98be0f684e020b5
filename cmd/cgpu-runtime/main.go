// Command cgpu-runtime is an OCI runtime that stands in for runc: an engine starts it with runc's arguments.
//
// It gives a container that asks for a slice of a GPU (ALIYUN_COM_GPU_MEM_CONTAINER) its virtual GPU and then becomes
// runc by execve. Every other container and command it hands to runc untouched, also when cgpu itself is broken on the
// node. It starts several times in the life of every container, so it links no more than it needs.
package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// version is set by the build.
var version = "unknown"

func main() {
	c := parse(os.Args[1:])
	if err := run(c); err != nil {
		c.report(err)
		os.Exit(1)
	}
}

// run returns only when it failed.
func run(c call) error {
	runDir := device.RunDir()
	low, err := findRuntime(runDir)
	if err != nil {
		return err
	}
	if c.command != "create" && c.command != "run" {
		return low.exec(os.Args[1:])
	}
	undo, err := create(c, runDir)
	if err == nil {
		err = low.exec(os.Args[1:])
	}
	undo()
	return err
}

// create turns the bundle of a container that asks for a vGPU into one that has it. A container that does not ask, and
// whatever only runc can complain about, it leaves alone without an error. undo takes back what was done outside of
// the bundle.
func create(c call, runDir string) (undo func(), err error) {
	undo = func() {}

	// Is it ours?
	file := bundleFile{path: filepath.Join(c.bundle, "config.json")}
	raw, err := os.ReadFile(file.path)
	if err != nil || !spec.MayAsk(raw) {
		return undo, nil
	}
	doc, err := spec.Decode(raw)
	if err != nil {
		return undo, err
	}
	env, err := doc.Env()
	if err != nil {
		return undo, err
	}
	annotations, err := doc.Annotations()
	if err != nil {
		return undo, err
	}
	if spec.IsSandbox(annotations) {
		return undo, nil
	}
	asked, err := quota.FromSpec(env, annotations)
	if asked == nil || err != nil {
		return undo, err
	}

	// The guard starts while we find out which GPUs, and how much of each.
	watch, err := startGuard(runDir)
	if err != nil {
		return undo, err
	}
	undo = watch.stop
	table, err := loadTable(runDir)
	if err != nil {
		return undo, err
	}
	if err := spec.UseInjected(doc, asked, table.GPUs); err != nil {
		return undo, err
	}
	request, err := reservation(c, asked, table)
	if err != nil {
		return undo, err
	}
	request.Record.Name = spec.Name(annotations)
	if err := watch.enter(&request.Record); err != nil {
		return undo, err
	}
	book := ledger.Open(runDir)
	record, err := book.Reserve(request)
	if err != nil {
		return undo, err
	}
	undo = func() {
		watch.stop()
		if err := book.Release(record.ID, record.Nonce); err != nil {
			c.report(err)
		}
	}

	// Tell the guard, and edit while it makes itself ready.
	if err := watch.tell(guardConfig(record, table, runDir)); err != nil {
		return undo, err
	}
	plan, err := planFor(record, table, doc, runDir)
	if err != nil {
		return undo, err
	}
	if err := spec.Apply(doc, plan); err != nil {
		return undo, err
	}
	if err := watch.wait(table.Config.GuardStartTimeout); err != nil {
		return undo, err
	}
	return undo, file.replace(doc.Encode())
}

// reservation puts what was asked into the terms of the ledger.
func reservation(c call, asked *quota.Quota, table *device.Table) (ledger.Request, error) {
	if c.id == "" || strings.ContainsAny(c.id, "/\x00") || c.id == "." || c.id == ".." {
		return ledger.Request{}, fmt.Errorf("cgpu-runtime: container id %q: want letters, digits and the signs _ + - .", c.id)
	}
	var known []quota.GPU
	request := ledger.Request{Overcommit: table.Config.Overcommit, MaxInst: table.Config.MaxInst}
	for _, g := range table.GPUs {
		known = append(known, quota.GPU{Index: g.Index, UUID: g.UUID, Memory: g.Memory})
		request.GPUs = append(request.GPUs, ledger.GPU{UUID: g.UUID, Index: g.Index, Memory: g.Memory})
	}
	nonce, err := newNonce()
	if err != nil {
		return ledger.Request{}, err
	}
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		return ledger.Request{}, err
	}
	runDir := device.RunDir()
	request.Record = ledger.Record{
		ID: c.id, Nonce: nonce, Bundle: c.bundle,
		Socket:      filepath.Join(runDir, "g", nonce+".sock"),
		Control:     filepath.Join(runDir, "g", nonce+".ctl"),
		LauncherPID: os.Getpid(), LauncherStart: start,
	}
	slice := ledger.VGPU{Weight: max(asked.Weight, 1), Percent: asked.Percent, Priority: asked.Priority}
	grants, native, err := asked.Resolve(known)
	if err != nil {
		return ledger.Request{}, err
	}
	for _, index := range native {
		request.Record.Native = append(request.Record.Native, uuidOf(table, index))
	}
	if asked.NeedsPlacement() {
		request.Place = &ledger.Placement{Policy: table.Config.Placement, Memory: asked.Memory, Slice: slice}
		return request, nil
	}
	for _, grant := range grants {
		v := slice
		v.UUID, v.Limit = uuidOf(table, grant.Index), grant.Limit
		request.Record.VGPUs = append(request.Record.VGPUs, v)
	}
	return request, nil
}

// uuidOf names the GPU with an index that quota.Resolve took from the table.
func uuidOf(table *device.Table, index int) string {
	for _, g := range table.GPUs {
		if g.Index == index {
			return g.UUID
		}
	}
	return ""
}

// newNonce tells one create of a container from the next one of the same name. Not crypto/rand: it would make the
// program a third larger, and every runtime call pay for its self-tests.
func newNonce() (string, error) {
	var b [8]byte
	if n, err := unix.Getrandom(b[:], 0); err != nil || n != len(b) {
		return "", fmt.Errorf("cgpu-runtime: getrandom: %d bytes, %v", n, err)
	}
	return hex.EncodeToString(b[:]), nil
}

// planFor says what goes into config.json.
func planFor(record ledger.Record, table *device.Table, doc *spec.Document, runDir string) (spec.Plan, error) {
	p := spec.NewPlan(record, table)
	p.RunDir, p.Version = runDir, version
	var err error
	if p.Hook, err = sibling("cgpu-hook"); err != nil {
		return p, err
	}
	drm, err := doc.DRM()
	if err != nil {
		return p, err
	}
	for _, n := range drm {
		if isNVIDIA(n) {
			p.Hidden = append(p.Hidden, n)
		}
	}
	return p, nil
}

// isNVIDIA asks the kernel whether a node below /dev/dri is an NVIDIA card's: with it one can allocate memory of the
// card past the guard.
func isNVIDIA(n device.Node) bool {
	driver, err := os.Readlink(fmt.Sprintf("/sys/dev/char/%d:%d/device/driver", n.Major, n.Minor))
	return err == nil && filepath.Base(driver) == "nvidia"
}

// guardConfig tells the guard what it needs to know.
func guardConfig(record ledger.Record, table *device.Table, runDir string) guardcfg.Config {
	c := guardcfg.Config{
		ID: record.ID, Nonce: record.Nonce, RunDir: runDir, Socket: record.Socket, Control: record.Control,
		Log:    filepath.Join(runDir, "log", record.ID[:min(len(record.ID), 12)]+"-"+record.Nonce+".log"),
		Driver: table.Driver, DriverVersion: table.DriverVersion,
		LauncherPID: os.Getpid(), Settings: table.Config,
	}
	for _, g := range spec.NewPlan(record, table).GPUs {
		c.GPUs = append(c.GPUs, guardcfg.GPU{GPU: g.GPU, Native: g.Native, Limit: g.Limit})
	}
	if table.Driver == device.DriverSim {
		c.SimSocket = device.SimSocket(runDir)
	}
	for _, n := range table.Nodes {
		switch n.Path {
		case "/dev/nvidiactl":
			c.ControlNode = n
		case "/dev/nvidia-uvm":
			c.UVMNode = n
		}
	}
	return c
}

// loadTable reads the node table, and has it made when it is missing or stale: that happens once per boot, driver or
// configuration change.
func loadTable(runDir string) (*device.Table, error) {
	table, err := device.Load(runDir)
	if errors.Is(err, device.ErrMissing) || errors.Is(err, device.ErrStale) {
		if err := refresh(); err != nil {
			return nil, err
		}
		table, err = device.Load(runDir)
	}
	return table, err
}
