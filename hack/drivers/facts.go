// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// snapshot is the interface of one release.
type snapshot struct {
	tag      string
	controls map[uint32]control
	classes  map[uint32]class
	uvm      map[uint32]string
	escapes  map[uint32]string
	layouts  map[string]layout
	code     map[string]string
	tree     tree
}

// take measures a release; the caller removes its tree.
func take(git, tag string) (snapshot, error) {
	t, err := unpack(git, tag)
	if err != nil {
		return snapshot{}, err
	}
	s := snapshot{tag: tag, controls: t.controls(), classes: t.classes(), uvm: t.uvmCalls(), escapes: t.escapes(), code: t.codeText(), tree: t}
	if s.layouts, err = t.layouts(); err != nil {
		os.RemoveAll(t.dir)
		return snapshot{}, err
	}
	if len(s.controls) < 500 || len(s.classes) < 100 || len(s.uvm) < 30 || len(s.escapes) < 20 || len(s.code) < 8 {
		os.RemoveAll(t.dir)
		return snapshot{}, fmt.Errorf("%s: found %d controls, %d classes, %d UVM calls, %d escapes, %d pieces of code: "+
			"NVIDIA writes them in another way now, look at tree.go", tag, len(s.controls), len(s.classes), len(s.uvm), len(s.escapes), len(s.code))
	}
	return s, nil
}

// key is what a fact is about: a control, class or UVM call by number, a structure or a piece of code by name.
type key struct{ kind, id string }

// columns are those of testdata/params.csv.
var columns = []string{"kind", "id", "since", "size", "pointers", "clients", "fds", "access", "layout"}

// absent is a fact's text where a release does not have the thing.
const absent = "-,,,,,"

// outer are the structures that ioctls hand over, and entries of lists.
var outer = strings.Fields(`NVOS00_PARAMETERS NVOS02_PARAMETERS NVOS05_PARAMETERS NVOS21_PARAMETERS NVOS30_PARAMETERS NVOS32_PARAMETERS
	NVOS33_PARAMETERS NVOS34_PARAMETERS NVOS38_PARAMETERS NVOS39_PARAMETERS NVOS46_PARAMETERS NVOS47_PARAMETERS NVOS49_PARAMETERS
	NVOS54_PARAMETERS NVOS55_PARAMETERS NVOS56_PARAMETERS NVOS57_PARAMETERS NVOS64_PARAMETERS NVOS_I2C_ACCESS_PARAMS RS_SHARE_POLICY
	nv_ioctl_nvos02_parameters_with_fd nv_ioctl_nvos33_parameters_with_fd nv_ioctl_xfer_t nv_ioctl_card_info_t nv_ioctl_register_fd_t
	nv_ioctl_alloc_os_event_t nv_ioctl_free_os_event_t nv_ioctl_status_code_t nv_ioctl_rm_api_version_t nv_ioctl_query_device_intr_t
	nv_ioctl_sys_params_t nv_ioctl_wait_open_complete_t nv_ioctl_export_to_dma_buf_fd_t
	NV2080_CTRL_PERF_GPUMON_PERFMON_UTIL_SAMPLE NV2080_CTRL_GPU_PID_INFO NV2080_CTRL_GPU_REG_OP`)

// facts are what pkg/rm's tests hold its tables against: of controls and classes only those that it has a row for.
func (s snapshot) facts() map[key]string {
	out := map[key]string{}
	for id, c := range s.controls {
		if !knownControl(id) {
			continue
		}
		if l, ok := s.layouts[c.params]; ok {
			out[key{"control", hexID(id)}] = l.fact(c.access, short(strings.Join(l.Fields, " ")))
		} else if c.params == "" {
			out[key{"control", hexID(id)}] = layout{}.fact(c.access, "")
		}
	}
	for id, c := range s.classes {
		if !knownClass(id) {
			continue
		}
		if l, ok := s.layouts[c.params]; ok {
			out[key{"class", hexID(id)}] = l.fact(c.access, c.needs+" "+short(strings.Join(l.Fields, " ")))
		} else if c.params == "" {
			out[key{"class", hexID(id)}] = layout{}.fact(c.access, c.needs)
		}
	}
	for id, name := range s.uvm {
		l := s.layouts[name+"_PARAMS"] // one has no parameters
		out[key{"uvm", hexID(id)}] = l.fact("", strings.TrimSpace(name+" "+l.fields()))
	}
	for _, name := range outer {
		if l, ok := s.layouts[name]; ok {
			out[key{"struct", name}] = l.fact("", l.fields())
		}
	}
	for n, name := range s.escapes {
		out[key{"escape", hexID(n)}] = layout{}.fact("", name)
	}
	for name, text := range s.code {
		out[key{"code", name}] = layout{}.fact("", short(text))
	}
	return out
}

