// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// MakePage makes the file of the container's vGPU page, if the reservation names one.
//
// In preload mode it has a file system of its own, with a copy of the limiter: a tenant may hold a lease on any file of root's that he
// sees (F_SETLEASE), and then every program of the node that opens it waits for 45 seconds. Where there is a guard it prevents that
// (guardcfg.Config.Hold).
func MakePage(record ledger.Record, table *device.Table, runDir string) error {
	if record.Page == "" {
		return nil
	}
	var cards map[string]sched.Card
	if record.Preload { // with a guard, it schedules
		var err error
		if cards, err = ledger.Open(runDir).Cards(); err != nil {
			return err
		}
		if err := page.Confine(record.Page); err != nil {
			return err
		}
		if err := copyLimiter(device.Limiter(), page.LimiterFile(record.Page)); err != nil {
			return err
		}
	}
	h, vgpus, err := vgpuPage(record, table, cards)
	if err != nil {
		return err
	}
	return page.Create(record.Page, h, vgpus)
}

// copyLimiter copies the installed limiter, if there is one.
func copyLimiter(from, to string) error {
	if from == "" {
		return nil // admit refuses
	}
	library, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, library, 0o444)
	}
	if err == nil {
		err = os.Chmod(to, 0o444) // whatever the umask
	}
	if err != nil {
		return fmt.Errorf("launch: copy the limiter: %w", err)
	}
	return nil
}

// vgpuPage is what the page tells the limiter. The vGPUs are in the order of the guard's configuration.
// cards are the settings of GPUs that have some of their own.
func vgpuPage(record ledger.Record, table *device.Table, cards map[string]sched.Card) (page.Header, []page.VGPU, error) {
	settings := table.Config
	h := page.Header{Flags: page.FlagGuard}
	if record.Preload {
		h.Flags = page.FlagPreload
	}
	switch settings.Managed {
	case device.ManagedAllow:
	case device.ManagedDeny:
		h.Flags |= page.FlagManagedDeny
	default:
		h.Flags |= page.FlagManagedLimit
	}
	if !settings.HMM {
		h.Flags |= page.FlagNoHMM
	}
	if table.Driver != device.DriverSim {
		control, uvm := commonNodes(table)
		h.ControlDevice = unix.Mkdev(control.Major, control.Minor)
		h.UVMDevice = unix.Mkdev(uvm.Major, uvm.Minor)
	}
	var vgpus []page.VGPU
	for _, g := range spec.NewPlan(record, table).GPUs {
		id, err := gpuID(g.BusID)
		if err != nil {
			return h, nil, fmt.Errorf("launch: GPU %d: %w", g.Index, err)
		}
		v := page.VGPU{Minor: uint32(g.Minor), GPUID: id, Weight: uint32(g.Weight), Limit: uint64(g.Limit), Spill: uint64(g.Spill)}
		if g.Native {
			v.Flags |= page.VGPUNative
		} else if record.Preload {
			card, ok := cards[g.UUID]
			if !ok {
				card = settings.Card()
			}
			v.TimesliceMicros = uint64(card.PreloadSlice(sched.Share{Weight: g.Weight}, settings.BaseTimeslice).Microseconds())
		}
		vgpus = append(vgpus, v)
	}
	return h, vgpus, nil
}

// commonNodes are nvidiactl and nvidia-uvm.
func commonNodes(table *device.Table) (control, uvm device.Node) {
	for _, n := range table.Nodes {
		switch n.Path {
		case "/dev/nvidiactl":
			control = n
		case "/dev/nvidia-uvm":
			uvm = n
		}
	}
	return control, uvm
}

// gpuID is RM's name of the GPU at a PCI address as NVML writes it.
func gpuID(busID string) (uint32, error) {
	address, _, _ := strings.Cut(busID, ".")
	parts := strings.Split(address, ":")
	var n [3]uint64 // domain, bus, slot
	for i := range n {
		var err error
		// Not fmt.Sscanf: cgpu-runtime would be 45 KB larger.
		if len(parts) == len(n) {
			n[i], err = strconv.ParseUint(parts[i], 16, 32)
		}
		if len(parts) != len(n) || err != nil {
			return 0, fmt.Errorf("bus id %q: want a PCI address such as 0000:01:00.0", busID)
		}
	}
	return uint32(n[0]<<16 | n[1]<<8 | n[2]), nil
}
