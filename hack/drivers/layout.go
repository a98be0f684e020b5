// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/dwarf"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var (
	clientRE = regexp.MustCompile(`[cC]lient`)
	fdRE     = regexp.MustCompile(`(^|\.)fd$|[dD]evDescriptor$|capDescriptor$|rmCtrlFd$|uvmFd$`)
)

// layout is what the compiler makes of a structure.
type layout struct {
	Size                   int64
	Pointers, Clients, FDs []string // offsets
	Fields                 []string // all of it, name@offset:size
}

// unit is one file for the compiler: these headers, found in these folders.
type unit struct {
	include []string
	headers []string
}

// layouts compiles every structure of the interface. Structures that a branch does not have are not in the result.
func (t tree) layouts() (map[string]layout, error) {
	names := func(files []string) (out []string) {
		for _, f := range files {
			out = append(out, strings.TrimPrefix(f, sdk+"/"))
		}
		return out
	}
	params := slices.Concat(t.glob(sdk+"/ctrl/*.h"), t.glob(sdk+"/ctrl/*/*.h"), t.glob(sdk+"/class/*.h"), t.glob(sdk+"/alloc/*.h"))
	out := map[string]layout{}
	for _, u := range []unit{
		{[]string{sdk}, append([]string{"nvtypes.h", "nvstatus.h", "nvos.h"}, names(params)...)},
		{[]string{arch + "/include", sdk}, []string{"nvtypes.h", "nvstatus.h", "nvos.h", "nv-ioctl.h", "nv-unix-nvos-params-wrappers.h"}},
		{[]string{"kernel-open/nvidia-uvm", "kernel-open/common/inc", sdk},
			[]string{"nvtypes.h", "nvstatus.h", "uvm_ioctl.h", "uvm_linux_ioctl.h"}},
	} {
		all, err := t.compile(u)
		if err != nil {
			return nil, err
		}
		for name, l := range all {
			out[name] = l
		}
	}
	return out, nil
}

// compile lets the compiler lay the headers' structures out, and reads the result from the debug information. So a pointer inside a
// nested structure or a union is found wherever it hides.
func (t tree) compile(u unit) (map[string]layout, error) {
	var src strings.Builder
	var args []string
	for _, h := range u.headers {
		fmt.Fprintf(&src, "#include \"%s\"\n", h)
	}
	for _, dir := range u.include {
		args = append(args, "-I", filepath.Join(t.dir, dir))
	}
	file := filepath.Join(t.dir, "all.c")
	if err := os.WriteFile(file, []byte(src.String()), 0o644); err != nil {
		return nil, err
	}
	cc := exec.Command("gcc", append(args, "-g", "-fno-eliminate-unused-debug-types", "-w", "-c", "-o", file+".o", file)...)
	if out, err := cc.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: gcc: %w: %.2000s", t.tag, err, out)
	}
	return readLayouts(file + ".o")
}

// wanted are the structures of the interface, by name.
var wanted = regexp.MustCompile(`^(NV|Nv|RS_|UVM_|nv_ioctl_)\w+$`)

// readLayouts takes the named structures of an object file apart.
func readLayouts(file string) (map[string]layout, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	d, err := f.DWARF()
	if err != nil {
		return nil, err
	}
	out := map[string]layout{}
	r := d.Reader()
	for {
		e, err := r.Next()
		if err != nil || e == nil {
			return out, err
		}
		name, _ := e.Val(dwarf.AttrName).(string)
		if e.Tag == dwarf.TagTypedef && wanted.MatchString(name) {
			t, err := d.Type(e.Offset)
			if err != nil {
				return nil, err
			}
			l := layout{Size: t.Size()}
			l.walk(t, 0, "")
			out[name] = l
		}
		if e.Tag != dwarf.TagCompileUnit {
			r.SkipChildren()
		}
	}
}

// walk notes what is at an offset. Of an array it looks at the first element.
func (l *layout) walk(t dwarf.Type, off int64, path string) {
	at := strconv.FormatInt(off, 10)
	switch t := t.(type) {
	case *dwarf.TypedefType:
		switch {
		case t.Name == "NvP64":
			l.Pointers = append(l.Pointers, at)
		case t.Name == "NvHandle" && clientRE.MatchString(path):
			l.Clients = append(l.Clients, at)
		default:
			l.walk(t.Type, off, path)
			return
		}
	case *dwarf.QualType:
		l.walk(t.Type, off, path)
		return
	case *dwarf.PtrType:
		l.Pointers = append(l.Pointers, at)
	case *dwarf.ArrayType:
		l.walk(t.Type, off, path+"["+strconv.FormatInt(t.Count, 10)+"]")
		return
	case *dwarf.StructType: // and unions
		for _, f := range t.Field {
			l.walk(f.Type, off+f.ByteOffset, strings.TrimPrefix(path+"."+f.Name, "."))
		}
		return
	default:
		if fdRE.MatchString(path) {
			l.FDs = append(l.FDs, at)
		}
	}
	l.Fields = append(l.Fields, fmt.Sprintf("%s@%d:%d", path, off, t.Size()))
}
