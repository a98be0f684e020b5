// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// TestRows: the sizes in pkg/rm's tables are those that were measured.
func TestRows(t *testing.T) {
	facts, tags, err := readTable(filepath.Join(root, facts))
	if err != nil {
		t.Fatal(err)
	}
	files, err := rows(facts, tags, root)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		have, lines := strings.Split(string(b), "\n"), strings.Split(want, "\n")
		for i := range have {
			if have[i] != lines[i] {
				t.Errorf("%s:%d: the row says\n%s\nand the headers\n%s\nrun: go run ./hack/drivers rows", path, i+1, have[i], lines[i])
			}
		}
	}
}

// TestPage: docs/drivers.md is made of what was measured.
func TestPage(t *testing.T) {
	want, err := matrix(root)
	if err != nil {
		t.Fatal(err)
	}
	if have, err := os.ReadFile(filepath.Join(root, page)); err != nil || string(have) != want {
		t.Errorf("%s is stale (%v); run: make drivers", page, err)
	}
}

func TestTable(t *testing.T) {
	size, name := key{"class", "0x40"}, key{"code", "f"}
	tab := table{}
	tab.add("515.1", map[key]string{size: "4,,,,,a", name: "0,,,,,x"})
	tab.add("515.2", map[key]string{size: "4,,,,,a", name: "0,,,,,y"})
	tab.add("520.1", map[key]string{name: "0,,,,,y"})
	tab.add("525.1", map[key]string{size: "8,,,,,b", name: "0,,,,,y"})
	var b bytes.Buffer
	tab.write(&b, []string{"515.1", "515.2", "520.1", "525.1"})
	file := filepath.Join(t.TempDir(), "params.csv")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	again, tags, err := readTable(file)
	if err != nil || len(tags) != 4 {
		t.Fatal(tags, err)
	}
	for tag, want := range map[string]string{"510.1": absent, "515.1": "4,,,,,a", "515.9": "4,,,,,a", "520.1": absent,
		"522.1": absent, "525.2": "8,,,,,b"} {
		if f := again.at(size, tag); f != want {
			t.Errorf("%s: %s, want %s", tag, f, want)
		}
	}
	if list := sizeList(again, tags, size, 0, 1<<30); list != "{0, 4}, {525_000_00, 8}" {
		t.Error(list)
	}
	if list := sizeList(again, tags, size, 520, 1<<30); list != "{0, 8}" {
		t.Error(list)
	}
	again[size][1] = change{"515.2", "6,,,,,c"} // inside of a branch
	if list := sizeList(again, tags, size, 0, 1<<30); list != "{0, 4}, {515_002_00, 6}, {525_000_00, 8}" {
		t.Error(list)
	}
}

