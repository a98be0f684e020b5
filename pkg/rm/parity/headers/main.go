// Command headers measures the parameter structures of RM controls and classes in NVIDIA's open kernel modules: size, user
// pointers, client handles and file descriptors, for each release tag. The result is ../testdata/params.csv of pkg/rm,
// which the tests of pkg/rm hold the tables against. See docs/internals/rm-tables.md.
//
//	go run ./headers -okm open-gpu-kernel-modules/.git 515.43.04 515.105.01 … > ../testdata/params.csv
//
// It takes the structure of a control from the driver's own method tables (src/nvidia/generated/g_*_nvoc.c), that of a
// class from resource_list.h, lets the C compiler lay them out, and reads the result from the debug information. So a
// pointer inside a nested structure or a union is found wherever it hides.
package main

import (
	"debug/dwarf"
	"debug/elf"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/rm"
)

var (
	method   = regexp.MustCompile(`/\*methodId=\*/\s*(0x[0-9a-f]+)u?,\s*/\*paramSize=\*/\s*sizeof\((NV\w+)\)`)
	define   = regexp.MustCompile(`(?m)^#define\s+NV\w*_CTRL_\w+\s+\(?(0x[0-9A-Fa-f]+)U?\)?.*\| (NV\w+)_MESSAGE_ID`)
	entry    = regexp.MustCompile(`External Class\s*\*/\s*(\w+),(?:[^\n]*\n){1,4}?[^\n]*Alloc Param Info\s*\*/\s*\w+\((\w+)\)`)
	classID  = regexp.MustCompile(`(?m)^#define\s+(\w+)\s+\(?(0x[0-9A-Fa-f]+)U?\)?`)
	clientRE = regexp.MustCompile(`[cC]lient`)
	fdRE     = regexp.MustCompile(`(^|\.)fd$|[dD]evDescriptor$|capDescriptor$`)
)

// key is a control or a class.
type key struct {
	kind string
	id   uint32
}

// layout is what the guard has to know of a structure.
type layout struct {
	size                   int64
	pointers, clients, fds []string
}

func (l layout) String() string {
	return fmt.Sprintf("%d,%s,%s,%s", l.size, strings.Join(l.pointers, " "), strings.Join(l.clients, " "), strings.Join(l.fds, " "))
}

func main() {
	log.SetFlags(0)
	okm := flag.String("okm", "", "git directory of NVIDIA's open-gpu-kernel-modules")
	flag.Parse()
	runs := map[key][]string{} // "tag,layout" at each change
	for _, tag := range flag.Args() {
		all, err := measure(*okm, tag)
		if err != nil {
			log.Fatalf("%s: %v", tag, err)
		}
		for k := range runs {
			if _, ok := all[k]; !ok {
				all[k] = "-,,,"
			}
		}
		for k, l := range all {
			last := ""
			if n := len(runs[k]); n > 0 {
				_, last, _ = strings.Cut(runs[k][n-1], ",")
			}
			if l != last {
				runs[k] = append(runs[k], tag+","+l)
			}
		}
	}
	var keys []key
	for k := range runs {
		if known(k) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b key) int {
		if a.kind != b.kind {
			return strings.Compare(a.kind, b.kind)
		}
		return int(int64(a.id) - int64(b.id))
	})
	fmt.Println("kind,id,since,size,pointers,clients,fds")
	for _, k := range keys {
		for _, r := range runs[k] {
			fmt.Printf("%s,%#x,%s\n", k.kind, k.id, r)
		}
	}
}

// known: only what pkg/rm has a row for, under any driver.
func known(k key) bool {
	if k.kind == "class" {
		return !strings.HasPrefix(rm.ClassName(k.id), "class ")
	}
	return !strings.HasPrefix(rm.ControlName(k.id), "control ")
}

