// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"encoding/csv"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// testdata/rm-abi.csv was measured on its own: sizes and offsets compiled from the headers of 14 tags, and the decision
// for every call. These tests hold the tables against it.

type csvRow struct {
	kind, name   string
	number       uint32
	size         int // 0: not given
	fields       map[string]int
	since, until string
	action       string
}

// readRecords reads a table without its first line, which names the columns.
func readRecords(t *testing.T, path string) [][]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	records, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	return records[1:]
}

func readCSV(t *testing.T) []csvRow {
	t.Helper()
	var rows []csvRow
	for _, r := range readRecords(t, "testdata/rm-abi.csv") {
		row := csvRow{kind: r[0], name: r[1], since: r[6], until: r[7], action: r[9], fields: map[string]int{}}
		if r[2] != "" {
			n, err := strconv.ParseUint(r[2], 0, 32)
			if err != nil {
				t.Fatal(err)
			}
			row.number = uint32(n)
		}
		row.size, _ = strconv.Atoi(r[4])
		for _, f := range strings.Fields(r[5]) {
			name, rest, _ := strings.Cut(f, "@")
			off, _, _ := strings.Cut(rest, ":")
			if n, err := strconv.Atoi(off); err == nil {
				row.fields[name] = n
			}
		}
		rows = append(rows, row)
	}
	if len(rows) < 300 {
		t.Fatalf("only %d rows", len(rows))
	}
	return rows
}

// abis are the ABIs that a row holds for: both of its ends, or the oldest and the newest.
func (r csvRow) abis(t *testing.T) []*ABI {
	t.Helper()
	from, to := r.since, r.until
	if from == "" {
		from = "515.43.04"
	}
	if to == "" {
		to = "595.45.04"
	}
	var out []*ABI
	for _, v := range []string{from, to} {
		a, err := ForDriver(v, false)
		if err != nil {
			t.Fatalf("%s: %v", r.name, err)
		}
		out = append(out, a)
	}
	return out
}

func TestCSVEscapes(t *testing.T) {
	trapped := 0
	for _, r := range readCSV(t) {
		if r.kind != "escape" || strings.HasSuffix(r.name, "(inner)") || r.size == 0 || !Trapped(r.number) {
			continue
		}
		if UVMShaped(r.number) {
			continue // an escape that only shares its number with a UVM call
		}
		trapped++
		if cmd := uint32(r.size)<<16 | r.number; !RMShaped(cmd) {
			t.Errorf("RMShaped(%#x) = false, but %s has that size", cmd, r.name)
		}
		for _, a := range r.abis(t) {
			off, ok := r.fields["status"]
			if !ok {
				off, ok = r.fields["Status"]
			}
			got, gotOK := a.StatusOff(r.number, r.size)
			if r.number == EscAllocMemory {
				off, ok = 40, true // in the structure at 0
			}
			if ok != gotOK || ok && got != off {
				t.Errorf("%v: StatusOff(%#x, %d) = %d, %v, want %d, %v", a.Version(), r.number, r.size, got, gotOK, off, ok)
			}
			if r.number == EscAlloc {
				checkAllocForm(t, a, r)
			}
			if r.number == EscExportDMABuf {
				if h, ok := DMABufHandles(r.size); !ok || h != r.fields["handles"] {
					t.Errorf("DMABufHandles(%d) = %d, %v", r.size, h, ok)
				}
			}
		}
	}
	if trapped < 15 {
		t.Errorf("only %d rows of trapped escapes", trapped)
	}
}

func checkAllocForm(t *testing.T, a *ABI, r csvRow) {
	t.Helper()
	f, ok := a.AllocForm(r.size)
	if !ok {
		t.Errorf("%v: no AllocForm(%d)", a.Version(), r.size)
		return
	}
	want := func(name string) int {
		if off, ok := r.fields[name]; ok {
			return off
		}
		return -1
	}
	if f != (AllocForm{r.size, want("paramsSize"), want("flags"), want("pRightsRequested"), want("status")}) {
		t.Errorf("%v: AllocForm(%d) = %+v, want %v", a.Version(), r.size, f, r.fields)
	}
}

