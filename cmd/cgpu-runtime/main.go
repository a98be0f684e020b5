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

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/admit"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// version is set by the build.
var version = "unknown"

func main() {
	c := parse(os.Args[1:])
	c.report(run(c)) // it came back
	os.Exit(1)
}

// run becomes the low-level runtime. It returns only when that, or what has to be done before, failed.
func run(c call) error {
	if err := notAgain(); err != nil {
		return err
	}
	runDir := device.RunDir()
	undo := func() {}
	var err error
	if c.command == "create" || c.command == "run" {
		undo, err = create(c, runDir)
	}
	if err == nil {
		// Not before create: it may have had the node table made anew, with other runtimes.
		var low string
		if low, err = findRuntime(configured(runDir), c.creator()); err == nil {
			err = execute(low, os.Args[1:])
		}
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
	raw, err := readFile(file.path)
	if err != nil || !spec.MayAsk(raw) {
		return undo, nil
	}
	ask, err := admit.Read(raw)
	if err != nil || ask.Quota == nil {
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
	mine, err := identify(c, watch)
	if err != nil {
		return undo, err
	}
	request, err := ask.Reservation(mine, table, runDir)
	if err != nil {
		return undo, err
	}
	book := ledger.Open(runDir)
	record, err := book.Reserve(request)
	if err != nil {
		return undo, ask.Refused(err)
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
	plan, err := ask.Plan(record, table)
	if err != nil {
		return undo, err
	}
	plan.RunDir, plan.Version = runDir, version
	if plan.Hook, err = device.Program("cgpu-hook"); err != nil {
		return undo, err
	}
	if err := spec.Apply(ask.Doc, plan); err != nil {
		return undo, err
	}
	staged, err := file.stage(ask.Doc.Encode())
	if err != nil {
		return undo, err
	}
	if err := watch.wait(table.Config.GuardStartTimeout); err != nil {
		staged.discard()
		return undo, err
	}
	return undo, staged.commit()
}

// identify says in a record which container this is, and who makes it.
func identify(c call, watch *watch) (ledger.Record, error) {
	nonce, err := newNonce()
	if err != nil {
		return ledger.Record{}, err
	}
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		return ledger.Record{}, err
	}
	guardStart, err := ledger.ProcStart(watch.pid)
	if err != nil {
		return ledger.Record{}, err
	}
	return ledger.Record{
		ID: c.id, Nonce: nonce, Bundle: c.bundle,
		LauncherPID: os.Getpid(), LauncherStart: start,
		GuardPID: watch.pid, GuardStart: guardStart,
	}, nil
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
