// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// testdata/params.csv is what hack/drivers measured in NVIDIA's open modules, release by release: for every control and class that the
// tables name, the size of its structure, where user pointers, client handles and file descriptors sit in it, and who may make the call;
// all structures that ioctls hand over, with their fields. A pointer that a table forgets would be followed in the guard, at an address
// that a container chose.

// measured is one structure from a tag on; absent: the driver does not have it.
type measured struct {
	absent                 bool
	size                   int
	pointers, clients, fds []int
	access                 string // user, admin or kernel; of controls and classes
	layout                 string // of a class whether it needs parameters, of a structure its fields
}

func (m measured) String() string {
	return fmt.Sprintf("%d bytes, pointers %v, clients %v, descriptors %v", m.size, m.pointers, m.clients, m.fds)
}

// facts are rows by kind and id, and in that by the release since which they hold.
type facts map[string]map[string]map[string]measured

func readHeaders(t *testing.T) (tags []string, rows facts) {
	t.Helper()
	rows = facts{}
	for _, r := range readRecords(t, "testdata/params.csv") {
		if r[0] == "tag" {
			tags = append(tags, r[1])
			continue
		}
		m := measured{absent: r[3] == "-", pointers: numbers(t, r[4]), clients: numbers(t, r[5]), fds: numbers(t, r[6]),
			access: r[7], layout: r[8]}
		m.size, _ = strconv.Atoi(r[3])
		if rows[r[0]] == nil {
			rows[r[0]] = map[string]map[string]measured{}
		}
		if rows[r[0]][r[1]] == nil {
			rows[r[0]][r[1]] = map[string]measured{}
		}
		rows[r[0]][r[1]][r[2]] = m
	}
	for kind, least := range map[string]int{"control": 250, "class": 100, "uvm": 50, "struct": 30, "escape": 30} {
		if len(rows[kind]) < least || len(tags) < 150 {
			t.Fatalf("%d tags, %d of kind %s", len(tags), len(rows[kind]), kind)
		}
	}
	return tags, rows
}

// at is the row in force at a release.
func (f facts) at(kind, id, tag string) measured { return inForce(f[kind][id], tag) }

func compareTags(a, b string) int {
	v, _ := ParseVersion(a)
	w, _ := ParseVersion(b)
	return v.Compare(w)
}

func numbers(t *testing.T, s string) []int {
	t.Helper()
	var out []int
	for _, f := range strings.Fields(s) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, n)
	}
	return sorted(out)
}

func sorted(s []int) []int {
	s = slices.Clone(s)
	slices.Sort(s)
	return slices.Compact(s)
}

// inForce is the structure in force at a tag.
func inForce(rows map[string]measured, tag string) measured {
	best, m := "", measured{absent: true}
	for since, row := range rows {
		if compareTags(since, tag) <= 0 && (best == "" || compareTags(since, best) > 0) {
			best, m = since, row
		}
	}
	return m
}

func TestHeadersControls(t *testing.T) {
	tags, rows := readHeaders(t)
	for _, tag := range tags {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range controls {
			id := controls[i].id
			c, ok := a.Control(id)
			if !ok || c.Kind == ControlDeny {
				continue
			}
			m := rows.at("control", fmt.Sprintf("%#x", id), tag)
			if m.absent {
				if !unmeasured(a, c) {
					t.Errorf("%s: %s is allowed, but the headers have no structure for it", tag, c.Name)
				}
				continue
			}
			var pointers []int
			for _, p := range c.Pointers {
				pointers = append(pointers, p.Off)
			}
			pointers = append(pointers, c.Clear...)
			var fds []int
			if c.FDOff >= 0 {
				fds = append(fds, c.FDOff)
			}
			if !slices.Equal(sorted(pointers), m.pointers) || !slices.Equal(sorted(c.ClientHandles), m.clients) || !slices.Equal(fds, m.fds) {
				t.Errorf("%s: %s: table has pointers %v, clients %v, descriptors %v; headers: %v", tag, c.Name, pointers, c.ClientHandles, fds, m)
			}
			if c.Size != 0 && c.Size != m.size {
				t.Errorf("%s: %s: %d bytes, headers: %v", tag, c.Name, c.Size, m)
			}
		}
	}
}