// release is a tree in the shape of NVIDIA's, with one of everything; more is a field that a structure has more.
func release(t *testing.T, tag, more string) snapshot {
	t.Helper()
	tr := tree{t.TempDir(), tag}
	for path, text := range map[string]string{
		sdk +
			"/nvtypes.h": "typedef unsigned NvU32; typedef unsigned NvHandle; typedef void *NvP64; typedef unsigned char NvU8; typedef unsigned " +
			"long long NvU64;",
		sdk + "/nvstatus.h": "", sdk + "/nvos.h": "typedef struct { NvHandle hRoot; NvU32 status; } NVOS00_PARAMETERS;",
		sdk + "/ctrl/ctrl0000.h": `typedef struct { NvHandle hClient; NvU32 count; ` + more + ` union { NvP64 list; NvU64 other; } u; int fd; } NV0000_CTRL_A_PARAMS;
#define NV0000_CTRL_CMD_A (0x101U) /* finn: Evaluated from "(FINN_NV01_ROOT_SYSTEM_INTERFACE_ID << 8) | NV0000_CTRL_A_PARAMS_MESSAGE_ID" */
`,
		sdk + "/class/cl0040.h": "#define NV01_MEMORY_LOCAL_USER (0x00000040U)\n#define NV01_EVENT (0x00000005U)\n",
		sdk + "/alloc/alloc.h":  "typedef struct { NvU64 size; } NV_MEMORY_ALLOCATION_PARAMS;",
		"src/nvidia/inc/kernel/rmapi/control.h": "#define RMCTRL_FLAGS_PRIVILEGED 0x4\n#define RMCTRL_FLAGS_NON_PRIVILEGED " +
			"0x10\n#define RMCTRL_FLAGS_INTERNAL 0x400\n",
		"src/nvidia/generated/g_client_nvoc.c": "/*flags=*/      0x10u,\n/*accessRight=*/0x0u,\n/*methodId=*/   " +
			"0x101u,\n/*paramSize=*/  sizeof(NV0000_CTRL_A_PARAMS),\n/*flags=*/      0x14u,\n/*accessRight=*/0x2u,\n/*methodId=*/   " +
			"0x102u,\n/*paramSize=*/  0,\n",
		"src/nvidia/generated/g_other_nvoc.c": "/*flags=*/      0x4u,\n/*accessRight=*/0x0u,\n/*methodId=*/   " +
			"0x101u,\n/*paramSize=*/  sizeof(NV0000_CTRL_A_PARAMS),\n",
		kernel +
			"/rmapi/resource_list.h": "RS_ENTRY(\n/* External Class */ NV01_MEMORY_LOCAL_USER,\n/* Alloc Param Info */ " +
			"RS_REQUIRED(NV_MEMORY_ALLOCATION_PARAMS),\n/* Flags */ RS_FLAGS_NONE |\nRS_FLAGS_ALLOC_NON_PRIVILEGED,\n/* Required Access Rights */ " +
			"RS_ACCESS_NONE\n)\nRS_ENTRY(\n/* External Class */ NV01_EVENT,\n/* Alloc Param Info */ RS_NONE,\n/* Flags */ " +
			"RS_FLAGS_ALLOC_PRIVILEGED,\n/* Required Access Rights */ RS_ACCESS_NONE\n)\n",
		arch + "/include/nv-ioctl.h":                "typedef struct { int ctl_fd; } nv_ioctl_register_fd_t;",
		arch + "/include/nv_escape.h":               "#define NV_ESC_RM_FREE 0x29\n#define NV_ESC_RM_UNUSED 0x33\n",
		"kernel-open/common/inc/nv-ioctl-numbers.h": "#define NV_ESC_CARD_INFO (NV_IOCTL_BASE + 0)\n",
		arch + "/src/escape.c":                      "/* NV_ESC_RM_UNUSED */ case NV_ESC_RM_FREE: " + more,
		arch + "/src/osapi.c":                       "",
		"kernel-open/nvidia/nv.c": "int\nnvidia_ioctl(\n    int cmd)\n{\n    // NV_ESC_CARD_INFO\n    return " +
			"NV_ESC_CARD_INFO;\n}\nint nvidia_mmap(void);\n",
		arch + "/include/nv-unix-nvos-params-wrappers.h": "",
		"kernel-open/nvidia-uvm/uvm_ioctl.h": "#define UVM_FREE UVM_IOCTL_BASE(34)\n#define UVM_OLD UVM_IOCTL_BASE(1)\ntypedef " +
			"struct { NvU64 base; NvU32 rmStatus; } UVM_FREE_PARAMS;",
		"kernel-open/nvidia-uvm/uvm_linux_ioctl.h": "#define UVM_INITIALIZE 0x30000001\n#define UVM_INIT_FLAGS_X 0x1\n",
		"kernel-open/nvidia-uvm/uvm.c": "static long uvm_ioctl(int cmd)\n{\n UVM_ROUTE_CMD(UVM_FREE, free);\n " +
			"UVM_ROUTE_CMD(UVM_INITIALIZE, init);\n}\nstatic void\nchanges(void)\n{\n" + more + "\n}\n",
	} {
		file := filepath.Join(tr.dir, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := snapshot{tag: tag, controls: tr.controls(), classes: tr.classes(), uvm: tr.uvmCalls(), escapes: tr.escapes(),
		code: tr.codeText(), tree: tr}
	var err error
	if s.layouts, err = tr.layouts(); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestFacts: what is read out of a release.
func TestFacts(t *testing.T) {
	have := release(t, "515.1", "").facts()
	var controls []string
	for k, f := range have {
		if k.kind != "code" {
			f = k.kind + " " + k.id + " " + f[:strings.LastIndex(f, ",")]
			controls = append(controls, f)
		}
	}
	slices.Sort(controls)
	want := []string{
		"class 0x40 8,,,,user", "class 0x5 0,,,,admin",
		"control 0x101 24,8,0,16,admin user", // pointer in a union, by two tables for two kinds of caller
		"control 0x102 0,,,,user+0x2",
		"escape 0x29 0,,,,", "escape 0xc8 0,,,,",
		"struct NVOS00_PARAMETERS 8,,,,", "struct nv_ioctl_register_fd_t 4,,,,",
		"uvm 0x22 16,,,,", "uvm 0x30000001 0,,,,",
	}
	if !slices.Equal(controls, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(controls, "\n"), strings.Join(want, "\n"))
	}
	if f := have[key{"uvm", "0x22"}]; f != "16,,,,,UVM_FREE base@0:8 rmStatus@8:4" {
		t.Error(f)
	}
	if have[key{"code", "nvidia_ioctl"}] == "" || have[key{"code", "nvidia_mmap"}] != "" {
		t.Errorf("code: %v", have)
	}
}

// TestDiff: what changed is told, and that it matters.
func TestDiff(t *testing.T) {
	a, b := release(t, "515.1", ""), release(t, "520.1", "NvU64 added;")
	effects := filepath.Join(t.TempDir(), "effects.csv")
	if err := os.WriteFile(effects, []byte("kind,number,source\nuvm,0x22,uvm.c:uvm_ioctl\nuvm,0x23,uvm.c:gone\nuvm,0x24,K/uvm.c:changes\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if relevant, err := diff(&out, effects, a, b, true); err != nil || !relevant {
		t.Error(relevant, err)
	}
	for _, want := range []string{
		"515.1 -> 520.1", "look at each: 1\n",
		"control 0x101 NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION: size 24 -> 32; pointers 8 -> 16; fds 16 -> 24",
		"+added@8:8", "-fd@16:4 ", "pointers: read it (-code): 1\n  escape.c\n",
		"any more (-code): 2\n  uvm.c:gone (0x23): not found\n  K/uvm.c:changes (0x24)\n",
		"+case NV_ESC_RM_FREE: NvU64 added;",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	out.Reset()
	if relevant, err := diff(&out, effects, a, release(t, "515.2", ""), false); err != nil || relevant {
		t.Errorf("%v, of importance: %s", err, &out)
	}
}
