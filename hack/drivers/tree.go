// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	sdk     = "src/common/sdk/nvidia/inc"
	arch    = "src/nvidia/arch/nvalloc/unix"
	kernel  = "src/nvidia/src/kernel"
	outdate = "src/nvidia/interface/deprecated" // calls of old libraries, turned into new ones
)

// tree is one release of NVIDIA's open kernel modules, unpacked.
type tree struct{ dir, tag string }

// files are all of its C files.
func (t tree) files() (out []string) {
	filepath.WalkDir(t.dir, func(path string, _ fs.DirEntry, err error) error { // what cannot be read is not found, which is told
		if err == nil && strings.HasSuffix(path, ".c") {
			out = append(out, strings.TrimPrefix(path, t.dir))
		}
		return nil
	})
	return out
}

// unpack takes a release out of a git directory that the caller brings. The caller removes the folder.
func unpack(git, tag string) (tree, error) {
	dir, err := os.MkdirTemp("", "drivers")
	if err != nil {
		return tree{}, err
	}
	const script = `set -o pipefail
		git --git-dir="$1" archive "$2" kernel-open/{common/inc,nvidia,nvidia-uvm} src/common/sdk src/nvidia | tar x -C "$3"`
	if out, err := exec.Command("bash", "-c", script, "bash", git, tag, dir).CombinedOutput(); err != nil {
		os.RemoveAll(dir)
		return tree{}, fmt.Errorf("%s: git archive: %w: %s", tag, err, out)
	}
	return tree{dir, tag}, nil
}

func (t tree) read(path string) string {
	b, err := os.ReadFile(filepath.Join(t.dir, path))
	if err != nil {
		return "" // not every branch has every file
	}
	return string(b)
}

// glob lists files by a pattern, as paths inside the tree.
func (t tree) glob(pattern string) []string {
	files, _ := filepath.Glob(filepath.Join(t.dir, pattern))
	for i, f := range files {
		files[i] = strings.TrimPrefix(f, t.dir+"/")
	}
	return files
}

// control is what the driver's own method tables and headers say of a control.
type control struct {
	params string // its structure; none if empty
	access string // who may make it: user, admin, kernel; more than one if it is in several tables
	flags  string
}

var (
	method = regexp.MustCompile(`/\*flags=\*/\s*(0x[0-9a-f]+)u?,\s*/\*accessRight=\*/\s*(0x[0-9a-f]+)u?,\s*` +
		`/\*methodId=\*/\s*(0x[0-9a-f]+)u?,\s*/\*paramSize=\*/\s*(?:sizeof\((NV\w+)\)|0)`)
	flagDef = regexp.MustCompile(`(?m)^#define\s+RMCTRL_FLAGS_(\w+)\s+(0x[0-9A-Fa-f]+)`)
	message = regexp.MustCompile(`(?m)^#define\s+NV\w*_CTRL_\w+\s+\(?(0x[0-9A-Fa-f]+)U?\)?.*\| (NV\w+)_MESSAGE_ID`)
	entry   = regexp.MustCompile(`(?s)External Class\s*\*/\s*(\w+),.*?Alloc Param Info\s*\*/\s*(RS_\w+)(?:\((\w+)\))?,` +
		`.*?Flags\s*\*/(.*?)/\*\s*Required Access Rights\s*\*/([^\n]*)`)
	define  = regexp.MustCompile(`(?m)^#define\s+(\w+)\s+\(?(0x[0-9A-Fa-f]+)U?\)?`)
	uvmCall = regexp.MustCompile(`(?m)^#define\s+(UVM_\w+)\s+(?:UVM_IOCTL_BASE\((\d+)\)|(0x3[0-9a-fA-F]{7}))`)
	escape  = regexp.MustCompile(`(?m)^#define\s+(NV_ESC_\w+)\s+(?:\(NV_IOCTL_BASE\s*\+\s*(\d+)\)|(0x[0-9a-fA-F]+))`)
)

func number(s string) uint32 {
	n, _ := strconv.ParseUint(s, 0, 32)
	return uint32(n)
}