func measure(okm, tag string) (map[key]string, error) {
	dir, err := os.MkdirTemp("", "okm")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	const include = "src/common/sdk/nvidia/inc"
	untar := exec.Command("sh", "-c", `git --git-dir="$1" archive "$2" `+include+` src/nvidia/generated src/nvidia/src/kernel/rmapi | tar x -C "$3"`, "sh", okm, tag, dir)
	untar.Stderr = os.Stderr
	if err := untar.Run(); err != nil {
		return nil, err
	}
	structs := map[key]string{}
	headers, _ := filepath.Glob(filepath.Join(dir, include, "ctrl", "*.h"))
	nested, _ := filepath.Glob(filepath.Join(dir, include, "ctrl", "*", "*.h"))
	classes, _ := filepath.Glob(filepath.Join(dir, include, "class", "*.h"))
	allocs, _ := filepath.Glob(filepath.Join(dir, include, "alloc", "*.h"))
	headers = slices.Concat(headers, nested, classes, allocs)
	for _, h := range headers {
		each(h, define, func(m []string) { structs[key{"control", number(m[1])}] = m[2] })
	}
	tables, _ := filepath.Glob(filepath.Join(dir, "src/nvidia/generated/g_*_nvoc.c"))
	for _, f := range tables {
		each(f, method, func(m []string) { structs[key{"control", number(m[1])}] = m[2] })
	}
	ids := map[string]uint32{}
	for _, f := range append(classes, filepath.Join(dir, "src/nvidia/generated/g_allclasses.h")) {
		each(f, classID, func(m []string) { ids[m[1]] = number(m[2]) })
	}
	each(filepath.Join(dir, "src/nvidia/src/kernel/rmapi/resource_list.h"), entry, func(m []string) {
		if id, ok := ids[m[1]]; ok {
			structs[key{"class", id}] = m[2]
		}
	})

	var src strings.Builder
	src.WriteString("#include \"nvtypes.h\"\n#include \"nvstatus.h\"\n#include \"nvos.h\"\n")
	for _, h := range headers {
		fmt.Fprintf(&src, "#include \"%s\"\n", strings.TrimPrefix(h, filepath.Join(dir, include)+"/"))
	}
	declared := map[string]bool{}
	for k, s := range structs {
		if !declared[s] && known(k) {
			declared[s] = true
			fmt.Fprintf(&src, "%s v_%s;\n", s, s)
		}
	}
	file := filepath.Join(dir, "all.c")
	if err := os.WriteFile(file, []byte(src.String()), 0o644); err != nil {
		return nil, err
	}
	cc := exec.Command("gcc", "-g", "-w", "-c", "-I", filepath.Join(dir, include), "-o", file+".o", file)
	cc.Stderr = os.Stderr
	if err := cc.Run(); err != nil {
		return nil, err
	}
	layouts, err := read(file + ".o")
	if err != nil {
		return nil, err
	}
	out := map[key]string{}
	for k, s := range structs {
		if l, ok := layouts[s]; ok {
			out[k] = l.String()
		}
	}
	return out, nil
}

func each(file string, re *regexp.Regexp, f func([]string)) {
	b, err := os.ReadFile(file)
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range re.FindAllStringSubmatch(string(b), -1) {
		f(m)
	}
}

func number(s string) uint32 {
	n, _ := strconv.ParseUint(s, 0, 32)
	return uint32(n)
}

// read takes the variables v_T of an object file apart.
func read(file string) (map[string]layout, error) {
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
		if e.Tag == dwarf.TagVariable && strings.HasPrefix(name, "v_") {
			t, err := d.Type(e.Val(dwarf.AttrType).(dwarf.Offset))
			if err != nil {
				return nil, err
			}
			l := layout{size: t.Size()}
			l.walk(t, 0, "")
			out[name[2:]] = l
		}
		if e.Tag != dwarf.TagCompileUnit {
			r.SkipChildren()
		}
	}
}

func (l *layout) walk(t dwarf.Type, off int64, path string) {
	at := strconv.FormatInt(off, 10)
	switch t := t.(type) {
	case *dwarf.TypedefType:
		switch {
		case t.Name == "NvP64":
			l.pointers = append(l.pointers, at)
		case t.Name == "NvHandle" && clientRE.MatchString(path):
			l.clients = append(l.clients, at)
		default:
			l.walk(t.Type, off, path)
		}
	case *dwarf.QualType:
		l.walk(t.Type, off, path)
	case *dwarf.PtrType:
		l.pointers = append(l.pointers, at)
	case *dwarf.ArrayType:
		l.walk(t.Type, off, path)
	case *dwarf.StructType: // and unions
		for _, f := range t.Field {
			l.walk(f.Type, off+f.ByteOffset, path+"."+f.Name)
		}
	default:
		if fdRE.MatchString(path) {
			l.fds = append(l.fds, at)
		}
	}
}