func hexID(n uint32) string { return fmt.Sprintf("%#x", n) }

func knownClass(id uint32) bool   { return !strings.HasPrefix(rm.ClassName(id), "class ") }
func knownControl(id uint32) bool { return !strings.HasPrefix(rm.ControlName(id), "control ") }

// fact is a layout as a line of the table has it, behind kind, id and since.
func (l layout) fact(access, text string) string {
	return strings.Join([]string{strconv.FormatInt(l.Size, 10), strings.Join(l.Pointers, " "), strings.Join(l.Clients, " "),
		strings.Join(l.FDs, " "), access, text}, ",")
}

// fields are the fields by name, or a fingerprint where they are many.
func (l layout) fields() string {
	if len(l.Fields) > 40 {
		return short(strings.Join(l.Fields, " "))
	}
	return strings.Join(l.Fields, " ")
}

// table is every change of every fact: a line where a release differs from the one before.
type table map[key][]change

type change struct{ since, fact string }

// add is for releases in ascending order.
func (t table) add(tag string, facts map[key]string) {
	for k, runs := range t {
		if _, ok := facts[k]; !ok && runs[len(runs)-1].fact != absent {
			t[k] = append(runs, change{tag, absent})
		}
	}
	for k, f := range facts {
		if runs := t[k]; len(runs) == 0 || runs[len(runs)-1].fact != f {
			t[k] = append(runs, change{tag, f})
		}
	}
}

// at is the fact in force at a release.
func (t table) at(k key, tag string) string {
	f := absent
	for _, c := range t[k] {
		if compareTags(c.since, tag) <= 0 {
			f = c.fact
		}
	}
	return f
}

func compareTags(a, b string) int {
	v, _ := rm.ParseVersion(a)
	w, _ := rm.ParseVersion(b)
	return v.Compare(w)
}

// keys are in the order of the file.
func (t table) keys() []key {
	var keys []key
	for k := range t {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b key) int {
		if a.kind != b.kind {
			return strings.Compare(a.kind, b.kind)
		}
		if x, y := number(a.id), number(b.id); x != y {
			return int(int64(x) - int64(y))
		}
		return strings.Compare(a.id, b.id)
	})
	return keys
}

// write writes the file: first the releases that were measured.
func (t table) write(w io.Writer, tags []string) {
	fmt.Fprintln(w, strings.Join(columns, ","))
	for _, tag := range tags {
		fmt.Fprintf(w, "tag,%s,%s,,,,,,\n", tag, tag)
	}
	for _, k := range t.keys() {
		for _, c := range t[k] {
			fmt.Fprintf(w, "%s,%s,%s,%s\n", k.kind, k.id, c.since, c.fact)
		}
	}
}

// readTable is the inverse.
func readTable(path string) (t table, tags []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	records, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	t = table{}
	for _, r := range records[1:] {
		if r[0] == "tag" {
			tags = append(tags, r[1])
			continue
		}
		k := key{r[0], r[1]}
		t[k] = append(t[k], change{r[2], strings.Join(r[3:], ",")})
	}
	return t, tags, nil
}

// measure makes the table of these releases. What is in keep already is not measured again.
func measure(git, keep string, tags []string) (table, error) {
	slices.SortFunc(tags, compareTags)
	t := table{}
	for _, tag := range tags {
		one, err := measureOne(git, keep, tag)
		if err != nil {
			return nil, err
		}
		facts := map[key]string{}
		for k, runs := range one {
			facts[k] = runs[0].fact
		}
		t.add(tag, facts)
	}
	return t, nil
}

func measureOne(git, keep, tag string) (table, error) {
	file := filepath.Join(keep, tag+".csv")
	if t, _, err := readTable(file); err == nil && keep != "" {
		return t, nil
	}
	s, err := take(git, tag)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(s.tree.dir)
	fmt.Fprintln(os.Stderr, tag)
	t := table{}
	t.add(tag, s.facts())
	if keep == "" {
		return t, nil
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	t.write(f, []string{tag})
	return t, f.Close()
}