// controls are all of the driver's. The values of the flags differ from branch to branch, so they are told by name.
func (t tree) controls() map[uint32]control {
	out := map[uint32]control{}
	for _, h := range slices.Concat(t.glob(sdk+"/ctrl/*.h"), t.glob(sdk+"/ctrl/*/*.h")) {
		for _, m := range message.FindAllStringSubmatch(t.read(h), -1) {
			out[number(m[1])] = control{params: m[2]}
		}
	}
	names := map[string]uint32{}
	for _, m := range flagDef.FindAllStringSubmatch(t.read("src/nvidia/inc/kernel/rmapi/control.h"), -1) {
		names[m[1]] = number(m[2])
	}
	for _, f := range t.glob("src/nvidia/generated/g_*_nvoc.c") {
		for _, m := range method.FindAllStringSubmatch(t.read(f), -1) {
			c := out[number(m[3])]
			if m[4] != "" {
				c.params = m[4]
			}
			c.access = union(c.access, access(number(m[1]), number(m[2]), names))
			c.flags = union(c.flags, flagNames(number(m[1]), names)...)
			out[number(m[3])] = c
		}
	}
	return out
}

// access is who may make a control, by its flags (rmapiControlWithSecInfo); +0x.. are access rights that it asks for besides.
func access(flags, rights uint32, names map[string]uint32) string {
	who := "kernel"
	switch {
	case flags&names["INTERNAL"] != 0:
	case flags&names["NON_PRIVILEGED"] != 0:
		who = "user"
	case flags&names["PRIVILEGED"] != 0:
		who = "admin"
	}
	if rights != 0 {
		who += fmt.Sprintf("+%#x", rights)
	}
	return who
}

func flagNames(flags uint32, names map[string]uint32) (out []string) {
	for name, bit := range names {
		if bit != 0 && bit&(bit-1) == 0 && flags&bit != 0 {
			out = append(out, name)
		}
	}
	return out
}

// union adds words to a list of words.
func union(list string, words ...string) string {
	all := append(strings.Fields(list), words...)
	slices.Sort(all)
	return strings.Join(slices.Compact(all), " ")
}

// class is what resource_list.h says of a class.
type class struct {
	params string // its structure; none if empty
	needs  string // RS_REQUIRED, RS_OPTIONAL or RS_NONE: whether the driver takes a null pointer
	access string // who may make one; not said before 545
}

func (t tree) classes() map[uint32]class {
	ids := map[string]uint32{}
	for _, f := range append(t.glob(sdk+"/class/*.h"), "src/nvidia/generated/g_allclasses.h") {
		for _, m := range define.FindAllStringSubmatch(t.read(f), -1) {
			ids[m[1]] = number(m[2])
		}
	}
	out := map[uint32]class{}
	for _, m := range entry.FindAllStringSubmatch(t.read(kernel+"/rmapi/resource_list.h"), -1) {
		if id, ok := ids[m[1]]; ok {
			out[id] = class{m[3], m[2], classAccess(m[4], m[5])}
		}
	}
	return out
}

func classAccess(flags, rights string) (who string) {
	switch {
	case strings.Contains(flags, "ALLOC_KERNEL_PRIVILEGED"), strings.Contains(flags, "INTERNAL_ONLY"):
		who = "kernel"
	case strings.Contains(flags, "ALLOC_NON_PRIVILEGED"):
		who = "user"
	case strings.Contains(flags, "ALLOC_PRIVILEGED"):
		who = "admin"
	}
	if !strings.Contains(rights, "RS_ACCESS_NONE") {
		who += "+" + strings.TrimSpace(rights)
	}
	return who
}

// uvmCalls are the names of UVM's calls by number: those that its dispatchers name, since the headers have others' too.
func (t tree) uvmCalls() map[uint32]string {
	used := words(t.read("kernel-open/nvidia-uvm/uvm.c") + t.read("kernel-open/nvidia-uvm/uvm_tools.c"))
	out := map[uint32]string{}
	for _, f := range []string{"uvm_ioctl.h", "uvm_linux_ioctl.h"} {
		for _, m := range uvmCall.FindAllStringSubmatch(t.read("kernel-open/nvidia-uvm/"+f), -1) {
			if used[m[1]] {
				out[number(m[2]+m[3])] = m[1]
			}
		}
	}
	return out
}