// The constants of layout.go by the names that the table gives the fields.
func TestCSVLayouts(t *testing.T) {
	type field struct {
		name string
		off  int
	}
	want := map[string][]field{
		"escape/0x29": {{"hRoot", FreeRoot}, {"hObjectParent", FreeParent}, {"hObjectOld", FreeObject}, {"status", FreeStatus}},
		"escape/0x2a": {{"hClient", ControlClient}, {"hObject", ControlObject}, {"cmd", ControlCmd}, {"flags", ControlFlags},
			{"params", ControlParams}, {"paramsSize", ControlParamsSize}, {"status", ControlStatus}},
		"escape/0x2b": {{"hRoot", AllocRoot}, {"hObjectParent", AllocParent}, {"hObjectNew", AllocObject}, {"hClass", AllocClass},
			{"pAllocParms", AllocParams}},
		"escape/0x34": {{"hClient", DupClient}, {"hParent", DupParent}, {"hObject", DupObject}, {"hClientSrc", DupClientSrc},
			{"hObjectSrc", DupObjectSrc}, {"flags", DupFlags}, {"status", DupStatus}},
		"escape/0x35": {{"hClient", ShareClient}, {"hObject", ShareObject}, {"sharePolicy", SharePolicy}, {"status", ShareStatus}},
		"escape/0x4a": {{"function", HeapFunction}, {"hVASpace", HeapVASpace}, {"status", HeapStatus}, {"total", HeapTotal}, {"free", HeapFree}},
		"escape/0xc8": {{"valid", CardInfoValid}, {"gpu_id", CardInfoGPUID}, {"interrupt_line", CardInfoIRQ}, {"fb_address", CardInfoFBAddr},
			{"fb_size", CardInfoFBSize}, {"minor_number", CardInfoMinor}},
		"escape/0xd1": {{"domain", StatusCodeDomain}, {"bus", StatusCodeBus}, {"slot", StatusCodeSlot}, {"status", StatusCodeStatus}},
		"escape/0xd3": {{"cmd", XferCmd}, {"size", XferLength}, {"ptr", XferPtr}},
		"escape/0xd9": {{"fd", DMABufFD}, {"hClient", DMABufClient}, {"totalObjects", DMABufTotalObjects}, {"numObjects", DMABufNumObjects},
			{"index", DMABufIndex}},
		"escape/0xce":  {{"hClient", OSEventClient}, {"fd", OSEventFD}, {"Status", OSEventStatus}},
		"nvos32fn/0x2": {{"hMemory", HeapAllocMemory}, {"flags", HeapAllocFlags}, {"attr", HeapAllocAttr}, {"size", HeapAllocSize}},
		"nvos32fn/0x3": {{"hMemory", HeapFreeMemory}, {"flags", HeapFreeFlags}},
		"nvos32fn/0x5": {{"offset", HeapInfoOffset}, {"size", HeapInfoSize}, {"base", HeapInfoBase}},
		"nvos32fn/0x6": {{"hMemory", HeapAllocMemory}, {"flags", HeapAllocFlags}, {"height", HeapTiledHeight}, {"pitch", HeapTiledPitch},
			{"attr", HeapTiledAttr}, {"size", HeapAllocSize}},
		"nvos32fn/0xe": {{"hMemory", HeapAllocMemory}, {"flags", HeapAllocFlags}, {"attr", HeapAllocAttr}, {"size", HeapAllocRangeSize}},
		"class/0x40": {{"flags", MemoryFlags}, {"attr", MemoryAttr}, {"attr2", MemoryAttr2}, {"size", MemorySize}, {"alignment", MemoryAlignment},
			{"offset", MemoryOffset}, {"limit", MemoryLimit}, {"hVASpace", MemoryVASpace},
			{"internalflags", MemoryInternalFlags}, {"tag", MemoryTag}},
		"class/0x71": {{"type", OSDescType}, {"flags", OSDescFlags}, {"attr", OSDescAttr}, {"descriptor", OSDescDescriptor},
			{"limit", OSDescLimit}},
		"class/0x79": {{"hParentClient", EventParentClient}, {"hSrcResource", EventSrcResource}, {"hClass", EventClass},
			{"notifyIndex", EventNotifyIndex}, {"data", EventData}},
		"class/0x80": {{"deviceId", DeviceID}, {"hClientShare", DeviceClientShare}, {"hTargetClient", DeviceTargetClient},
			{"flags", DeviceFlags}, {"vaMode", DeviceVAMode}},
		"class/0x90f1": {{"index", VASpaceIndex}, {"flags", VASpaceFlags}},
		"class/0xa06c": {{"engineType", TSGEngineType}},
		"class/0xc86f": {{"flags", ChannelFlags}, {"hContextShare", ChannelContextShare}, {"hVASpace", ChannelVASpace},
			{"engineType", ChannelEngineType}},
		"control/0x20801303": {{"fbInfoListSize", FBInfoCount}, {"fbInfoList", FBInfoList}},
		"control/0x20801301": {{"fbInfoListSize", FBInfoV1Count}, {"fbInfoList", FBInfoV1List}},
		"control/0x2080018d": {{"idType", PidsIDType}, {"id", PidsID}, {"pidTblCount", PidsCount}, {"pidTbl", PidsTable}},
		"control/0x20802096": {{"count", GPUMonCount}, {"samples", GPUMonSamples}},
		"control/0x288":      {{"numDevices", ActiveDevicesCount}, {"devices", ActiveDevicesList}},
		"control/0x274":      {{"gpuUuid", UUIDQueryUUID}, {"flags", UUIDQueryFlags}, {"gpuId", UUIDQueryGPUID}},
		"control/0x215":      {{"failedId", GPUIDFailedID}},
		"control/0x20801210": {{"flags", PreemptFlags}, {"hChannel", PreemptChannel}, {"gfxpPreemptMode", PreemptGFXP},
			{"cilpPreemptMode", PreemptCILP}},
		"control/0x3d05": {{"object", ExportFDObject}, {"fd", ExportFDFD}, {"flags", ExportFDFlags}},
		"control/0x3d06": {{"fd", ImportFDFD}, {"object", ImportFDObject}},
		"uvm/0x30000001": {{"flags", UVMInitializeFlags}, {"rmStatus", UVMInitializeStatus}},
	}
	seen := map[string]bool{}
	for _, r := range readCSV(t) {
		key := r.kind + "/0x" + strconv.FormatUint(uint64(r.number), 16)
		if strings.HasSuffix(r.name, "(entry)") || strings.HasSuffix(r.name, "(inner)") {
			continue
		}
		seen[key] = true
		for _, f := range want[key] {
			if off, ok := r.fields[f.name]; !ok || off != f.off {
				t.Errorf("%s %s.%s: constant says %d, table says %d (%v)", key, r.name, f.name, f.off, off, ok)
			}
		}
	}
	for key := range want {
		if !seen[key] {
			t.Errorf("%s is not in the table", key)
		}
	}
}