// unmeasured: controls that have no structure in any header, or first got one inside a branch.
func unmeasured(a *ABI, c Control) bool {
	switch c.ID {
	case 0x80028b:
		return c.Size == 1
	case 0x20800802:
		return len(c.Pointers) == 1 // the structure has a name that the tool does not find
	case 0x20810108, 0x20810110, 0x20810111:
		return true // opaque to the kernel driver
	case 0x90e70113:
		return a.branch == 535 // added inside the branch
	case 0xcb33010c:
		return a.branch == 550 // same
	}
	return false
}

func TestHeadersClasses(t *testing.T) {
	tags, rows := readHeaders(t)
	for _, tag := range tags {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range classes {
			c, _ := a.Class(classes[i].id)
			m := rows.at("class", fmt.Sprintf("%#x", c.ID), tag)
			if c.Kind == ClassDeny || m.absent {
				continue // the driver does not know the class, or gives it no parameters
			}
			pointers := slices.Clone(c.Clear)
			var fds []int
			switch c.Kind {
			case ClassEvent:
				pointers = append(pointers, EventData) // a number that the driver compares
			case ClassInTask:
				pointers = append(pointers, OSDescDescriptor)
			case ClassMulticast:
				pointers = append(pointers, c.FDOff)
			default:
				if c.FDOff >= 0 {
					fds = append(fds, c.FDOff)
				}
			}
			if !slices.Equal(sorted(pointers), m.pointers) || !slices.Equal(sorted(c.ClientHandles), m.clients) || !slices.Equal(fds, m.fds) {
				t.Errorf("%s: %s: table has pointers %v, clients %v, descriptors %v; headers: %v", tag, c.Name, pointers, c.ClientHandles, fds, m)
			}
			if c.ParamsSize != m.size {
				t.Errorf("%s: %s: %d bytes, headers: %v", tag, c.Name, c.ParamsSize, m)
			}
		}
	}
}

// fields are a structure's fields by name, without the lengths of arrays.
func (m measured) fields() map[string]int {
	out := map[string]int{}
	for _, f := range strings.Fields(m.layout) {
		name, place, _ := strings.Cut(f, "@")
		off, _, _ := strings.Cut(place, ":")
		name, _, _ = strings.Cut(name, "[")
		if n, err := strconv.Atoi(off); err == nil {
			out[name] = n
		}
	}
	return out
}

// or is a field's offset, -1 if there is none of the name.
func or(fields map[string]int, names ...string) int {
	for _, name := range names {
		if off, ok := fields[name]; ok {
			return off
		}
	}
	return -1
}

// escapeStructs are the structures that escapes hand over; those that are "unknown" to a branch have no row there.
var escapeStructs = map[uint32]string{
	EscAllocMemory: "nv_ioctl_nvos02_parameters_with_fd", EscAllocObject: "NVOS05_PARAMETERS", EscFree: "NVOS00_PARAMETERS",
	EscControl: "NVOS54_PARAMETERS", EscDupObject: "NVOS55_PARAMETERS", EscShare: "NVOS57_PARAMETERS", EscI2CAccess: "NVOS_I2C_ACCESS_PARAMS",
	EscIdleChannels: "NVOS30_PARAMETERS", EscVidHeapControl: "NVOS32_PARAMETERS", EscAccessRegistry: "NVOS38_PARAMETERS",
	EscMapMemory: "nv_ioctl_nvos33_parameters_with_fd", EscUnmapMemory: "NVOS34_PARAMETERS", EscContextDMA: "NVOS39_PARAMETERS",
	EscMapDMA: "NVOS46_PARAMETERS", EscUnmapDMA: "NVOS47_PARAMETERS", EscBindContextDMA: "NVOS49_PARAMETERS",
	EscUpdateMapping: "NVOS56_PARAMETERS",
	EscCardInfo:      "nv_ioctl_card_info_t", EscRegisterFD: "nv_ioctl_register_fd_t", EscAllocOSEvent: "nv_ioctl_alloc_os_event_t",
	EscFreeOSEvent: "nv_ioctl_free_os_event_t", EscStatusCode: "nv_ioctl_status_code_t", EscCheckVersion: "nv_ioctl_rm_api_version_t",
	EscXferCmd: "nv_ioctl_xfer_t", EscQueryIntr: "nv_ioctl_query_device_intr_t", EscExportDMABuf: "nv_ioctl_export_to_dma_buf_fd_t",
}