// escapes are the names of the numbers that nvidiactl and the GPUs' nodes know, likewise.
func (t tree) escapes() map[uint32]string {
	used := words(t.read("kernel-open/nvidia/nv.c") + t.read(arch+"/src/escape.c") + t.read(arch+"/src/osapi.c"))
	out := map[uint32]string{}
	const common = "kernel-open/common/inc/"
	for _, f := range []string{arch + "/include/nv_escape.h", common + "nv-ioctl-numbers.h", common + "nv-ioctl-numa.h"} {
		for _, m := range escape.FindAllStringSubmatch(t.read(f), -1) {
			n := number(m[3])
			if m[2] != "" {
				n = 200 + number(m[2]) // NV_IOCTL_BASE
			}
			if used[m[1]] {
				out[n] = m[1]
			}
		}
	}
	return out
}

var word = regexp.MustCompile(`\w+`)

// words are the identifiers in C.
func words(c string) map[string]bool {
	out := map[string]bool{}
	for _, w := range word.FindAllString(comment.ReplaceAllString(c, " "), -1) {
		out[w] = true
	}
	return out
}

// code is what decides which calls there are, which sizes they may have and what the driver copies behind their pointers. No structure
// tells of a change there, so its text counts, without comments. A file without functions counts as a whole.
var code = []struct{ file, functions string }{
	{"kernel-open/nvidia/nv.c", "nvidia_ioctl nv_validate_ioctls nvidia_mmap"},
	{arch + "/src/osapi.c", "rm_ioctl rm_validate_ioctl"},
	{arch + "/src/escape.c", ""},
	{kernel + "/rmapi/embedded_param_copy.c", ""},
	{kernel + "/rmapi/param_copy.c", ""},
	{outdate + "/rmapi_deprecated_allocmemory.c", ""},
	{outdate + "/rmapi_deprecated_control.c", ""},
	{outdate + "/rmapi_deprecated_misc.c", ""},
	{outdate + "/rmapi_deprecated_vidheapctrl.c", ""},
	{outdate + "/rmapi_gss_legacy_control.c", ""},
	{"kernel-open/nvidia-uvm/uvm.c", "uvm_ioctl uvm_unlocked_ioctl uvm_mmap"},
}

// codeText is the text of that code by name.
func (t tree) codeText() map[string]string {
	out := map[string]string{}
	for _, c := range code {
		text := t.read(c.file)
		if c.functions == "" {
			out[filepath.Base(c.file)] = plain(text)
			continue
		}
		for _, f := range strings.Fields(c.functions) {
			if body := function(text, f); body != "" {
				out[f] = body
			}
		}
	}
	for name, body := range out {
		if body == "" {
			delete(out, name)
		}
	}
	return out
}

var (
	comment = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	blank   = regexp.MustCompile(`[ \t]+`)
	lines   = regexp.MustCompile(`\s*\n\s*`)
)

// plain is C without comments, and with no more white space than lines need.
func plain(c string) string {
	return strings.TrimSpace(lines.ReplaceAllString(blank.ReplaceAllString(comment.ReplaceAllString(c, " "), " "), "\n"))
}

// function is a function's definition in plain C.
func function(text, name string) string {
	return strings.Join(functions(text, regexp.QuoteMeta(name)), "\n")
}

// functions are the definitions of functions by a pattern for their names: up to the first brace that stands where a line begins.
func functions(text, pattern string) (out []string) {
	re := regexp.MustCompile(`(?m)^(?:[\w*]+ )*\*?\s*(?:` + pattern + `)\s*\((?:[^;{]*)\)\s*\{`)
	for _, m := range re.FindAllStringIndex(text, -1) {
		if end := strings.Index(text[m[0]:], "\n}"); end >= 0 {
			out = append(out, plain(text[m[0]:m[0]+end+2]))
		}
	}
	return out
}

// short is a fingerprint.
func short(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:6])
}