func TestCSVClasses(t *testing.T) {
	_, headers := readHeaders(t)
	for _, r := range readCSV(t) {
		if r.kind != "class" {
			continue
		}
		for _, a := range r.abis(t) {
			c, ok := a.Class(r.number)
			if strings.HasPrefix(r.action, "deny") || strings.HasPrefix(r.action, "kernel") {
				if ok && c.Kind != ClassDeny {
					t.Errorf("%v: class %#x %s is allowed, the table says %s", a.Version(), r.number, r.name, r.action)
				}
				continue
			}
			if !ok || c.Kind == ClassDeny {
				switch r.number {
				case 0x3f, 0x42, 0xc639, 0xc640: // register aperture; coherent hosts only; MIG administration
				default:
					t.Errorf("%v: class %#x %s is not allowed, the table says %s", a.Version(), r.number, r.name, r.action)
				}
				continue
			}
			if headers.at("class", fmt.Sprintf("%#x", r.number), a.Version().String()).absent {
				continue // this driver does not have it yet
			}
			if r.size != 0 && c.ParamsSize != r.size {
				t.Errorf("%v: class %#x %s: %d bytes, want %d", a.Version(), r.number, r.name, c.ParamsSize, r.size)
			}
			if off, ok := r.fields["pOsEvent"]; ok && c.FDOff != off {
				t.Errorf("%v: class %#x: pOsEvent at %d, want %d", a.Version(), r.number, c.FDOff, off)
			}
			if off, ok := r.fields["map.hVidMem"]; ok &&
				(a.Fabric().Memory != off || a.Fabric().Flags != r.fields["allocFlags"] || r.fields["allocSize"] != FabricSize) {
				t.Errorf("%v: fabric objects at %+v, want %v", a.Version(), a.Fabric(), r.fields)
			}
		}
	}
}

func TestCSVControls(t *testing.T) {
	for _, r := range readCSV(t) {
		if r.kind != "control" {
			continue
		}
		entry := strings.HasSuffix(r.name, "(entry)")
		for _, a := range r.abis(t) {
			c, ok := a.Control(r.number)
			if entry {
				if r.number == 0x20802096 {
					checkGPUMon(t, a, r)
				} else if r.size != PidInfoEntry || r.fields["data"] != PidInfoPrivate {
					t.Errorf("%s: %d bytes, data at %d", r.name, r.size, r.fields["data"])
				}
				continue
			}
			allowed := ok && c.Kind != ControlDeny
			if denied(r.action) {
				if allowed {
					t.Errorf("%v: control %#x %s is allowed, the table says %s", a.Version(), r.number, r.name, r.action)
				}
				continue
			}
			if !allowed {
				switch r.number {
				case 0x20801103, 0x2080a083: // client handles in a list; pids behind a pointer in firmware
				case 0xfd0102:
					if a.branch >= 530 { // 525 has a file descriptor in it
						t.Errorf("%v: control 0xfd0102 is not allowed", a.Version())
					}
				default:
					if r.since != "" || r.size != 0 { // others may be younger than the oldest driver
						t.Errorf("%v: control %#x %s is not allowed, the table says %s", a.Version(), r.number, r.name, r.action)
					} else if a.branch == 595 && r.until == "" {
						t.Errorf("%v: control %#x %s is not allowed, the table says %s", a.Version(), r.number, r.name, r.action)
					}
				}
				continue
			}
			if r.size != 0 && c.Size != r.size {
				t.Errorf("%v: control %#x %s: %d bytes, want %d", a.Version(), r.number, r.name, c.Size, r.size)
			}
			for _, name := range []string{"fd", "devDescriptor"} {
				if off, ok := r.fields[name]; ok && c.FDOff != off {
					t.Errorf("%v: control %#x: descriptor at %d, want %d", a.Version(), r.number, c.FDOff, off)
				}
			}
		}
	}
}