// TestHeadersEscapes: an escape of a size that RMShaped does not know would run without the guard.
func TestHeadersEscapes(t *testing.T) {
	tags, rows := readHeaders(t)
	for _, tag := range tags {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		for nr, name := range escapeStructs {
			m := rows.at("struct", name, tag)
			if m.absent {
				continue
			}
			if !RMShaped(uint32(m.size)<<16 | nr) {
				t.Errorf("%s: %s has %d bytes, which RMShaped does not know", tag, name, m.size)
			}
			status := or(m.fields(), "status", "Status", "params.status")
			if off, ok := a.StatusOff(nr, m.size); nr != EscVidHeapControl && (ok != (status >= 0) || ok && off != status) {
				t.Errorf("%s: %s: status at %d, %v; headers: %d", tag, name, off, ok, status)
			}
		}
		for _, name := range []string{"NVOS21_PARAMETERS", "NVOS64_PARAMETERS"} {
			m := rows.at("struct", name, tag)
			f := m.fields()
			want := AllocForm{m.size, or(f, "paramsSize"), or(f, "flags"), or(f, "pRightsRequested"), or(f, "status")}
			if form, ok := a.AllocForm(m.size); !ok || form != want || !RMShaped(uint32(m.size)<<16|EscAlloc) {
				t.Errorf("%s: %s: %+v, %v; headers: %+v", tag, name, form, ok, want)
			}
		}
		m := rows.at("struct", "NVOS46_PARAMETERS", tag)
		f := m.fields()
		if form, ok := a.MapDMA(m.size); !ok || form != (DMAForm{or(f, "dmaOffset"), or(f, "length"), or(f, "status")}) {
			t.Errorf("%s: MapDMA(%d): %+v, %v; headers: %s", tag, m.size, form, ok, m.layout)
		}
		m = rows.at("struct", "NVOS47_PARAMETERS", tag)
		f = m.fields()
		if form, ok := a.UnmapDMA(m.size); !ok || form != (DMAForm{or(f, "dmaOffset"), or(f, "size"), or(f, "status")}) {
			t.Errorf("%s: UnmapDMA(%d): %+v, %v; headers: %s", tag, m.size, form, ok, m.layout)
		}
		if m = rows.at("struct", "nv_ioctl_export_to_dma_buf_fd_t", tag); !m.absent {
			if off, ok := DMABufHandles(m.size); !ok || off != or(m.fields(), "handles") {
				t.Errorf("%s: DMABufHandles(%d): %d, %v; headers: %s", tag, m.size, off, ok, m.layout)
			}
		}
		m = rows.at("struct", "NV2080_CTRL_PERF_GPUMON_PERFMON_UTIL_SAMPLE", tag)
		var pids []int
		for name, off := range m.fields() {
			if strings.HasSuffix(name, ".procId") {
				pids = append(pids, off)
			}
		}
		if form := a.GPUMon(); form.Entry != m.size || !slices.Equal(sorted(form.Pids), sorted(pids)) {
			t.Errorf("%s: GPUMon: %+v; headers: %s", tag, form, m.layout)
		}
	}
}

func TestHeadersUVM(t *testing.T) {
	tags, rows := readHeaders(t)
	for _, tag := range tags {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, cmd := range []uint32{UVMMapExternal, UVMFree, UVMUnmapExternal, UVMMapSparse, UVMAllocDeviceP2P, UVMRegisterGPU,
			UVMRegisterGPUVASpace, UVMUnregisterVASpace, UVMUnregisterGPU, UVMRegisterChannel, UVMUnregisterChannel, UVMValidateVARange} {
			m := rows.at("uvm", fmt.Sprintf("%#x", cmd), tag)
			form, ok := a.UVM(cmd)
			if m.absent && !ok {
				continue
			}
			f := m.fields()
			object := or(f, "hMemory", "hVaSpace", "hChannel")
			want := UVMForm{m.size, or(f, "base"), or(f, "length"), or(f, "rmCtrlFd"), or(f, "hClient"), object, or(f, "rmStatus")}
			if !ok || form != want {
				t.Errorf("%s: UVM(%d): %+v, %v; headers: %+v", tag, cmd, form, ok, want)
			}
		}
	}
}

