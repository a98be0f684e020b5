// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/spec"
)

var card = sched.Card{Policy: sched.PolicyFixed, MaxInst: 3, PrioRatio: 20}

func table() *device.Table {
	t := &device.Table{Config: device.Config{Overcommit: 1.5, Placement: ledger.PolicySpread,
		Policy: card.Policy, MaxInst: card.MaxInst, PrioRatio: card.PrioRatio}}
	for i := range 2 {
		t.GPUs = append(t.GPUs, device.GPU{
			Index: i, UUID: fmt.Sprintf("GPU-%d", i), Memory: 15 * quota.GiB,
			Node: device.Node{Path: fmt.Sprintf("/dev/nvidia%d", i), Major: 195, Minor: uint32(i)},
		})
	}
	return t
}

func read(t *testing.T, annotations string, env ...string) *Ask {
	t.Helper()
	a, err := Read([]byte(`{"annotations":{` + annotations + `},"process":{"env":["` + strings.Join(env, `","`) + `"]}}`))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestRead(t *testing.T) {
	const (
		six     = "ALIYUN_COM_GPU_MEM_CONTAINER=6"
		sandbox = `"io.kubernetes.cri.container-type":"sandbox"`
	)
	for _, test := range []struct {
		annotations, env string
		ours, sandbox    bool
	}{
		{"", six, true, false},
		{"", "A=b", false, false},
		{sandbox, six, false, true},
		{sandbox, "ALIYUN_COM_GPU_MEM_CONTAINER=7x", false, true}, // not even looked at
	} {
		if a := read(t, test.annotations, test.env); (a.Quota != nil) != test.ours || a.Sandbox != test.sandbox {
			t.Errorf("%+v: %+v", test, a)
		}
	}
}

// TestLeave: what only the low-level runtime can read is its matter, unless the container asks for something.
func TestLeave(t *testing.T) {
	huge := `"x":"` + strings.Repeat("x", spec.MaxSize) + `",`
	const asks, mentions = `"ALIYUN_COM_GPU_MEM_CONTAINER=6"`, `"DOC=ALIYUN_COM_GPU_MEM_CONTAINER"`
	for name, form := range map[string]string{ // ? is the variable
		"twice":           `{"process":{"env":[?]},"process":{"args":[]}}`,
		"twice, the last": `{"process":{"args":[]},"process":{"env":[?]}}`,
		"other case":      `{"process":{"env":[]},"PROCESS":{"Env":[?]}}`,
		"env twice":       `{"process":{"env":[?],"env":[]}}`,
		"annotation":      `{"process":{"env":[?]},"annotations":{"a":"","a":""}}`,
		"hooks":           `{"process":{"env":[?]},"hooks":{"poststop":[],"poststop":[]}}`,
		"trailing":        `{"process":{"env":[?]}} }`,
		"huge":            `{` + huge + `"process":{"env":[?]}}`,
	} {
		with := func(variable string) (*Ask, error) { return Read([]byte(strings.Replace(form, "?", variable, 1))) }
		if a, err := with(mentions); err != nil || a.Quota != nil || a.Doc != nil {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
		if _, err := with(asks); err == nil {
			t.Errorf("%s: a request was left to the low-level runtime", name)
		}
	}
	for name, raw := range map[string]string{
		"no JSON":             `{"process":{"env":[` + mentions + `]}, // crun takes comments`,
		"annotation":          `{"annotations":{"cgpu.io/gpu-mem-container":"6"},"annotations":{}}`,
		"annotation in other": `{"annotations":{"cgpu.io/gpu-mem-container":"6","a":"","a":""}}`,
		"share":               `{"hooks":{"poststop":[{"path":"/cgpu-hook","args":["cgpu-hook","allocated","alloc.cgpu.io/shares","x"]}],"Poststop":[]}}`,
	} {
		if a, err := Read([]byte(raw)); err == nil {
			t.Errorf("%s: %+v", name, a)
		}
	}
}

func TestReservation(t *testing.T) {
	slice := func(uuid string, limit quota.Bytes, weight int) ledger.VGPU {
		return ledger.VGPU{UUID: uuid, Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: weight, Priority: quota.PriorityDefault}}}
	}
	for _, test := range []struct {
		env    []string
		vgpus  []ledger.VGPU
		native []string
		placed bool
	}{
		{env: nil, placed: true},
		{env: []string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=1"}, vgpus: []ledger.VGPU{slice("GPU-1", 6*quota.GiB, 1)}},
		{
			env:   []string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1", "ALIYUN_COM_GPU_SCHD_WEIGHT=4"},
			vgpus: []ledger.VGPU{slice("GPU-0", 6*quota.GiB, 4)}, native: []string{"GPU-1"},
		},
	} {
		a := read(t, "", append(test.env, "ALIYUN_COM_GPU_MEM_CONTAINER=6")...)
		got, err := a.Reservation(ledger.Record{ID: "c", Nonce: "n", GuardPID: 7}, table(), "/r")
		if err != nil {
			t.Fatal(err)
		}
		r := got.Record
		if !reflect.DeepEqual(r.VGPUs, test.vgpus) || !reflect.DeepEqual(r.Native, test.native) || (got.Place != nil) != test.placed {
			t.Errorf("%v: %+v", test.env, got)
		}
		if r.Socket != "/r/g/n.sock" || r.Control != "/r/g/n.ctl" || r.GuardPID != 7 || len(got.GPUs) != 2 ||
			got.Overcommit != 1.5 || got.Card != card {
			t.Errorf("%v: %+v", test.env, got)
		}
		if got.Place != nil && (got.Place.Policy != ledger.PolicySpread || got.Place.Slice != slice("", 0, 1)) {
			t.Errorf("placement %+v", got.Place)
		}
		plan, err := a.Plan(r, table())
		if err != nil || len(plan.GPUs) != len(test.vgpus)+len(test.native) || len(plan.Hidden) != 2-len(plan.GPUs) {
			t.Errorf("%v: plan %+v, %v", test.env, plan, err)
		}
	}
}

func TestRefused(t *testing.T) {
	book := ledger.Open(t.TempDir())
	const on0, huge = "ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "ALIYUN_COM_GPU_MEM_CONTAINER=999999"
	create := func(id string, env ...string) error {
		if !slices.Contains(env, huge) {
			env = append(env, "ALIYUN_COM_GPU_MEM_CONTAINER=1")
		}
		a := read(t, "", env...)
		r, err := a.Reservation(ledger.Record{ID: id, Nonce: id}, table(), "/r")
		if err != nil {
			t.Fatal(err)
		}
		_, err = book.Reserve(r)
		return a.Refused(err)
	}
	if err := create("a", on0, "ALIYUN_COM_GPU_CORE_PERCENTAGE=70"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		want string
		env  []string
	}{
		{`ALIYUN_COM_GPU_CORE_PERCENTAGE="31": asked for 31 % of the GPU's time, but 30 % are free (GPU 0, GPU-0); stop a container`,
			[]string{on0, "ALIYUN_COM_GPU_CORE_PERCENTAGE=31"}},
		{`ALIYUN_COM_GPU_SCHD_WEIGHT="2": asked for 66.6 % of the GPU's time, but 30 % are free (GPU 0, GPU-0); stop`,
			[]string{on0, "ALIYUN_COM_GPU_SCHD_WEIGHT=2"}},
		{`GPU 0 (GPU-0): asked for 33.3 % of the GPU's time, but 30 % are free; stop`, []string{on0}},
		{`ALIYUN_COM_GPU_MEM_CONTAINER="999999": the limit 999999GiB is more than the GPU's 15360MiB; a number alone is GiB: write 999999MiB if that is meant`, []string{huge}},
		{`ALIYUN_COM_GPU_MEM_DEV="4294967296": the limit 1/4294967296 is less than 64MiB of the GPU's 15360MiB; set it to`,
			[]string{"ALIYUN_COM_GPU_MEM_DEV=4294967296"}},
		{`ALIYUN_COM_GPU_MEM_CONTAINER="1": GPU 0 (GPU-0): asked for 15360MiB, but 7680MiB are free of 15360MiB, beside 1 container`,
			[]string{on0, "ALIYUN_COM_GPU_MEM_DEV=1", "ALIYUN_COM_GPU_CORE_PERCENTAGE=31", "x"}},
	} {
		if slices.Contains(tt.env, "x") { // the ledger names memory first
			if err := book.Update("a", func(r *ledger.Record) error { r.VGPUs[0].Limit = 15 * quota.GiB; return nil }); err != nil {
				t.Fatal(err)
			}
		}
		if err := create("b", tt.env...); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%v: got %v\nwant %s", tt.env, err, tt.want)
		}
	}
}