func denied(action string) bool {
	if strings.Contains(action, "hidden") {
		return false
	}
	return strings.HasPrefix(strings.ToLower(action), "deny") || action == "kernel only" || action == "guard only"
}

func checkGPUMon(t *testing.T, a *ABI, r csvRow) {
	t.Helper()
	f := a.GPUMon()
	if f.Entry != r.size {
		t.Errorf("%v: sample of %d bytes, want %d", a.Version(), f.Entry, r.size)
	}
	i := 0
	for _, engine := range []string{"fb", "gr", "nvenc", "nvdec", "nvjpg", "nvofa"} {
		off, ok := r.fields[engine]
		if !ok {
			continue
		}
		if i >= len(f.Pids) || f.Pids[i] != off+8 {
			t.Errorf("%v: %s pid: %v, want [%d] = %d", a.Version(), engine, f.Pids, i, off+8)
		}
		i++
	}
	if i != len(f.Pids) {
		t.Errorf("%v: %d engines, want %d", a.Version(), len(f.Pids), i)
	}
}

func TestCSVUVM(t *testing.T) {
	n := 0
	for _, r := range readCSV(t) {
		if r.kind != "uvm" || r.size == 0 || !strings.Contains(strings.Join(keys(r.fields), " "), "rmStatus") {
			continue
		}
		for _, a := range r.abis(t) {
			f, ok := a.UVM(r.number)
			if !ok {
				continue
			}
			n++
			want := func(name string) int {
				if off, ok := r.fields[name]; ok {
					return off
				}
				return -1
			}
			object := max(want("hMemory"), want("hVaSpace"), want("hChannel"))
			if w := (UVMForm{r.size, want("base"), want("length"), want("rmCtrlFd"), want("hClient"), object, want("rmStatus")}); f != w {
				t.Errorf("%v: UVM(%d) = %+v, want %+v", a.Version(), r.number, f, w)
			}
		}
	}
	if n < 24 {
		t.Errorf("only %d forms compared", n)
	}
}

func keys(m map[string]int) []string {
	var s []string
	for k := range m {
		s = append(s, k)
	}
	return s
}

func TestCSVStatus(t *testing.T) {
	byName := map[string]uint32{
		"NV_OK": StatusOK, "NV_ERR_INSUFFICIENT_RESOURCES": StatusInsufficientResources,
		"NV_ERR_INSUFFICIENT_PERMISSIONS": StatusInsufficientPermissions, "NV_ERR_INVALID_CLIENT": StatusInvalidClient,
		"NV_ERR_NO_MEMORY": StatusNoMemory, "NV_ERR_NOT_SUPPORTED": StatusNotSupported, "NV_ERR_OBJECT_NOT_FOUND": StatusObjectNotFound,
	}
	for _, r := range readCSV(t) {
		if r.kind == "status" && (byName[r.name] != r.number || StatusName(r.number) != r.name) {
			t.Errorf("%s = %#x, want %#x; StatusName: %s", r.name, byName[r.name], r.number, StatusName(r.number))
		}
	}
	// Every constant sits under its own name.
	for code, name := range map[uint32]string{StatusInvalidArgument: "NV_ERR_INVALID_ARGUMENT", StatusInvalidObject: "NV_ERR_INVALID_OBJECT",
		StatusInvalidObjectHandle: "NV_ERR_INVALID_OBJECT_HANDLE", StatusInvalidClass: "NV_ERR_INVALID_CLASS", StatusInUse: "NV_ERR_IN_USE",
		StatusInvalidParamStruct: "NV_ERR_INVALID_PARAM_STRUCT", StatusInvalidPointer: "NV_ERR_INVALID_POINTER", StatusGeneric: "NV_ERR_GENERIC",
		StatusInvalidState: "NV_ERR_INVALID_STATE", StatusInvalidAddress: "NV_ERR_INVALID_ADDRESS",
		StatusInsertDuplicateName: "NV_ERR_INSERT_DUPLICATE_NAME",
		StatusOperatingSystem:     "NV_ERR_OPERATING_SYSTEM", StatusTimeout: "NV_ERR_TIMEOUT", StatusInvalidLimit: "NV_ERR_INVALID_LIMIT"} {
		if StatusName(code) != name {
			t.Errorf("StatusName(%#x) = %s, want %s", code, StatusName(code), name)
		}
	}
}