// TestHeadersKnown: escapes and UVM calls that the filter does not know run natively, so each must have been looked at.
func TestHeadersKnown(t *testing.T) {
	tags, rows := readHeaders(t)
	known := map[string]bool{}
	for _, r := range readCSV(t) {
		known[fmt.Sprintf("%s %#x", r.kind, r.number)] = true
	}
	for _, l := range readEffects(t)[1:] {
		if n, err := strconv.ParseUint(l[1], 0, 32); err == nil {
			known[fmt.Sprintf("%s %#x", l[0], n)] = true
		}
	}
	for _, kind := range []string{"escape", "uvm"} {
		for id, changes := range rows[kind] {
			if !known[kind+" "+id] {
				t.Errorf("%s %s %v is in no table (of %d releases)", kind, id, changes, len(tags))
			}
		}
	}
}

// TestHeadersAccess: what the driver keeps for administrators or the kernel fails for a guard, which is neither; a control that
// becomes such is not what was looked at.
func TestHeadersAccess(t *testing.T) {
	tags, rows := readHeaders(t)
	for _, tag := range tags {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range controls {
			c, ok := a.Control(controls[i].id)
			if !ok || c.Kind == ControlDeny {
				continue
			}
			if m := rows.at("control", fmt.Sprintf("%#x", c.ID), tag); m.access != "" && !strings.Contains(m.access, "user") {
				t.Errorf("%s: %s is for %s", tag, c.Name, m.access)
			}
		}
		for i := range classes {
			c, _ := a.Class(classes[i].id)
			m := rows.at("class", fmt.Sprintf("%#x", c.ID), tag)
			if c.Kind == ClassDeny || m.absent {
				continue
			}
			if strings.HasPrefix(m.access, "admin") || strings.HasPrefix(m.access, "kernel") {
				t.Errorf("%s: class %s is for %s", tag, c.Name, m.access)
			}
			if needs, _, _ := strings.Cut(m.layout, " "); c.ParamsOptional != (needs == "RS_OPTIONAL") {
				t.Errorf("%s: class %s: optional %v, %s", tag, c.Name, c.ParamsOptional, needs)
			}
		}
	}
}

// insideBranches are the releases that changed, inside of their branch, the layout of what is let through. None is of a branch after 550,
// and each is early in its branch but 515.86.01, which changes a control, whose size the driver compares. So a release of a known branch is
// let in that is newer than those measured. Who has to add one here has found that this is not safe, and lets in only what was measured.
var insideBranches = []string{"515.86.01", "535.43.08", "535.54.03", "535.86.05", "550.40.53"}

func TestInsideBranches(t *testing.T) {
	tags, rows := readHeaders(t)
	for i, tag := range tags[1:] {
		a, err := ForDriver(tag, false)
		if err != nil {
			t.Fatal(err)
		}
		if before, _ := ParseVersion(tags[i]); before.Major != a.version.Major {
			continue
		}
		var changed []string
		look := func(kind, id string) {
			old, now := rows.at(kind, id, tags[i]), rows.at(kind, id, tag)
			if !old.absent && !now.absent && (old.String() != now.String() || old.layout != now.layout) {
				changed = append(changed, fmt.Sprintf("%s %s: %v %s, then %v %s", kind, id, old, old.layout, now, now.layout))
			}
		}
		for j := range controls {
			if c, ok := a.Control(controls[j].id); ok && c.Kind != ControlDeny {
				look("control", fmt.Sprintf("%#x", c.ID))
			}
		}
		for j := range classes {
			if c, _ := a.Class(classes[j].id); c.Kind != ClassDeny {
				look("class", fmt.Sprintf("%#x", c.ID))
			}
		}
		for _, kind := range []string{"struct", "uvm"} {
			for id := range rows[kind] {
				look(kind, id)
			}
		}
		if slices.Contains(insideBranches, tag) != (len(changed) > 0) {
			t.Errorf("%s changed inside of its branch: %s", tag, strings.Join(changed, "; "))
		}
	}
}