func TestSpill(t *testing.T) {
	book := ledger.Open(t.TempDir())
	tab := table()
	tab.HostMemory, tab.Config.MaxSpill = 100*quota.GiB, device.Part{Percent: 10}
	create := func(id string, env ...string) (ledger.Record, error) {
		a := read(t, "", append(env, "ALIYUN_COM_GPU_MEM_CONTAINER=1")...)
		r, err := a.Reservation(ledger.Record{ID: id, Nonce: id}, tab, "/r")
		if err != nil {
			t.Fatal(err)
		}
		record, err := book.Reserve(r)
		return record, a.Refused(err)
	}
	for _, tt := range []struct {
		env   []string
		spill []quota.Bytes
		err   string
	}{
		{[]string{"CGPU_MEM_SPILL=3", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0,1"}, []quota.Bytes{3 * quota.GiB, 3 * quota.GiB}, ""},
		{[]string{"CGPU_MEM_SPILL=5"}, nil,
			`CGPU_MEM_SPILL="5": asked for 5120MiB of spill, but 4096MiB are free of the node's 10240MiB; ask for less`},
		{[]string{"CGPU_MEM_SPILL=512MiB"}, []quota.Bytes{512 * quota.MiB}, ""}, // placed
		{[]string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=1"}, []quota.Bytes{0}, ""},
	} {
		record, err := create(fmt.Sprint(tt.env), tt.env...)
		if (err == nil) != (tt.err == "") || err != nil && !strings.HasPrefix(err.Error(), tt.err) {
			t.Errorf("%v: got %v, want %q", tt.env, err, tt.err)
			continue
		}
		var spill []quota.Bytes
		for _, v := range record.VGPUs {
			spill = append(spill, v.Spill)
		}
		if !slices.Equal(spill, tt.spill) {
			t.Errorf("%v: spill %v, want %v", tt.env, spill, tt.spill)
		}
	}
}

func TestPreload(t *testing.T) {
	for _, tt := range []struct {
		driver string
		policy sched.Policy
		env    string
		err    string
		socket string
	}{
		{device.DriverNVIDIA, sched.PolicyPreempt, "A=b", "", ""},
		{device.DriverSim, sched.PolicyPreempt, "A=b", "", "/r/g/n.sock"},
		{device.DriverNVIDIA, sched.PolicyPreempt, "ALIYUN_COM_GPU_SCHD_WEIGHT=3", "", ""},
		{device.DriverNVIDIA, sched.PolicyPreempt, "CGPU_MEM_SPILL=4", `CGPU_MEM_SPILL="4": `, ""},
		{device.DriverNVIDIA, sched.PolicyPreempt, "ALIYUN_COM_GPU_CORE_PERCENTAGE=40", `ALIYUN_COM_GPU_CORE_PERCENTAGE="40": `, ""},
		{device.DriverNVIDIA, sched.PolicyPreempt, "ALIYUN_COM_GPU_HIGH_PRIO=1", `ALIYUN_COM_GPU_HIGH_PRIO="1": `, ""},
		{device.DriverNVIDIA, sched.PolicyPreempt, "CGPU_LIMITER=off", `CGPU_LIMITER="off": `, ""},
		{device.DriverNVIDIA, sched.PolicyFair, "A=b", "policy is fair, which needs a guard", ""},
		{device.DriverNVIDIA, sched.PolicyFixed, "ALIYUN_COM_GPU_SCHD_WEIGHT=3", "policy is fixed, which", ""},
		{device.DriverNVIDIA, sched.PolicySoft, "A=b", "policy is soft, which", ""},
	} {
		tab := table()
		tab.Driver, tab.Config.Enforcement, tab.Config.Policy = tt.driver, device.EnforcePreload, tt.policy
		tab.Config.DriverLimits = tt.driver == device.DriverNVIDIA
		a := read(t, "", "ALIYUN_COM_GPU_MEM_CONTAINER=1", tt.env)
		request, err := a.Reservation(ledger.Record{ID: "c", Nonce: "n"}, tab, "/r")
		var record ledger.Record
		if err == nil {
			record, err = ledger.Open(t.TempDir()).Reserve(request)
			err = a.Refused(err)
		}
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) || !strings.Contains(err.Error(), `set enforcement = "guard"`) {
				t.Errorf("%+v: %v", tt, err)
			}
			continue
		}
		if err != nil || !record.Preload || record.DriverLimits != tab.Config.DriverLimits || record.Socket != tt.socket ||
			(record.Control == "") != (tt.socket == "") {
			t.Errorf("%+v: %+v, %v", tt, record, err)
		}
	}
}

// TestDriverOnly: what NVIDIA's driver alone limits has neither a guard nor a page, and is not promised what nobody keeps.
func TestDriverOnly(t *testing.T) {
	tab := table()
	tab.Config.Enforcement, tab.Config.DriverLimits = device.EnforceDriver, true
	for env, want := range map[string]string{
		"A=b":              "",
		"CGPU_LIMITER=off": "", // of which there is none
		"CGPU_WEIGHT=1":    "",
		"CGPU_WEIGHT=2":    `CGPU_WEIGHT="2": with limits = "driver" in cgpu.toml there are no weights; set limits = "guard"`,
		"CGPU_PERCENT=40":  `CGPU_PERCENT="40": with limits = "driver" in cgpu.toml no percentage`,
		"CGPU_MEM_SPILL=1": `CGPU_MEM_SPILL="1": with limits = "driver"`,
	} {
		a := read(t, "", "CGPU_MEM=1", env)
		request, err := a.Reservation(ledger.Record{ID: "c", Nonce: "n"}, tab, "/r")
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", env, err, want)
		}
		if err != nil {
			continue
		}
		r := &request.Record
		if err := GivePage(&request, "/r"); err != nil || !r.Preload || !r.DriverLimits || !r.DriverOnly || r.Page != "" ||
			r.Socket+r.Control != "" {
			t.Errorf("%s: %+v, %v", env, *r, err)
		}
		p, err := a.Plan(*r, tab)
		if err != nil || !p.DriverLimits || p.PageWritable || p.Limiter+p.Page+p.Socket != "" {
			t.Errorf("%s: %+v, %v", env, p, err)
		}
	}
	share := Share{Share: alloc.Share{ID: "s", Slice: quota.Slice{Limit: quota.GiB,
		Share: quota.Share{Percent: 30, Priority: quota.PriorityDefault}}}}
	if err := share.refuseUnguarded(&quota.Quota{}, tab.Config.Unguarded(), true); err == nil ||
		!strings.HasPrefix(err.Error(),
			`admit: share s: with limits = "driver" in cgpu.toml no percentage of a GPU's time can be enforced; set limits = "guard"`) {
		t.Error(err)
	}
}

// An id becomes part of a file's name.
func TestReservationRefusesIDs(t *testing.T) {
	for _, id := range []string{"", ".", "..", "../x", "a/b", "a\x00"} {
		_, err := read(t, "", "ALIYUN_COM_GPU_MEM_CONTAINER=6").Reservation(ledger.Record{ID: id, Nonce: id}, table(), "/r")
		if err == nil || !strings.Contains(err.Error(), "container id") {
			t.Errorf("%q: %v", id, err)
		}
	}
}
