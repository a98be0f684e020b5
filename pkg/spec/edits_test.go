// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestNodes(t *testing.T) {
	gpu0 := plan(map[int]quota.Bytes{0: quota.GiB})
	gpu1and2 := plan(map[int]quota.Bytes{1: quota.GiB, 2: 0})
	real0 := []string{"/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"}
	real12 := []string{"/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidiactl"}
	for _, test := range []struct {
		input string
		plan  Plan
		want  []string
	}{
		{"docker20-plain", gpu0, real0},
		{"docker20-gpus-all", gpu1and2, real12},
		{"docker20-device-nvidia", gpu0, real0}, // /dev/nvidia0 was a node with the numbers of /dev/null
		{"docker20-privileged-gpus", gpu0, real0},
		{"docker28-gpus-all-plus-cdi-device", gpu1and2, real12}, // CDI gave GPU 0, which is not granted
		{"docker29-gpus-dev0-cgpu", gpu0, real0},
		{"docker29-privileged-gpus", gpu1and2, real12},
		{"docker29-gpus-dev0-cgpu", simulated(gpu0), nil},
		{"docker29-privileged-gpus", simulated(gpu0), nil},
	} {
		e := apply(t, recorded(t, test.input), test.plan)
		if got := e.nvidiaNodes(); !slices.Equal(got, test.want) {
			t.Errorf("%s: nodes %v, want %v", test.input, got, test.want)
		}
		for _, n := range e.Linux.Devices {
			for _, d := range test.plan.Nodes() {
				if n.Path == d.Path && !isNode(n, d) {
					t.Errorf("%s: %s is %d:%d, want %d:%d", test.input, n.Path, n.Major, n.Minor, d.Major, d.Minor)
				}
			}
		}
		for _, d := range test.plan.Nodes() {
			bound := slices.ContainsFunc(e.Mounts, func(m specs.Mount) bool { return m.Destination == d.Path && m.Source == d.HostPath })
			if bound != d.Bind {
				t.Errorf("%s: %s bind mounted: %v, want %v", test.input, d.Path, bound, d.Bind)
			}
		}
	}
}

// TestForeignNames finds nodes of GPUs, and the driver's other nodes, under names that are not NVIDIA's, and leaves other devices alone.
func TestForeignNames(t *testing.T) {
	raw := []byte(`{"process":{"env":["NVIDIA_DRIVER_CAPABILITIES=all"]},"linux":{"devices":[
		{"path":"/dev/nvidia-modeset","type":"c","major":195,"minor":254},
		{"path":"/dev/modeset","type":"c","major":195,"minor":254},
		{"path":"/dev/gpu","type":"c","major":195,"minor":1},
		{"path":"/dev/mine","type":"c","major":195,"minor":0},
		{"path":"/dev//nvidia3","type":"c","major":1,"minor":3},
		{"path":"/dev/dri/card1","type":"c","major":226,"minor":1},
		{"path":"/dev/dri/card0","type":"c","major":226,"minor":0},
		{"path":"/dev/sda","type":"b","major":195,"minor":1},
		{"path":"/dev/nvidia-caps/nvidia-cap1","type":"c","major":236,"minor":1}]}}`)
	p := plan(map[int]quota.Bytes{0: quota.GiB})
	p.Hidden = append(p.Hidden, device.Node{Path: "/dev/dri/card1", Major: 226, Minor: 1})
	var got []string
	for _, n := range apply(t, raw, p).Linux.Devices {
		got = append(got, n.Path)
	}
	want := []string{"/dev/mine", "/dev/dri/card0", "/dev/sda", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// verdict plays the device cgroup: the last rule that matches says whether rw is allowed.
func verdict(rules []specs.LinuxDeviceCgroup, major, minor int64) bool {
	allowed := false
	for _, r := range rules {
		if (r.Type == "c" || r.Type == "a" || r.Type == "") && (r.Major == nil || *r.Major == major) && (r.Minor == nil || *r.Minor == minor) &&
			(r.Access == "" || strings.Contains(r.Access, "w")) {
			allowed = r.Allow
		}
	}
	return allowed
}

func TestRules(t *testing.T) {
	gpu0 := plan(map[int]quota.Bytes{0: quota.GiB})
	for _, input := range []string{"docker20-plain", "docker29-gpus-dev0-cgpu", "docker28-gpus-all-plus-cdi-device", "cri16-default"} {
		rules := apply(t, recorded(t, input), gpu0).Linux.Resources.Devices
		for _, test := range []struct {
			major, minor int64
			want         bool
		}{{195, 0, true}, {195, 255, true}, {510, 0, true}, {195, 1, false}, {195, 254, false}, {510, 1, false}, {8, 0, false}} {
			if got := verdict(rules, test.major, test.minor); got != test.want {
				t.Errorf("%s: %d:%d allowed %v, want %v", input, test.major, test.minor, got, test.want)
			}
		}
	}
	// The simulated driver's nodes have the numbers of /dev/null, whose node and rule must stay.
	null := func(n specs.LinuxDevice) bool { return n.Path == "/dev/null" }
	if !slices.ContainsFunc(apply(t, recorded(t, "docker20-privileged-gpus"), simulated(gpu0)).Linux.Devices, null) {
		t.Error("simulated: /dev/null is gone")
	}
	if rules := apply(t, recorded(t, "docker20-plain"), simulated(gpu0)).Linux.Resources.Devices; len(rules) != 8+3-2 ||
		!verdict(rules, 1, 3) || !verdict(rules, 1, 5) || verdict(rules, 195, 0) {
		t.Errorf("simulated: %v", rules)
	}
	// A wildcard over the driver's major (--device-cgroup-rule) is every GPU; a privileged container keeps everything.
	wild := []byte(`{"process":{},"linux":{"resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"type":"c","major":195,"access":"rwm"}]}}}`)
	if rules := apply(t, wild, gpu0).Linux.Resources.Devices; verdict(rules, 195, 1) || !verdict(rules, 195, 0) {
		t.Errorf("wildcard: %v", rules)
	}
	if rules := apply(t, recorded(t, "docker20-privileged-gpus"), gpu0).Linux.Resources.Devices; !verdict(rules, 8, 0) {
		t.Errorf("privileged lost its other devices: %v", rules)
	}
}

func TestMounts(t *testing.T) {
	raw := []byte(`{"process":{},"linux":{},"mounts":[
		{"destination":"/dev","type":"tmpfs","source":"tmpfs"},
		{"destination":"/lib/x86_64-linux-gnu/libcuda.so.580.159.04","type":"bind","source":"/mine"},
		{"destination":"/dev/nvidia0","type":"bind","source":"/dev/nvidia3"},
		{"destination":"/x","type":"bind","source":"/dev/nvidia1"},
		{"destination":"/data","type":"bind","source":"/data"}]}`)
	show := func(e edited) string {
		var s []string
		for _, m := range e.Mounts {
			s = append(s, m.Destination+"="+m.Source)
		}
		return strings.Join(s, " ")
	}
	p := plan(map[int]quota.Bytes{0: quota.GiB})
	if got, want := show(apply(t, raw, p)), "/dev=tmpfs /lib/x86_64-linux-gnu/libcuda.so.580.159.04=/mine /data=/data"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	want := "/dev=tmpfs /lib/x86_64-linux-gnu/libcuda.so.580.159.04=/mine /data=/data " +
		"/dev/nvidiactl=/dev/cgpu-sim/nvidiactl /dev/nvidia-uvm=/dev/cgpu-sim/nvidia-uvm /dev/nvidia0=/dev/cgpu-sim/nvidia0"
	e := apply(t, raw, simulated(p))
	if got := show(e); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for _, m := range e.Mounts {
		if slices.Contains(m.Options, "nodev") {
			t.Errorf("%s is nodev: it could not be opened", m.Destination)
		}
	}
}

func TestEnv(t *testing.T) {
	const limiter = "/lib/cgpu/libcgpu.so"
	for _, test := range []struct{ env, limiter, want string }{
		{`[]`, "", "NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu NVIDIA_VISIBLE_DEVICES=void"},
		{`["NVIDIA_VISIBLE_DEVICES=all","A=b=c","NVIDIA_VISIBLE_DEVICES=0"]`, "",
			"A=b=c NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu NVIDIA_VISIBLE_DEVICES=void"},
		{`["NVIDIA_CTK_LIBCUDA_DIR=/x","NVIDIA_VISIBLE_DEVICESX=1"]`, "",
			"NVIDIA_CTK_LIBCUDA_DIR=/x NVIDIA_VISIBLE_DEVICESX=1 NVIDIA_VISIBLE_DEVICES=void"},
		{`["NVIDIA_VISIBLE_DEVICES"]`, limiter,
			"NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu NVIDIA_VISIBLE_DEVICES=void LD_PRELOAD=/run/cgpu/libcgpu.so"},
		{`["LD_PRELOAD=/mine.so"]`, limiter,
			"LD_PRELOAD=/run/cgpu/libcgpu.so:/mine.so NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu NVIDIA_VISIBLE_DEVICES=void"},
		{`["LD_PRELOAD="]`, limiter, "LD_PRELOAD=/run/cgpu/libcgpu.so NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu NVIDIA_VISIBLE_DEVICES=void"},
		{
			`["LD_PRELOAD=/old.so","A=b","LD_PRELOAD=/x.so:/run/cgpu/libcgpu.so /y.so","LD_PRELOADX=1"]`, limiter,
			"A=b LD_PRELOAD=/run/cgpu/libcgpu.so:/x.so:/y.so LD_PRELOADX=1 NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu NVIDIA_VISIBLE_DEVICES=void",
		},
		{`["LD_PRELOAD=/mine.so"]`, "", "LD_PRELOAD=/mine.so NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu NVIDIA_VISIBLE_DEVICES=void"},
	} {
		p := plan(map[int]quota.Bytes{0: quota.GiB})
		p.Limiter = test.limiter
		e := apply(t, []byte(`{"process":{"env":`+test.env+`},"linux":{}}`), p)
		if got := strings.Join(e.Process.Env, " "); got != test.want {
			t.Errorf("%s:\ngot  %s\nwant %s", test.env, got, test.want)
		}
	}
}

// TestMembership: a member of a domain has the variable that tells libcuda of it, and sees its own seat.
func TestMembership(t *testing.T) {
	const pipes, rest = "CUDA_MPS_PIPE_DIRECTORY=/run/cgpu/mps", "NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu "
	for _, test := range []struct {
		env    string
		domain string
		want   string
	}{
		{`[]`, "", rest},
		{`[]`, "team", rest + pipes + " "},
		{`["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60"]`, "team", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60 " + rest + pipes + " "},
		{`["CUDA_MPS_PIPE_DIRECTORY=/x"]`, "team", "CUDA_MPS_PIPE_DIRECTORY=/x " + rest},
	} {
		p := plan(map[int]quota.Bytes{0: quota.GiB})
		p.Domain, p.Seat = test.domain, 7
		e := apply(t, []byte(`{"process":{"env":`+test.env+`},"linux":{}}`), p)
		if got := strings.Join(e.Process.Env, " "); got != test.want+"NVIDIA_VISIBLE_DEVICES=void" {
			t.Errorf("%s, domain %q:\ngot  %s\nwant %s", test.env, test.domain, got, test.want)
		}
		if want := "/" + test.domain + "/seats/7"; test.domain != "" && !strings.HasSuffix(p.Pipes(), want) {
			t.Errorf("its folder is %s, want %s", p.Pipes(), want)
		}
	}
}

// TestPreloadProcess edits what exec reads, and nothing of it but the environment.
func TestPreloadProcess(t *testing.T) {
	for raw, want := range map[string]string{
		`{"terminal":true, "env" : ["A=b"],"args":["LD_PRELOAD=x"]}`: `{"terminal":true, "env" : ["A=b","LD_PRELOAD=/run/cgpu/libcgpu.so"],"args":["LD_PRELOAD=x"]}`,
		`{"env":["LD_PRELOAD=/a.so","B=c"],"new":1e400}`:             `{"env":["LD_PRELOAD=/run/cgpu/libcgpu.so:/a.so","B=c"],"new":1e400}`,
		`{"env":["LD_PRELOAD=/run/cgpu/libcgpu.so"]}`:                `{"env":["LD_PRELOAD=/run/cgpu/libcgpu.so"]}`,
		`{"env":["\u004cD_PRELOAD=/a.so"]}`:                          `{"env":["LD_PRELOAD=/run/cgpu/libcgpu.so:/a.so"]}`,
		`{"args":["a"]}`:                                             `{"args":["a"],"env":["LD_PRELOAD=/run/cgpu/libcgpu.so"]}`,
		`{"env":null}`:                                               `{"env":["LD_PRELOAD=/run/cgpu/libcgpu.so"]}`,
		`{"env":"x"}`:                                                "", `{"env":[1]}`: "", `[]`: "", `{"env":[],"env":[]}`: "", `{`: "",
		`{ "Env" : ["A=b"]}`: `{ "env" : ["A=b","LD_PRELOAD=/run/cgpu/libcgpu.so"]}`,
	} {
		got, err := PreloadProcess([]byte(raw))
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%s:\ngot  %s, %v\nwant %s", raw, got, err, want)
		}
	}
}

func TestHooks(t *testing.T) {
	show := func(e edited) string {
		var s []string
		for _, kind := range []string{"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"} {
			for _, h := range e.Hooks[kind] {
				name := h.Path[strings.LastIndex(h.Path, "/")+1:]
				if len(h.Args) > 1 {
					name += ":" + h.Args[1]
				}
				s = append(s, kind+"="+name)
			}
		}
		return strings.Join(s, " ")
	}
	p := plan(map[int]quota.Bytes{0: quota.GiB})
	const ours = " createContainer=cgpu-hook:setup poststop=cgpu-hook:release"
	for _, test := range []struct{ input, want string }{
		{"docker20-plain", "prestart=exe:-exec-root=/var/run/docker" + ours},
		{"docker20-gpus-all", "prestart=exe:-exec-root=/var/run/docker" + ours},
		{
			"docker28-gpus-all-plus-cdi-device",
			"createContainer=nvidia-cdi-hook:create-symlinks createContainer=nvidia-cdi-hook:enable-cuda-compat " +
				"createContainer=nvidia-cdi-hook:update-ldcache " +
				"createContainer=nvidia-cdi-hook:disable-device-node-modification createContainer=nvidia-cdi-hook:update-application-profile" + ours,
		},
	} {
		if got := show(apply(t, recorded(t, test.input), p)); got != test.want {
			t.Errorf("%s:\ngot  %s\nwant %s", test.input, got, test.want)
		}
	}
	e := apply(t, recorded(t, "docker20-plain"), simulated(p))
	if len(e.Hooks["createContainer"]) != 0 {
		t.Error("the simulated driver needs no setup")
	}
	want := []string{"cgpu-hook", "release", "--id", "c1", "--nonce", "0123456789abcdef"}
	if h := e.Hooks["poststop"][0]; h.Path != "/usr/bin/cgpu-hook" || !slices.Equal(h.Args, want) ||
		!slices.Contains(h.Env, "CGPU_RUN_DIR=/run/cgpu") {
		t.Errorf("poststop: %+v", h)
	}
}

// TestDriverLimits: cgpu-hook has the driver limit the container's cgroup, beside who else holds it, or alone.
func TestDriverLimits(t *testing.T) {
	both := withLimiter(plan(map[int]quota.Bytes{0: quota.GiB}))
	both.DriverLimits = true
	alone := plan(map[int]quota.Bytes{0: quota.GiB})
	alone.DriverLimits, alone.Socket = true, ""
	for name, tt := range map[string]struct {
		plan                Plan
		enforcement, limits string
		guarded             bool
	}{
		"guard":   {both, "", "both", true},
		"preload": {preloadMode(both), "preload", "both", false},
		"driver":  {alone, "", "driver", false},
	} {
		raw := recorded(t, "docker20-plain")
		e := apply(t, raw, tt.plan)
		hooks := e.Hooks["createRuntime"]
		if len(hooks) != 1 || !slices.Equal(hooks[0].Args, []string{"cgpu-hook", "started", "--id", "c1", "--nonce", "0123456789abcdef"}) {
			t.Errorf("%s: createRuntime %+v", name, hooks)
		}
		if got := e.Annotations["cgpu.io/applied.limits"]; got != tt.limits {
			t.Errorf("%s: limits %q, want %q", name, got, tt.limits)
		}
		if got := e.Annotations["cgpu.io/applied.enforcement"]; got != tt.enforcement {
			t.Errorf("%s: enforcement %q, want %q", name, got, tt.enforcement)
		}
		if got := e.Linux.Seccomp != nil && e.Linux.Seccomp.ListenerPath != ""; got != tt.guarded {
			t.Errorf("%s: guarded %v", name, got)
		}
	}
}

func TestAnnotations(t *testing.T) {
	raw := []byte(`{"process":{},"linux":{},"annotations":{"cgpu.io/applied.nonce":"forged","cgpu.io/applied.x":"forged","cgpu.io/gpu-mem-container":"6","a":"b"}}`)
	got, _ := json.Marshal(apply(t, raw, plan(map[int]quota.Bytes{0: 6 * quota.GiB, 1: 0})).Annotations)
	want := `{"a":"b","cgpu.io/applied.gpus":"GPU-00000000-0000-0000-0000-000000000000=6144MiB,GPU-10000000-0000-0000-0000-000000000000=native",` +
		`"cgpu.io/applied.nonce":"0123456789abcdef","cgpu.io/applied.socket":"/run/cgpu/g/0123456789abcdef.sock","cgpu.io/applied.version":"test","cgpu.io/gpu-mem-container":"6"}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestLimiterMounts puts the limiter's files over what a container mounts at the same places, and nothing else.
func TestLimiterMounts(t *testing.T) {
	raw := []byte(`{"process":{},"linux":{},"mounts":[
		{"destination":"/run","type":"tmpfs","source":"tmpfs"},
		{"destination":"/run/cgpu/data","type":"bind","source":"/data"},
		{"destination":"/run/cgpu//libcgpu.so","type":"bind","source":"/mine"},
		{"destination":"/run/cgpu/vgpu","type":"bind","source":"/forged"},
		{"destination":"/etc/ld.so.preload","type":"bind","source":"/own"}]}`)
	const kept = "/run=tmpfs: /run/cgpu/data=/data:"
	const readOnly = ":bind,rprivate,ro,nosuid,nodev"
	for name, test := range map[string]struct {
		change func(*Plan)
		want   string
	}{
		"none": {func(*Plan) {}, kept + " /run/cgpu//libcgpu.so=/mine: /run/cgpu/vgpu=/forged: /etc/ld.so.preload=/own:"},
		"page only": {
			func(p *Plan) { p.Limiter, p.Preload = "", "" },
			kept + " /run/cgpu//libcgpu.so=/mine: /etc/ld.so.preload=/own: /run/cgpu/vgpu=/r/page/n" + readOnly + ",noexec",
		},
		"musl": {
			func(p *Plan) { p.Preload = "" },
			kept + " /etc/ld.so.preload=/own: /run/cgpu/libcgpu.so=/lib/l.so" + readOnly + " /run/cgpu/vgpu=/r/page/n" + readOnly + ",noexec",
		},
		"all": {
			func(p *Plan) {},
			kept + " /run/cgpu/libcgpu.so=/lib/l.so" + readOnly + " /run/cgpu/vgpu=/r/page/n" + readOnly +
				",noexec /etc/ld.so.preload=/r/ld.so.preload" + readOnly + ",noexec",
		},
		"preload mode": {
			func(p *Plan) { p.PageWritable, p.Socket = true, "" },
			kept + " /run/cgpu/libcgpu.so=/lib/l.so" + readOnly +
				" /run/cgpu/vgpu=/r/page/n:bind,rprivate,rw,nosuid,nodev,noexec /etc/ld.so.preload=/r/ld.so.preload" + readOnly + ",noexec",
		},
	} {
		p := plan(map[int]quota.Bytes{0: quota.GiB})
		p.Mounts = nil
		if name != "none" {
			p.Limiter, p.Page, p.Preload = "/lib/l.so", "/r/page/n", "/r/ld.so.preload"
		}
		test.change(&p)
		var got []string
		for _, m := range apply(t, raw, p).Mounts {
			got = append(got, m.Destination+"="+m.Source+":"+strings.Join(m.Options, ","))
		}
		if got := strings.Join(got, " "); got != test.want {
			t.Errorf("%s:\ngot  %s\nwant %s", name, got, test.want)
		}
	}
}

func TestOwn(t *testing.T) {
	for mounts, want := range map[string]Own{
		`[]`: {},
		`[{"destination":"/proc"},{"destination":"/run/secrets","options":["ro"]},{"destination":"/etc/hosts","options":["ro"]},{"destination":"/library"}]`: {},
		`[{"destination":"/run"}]`:                                {},
		`[{"destination":"/run","options":["ro"]}]`:               {ReadOnly: "/run"},
		`[{"destination":"run/cgpu/","options":["rro"]}]`:         {ReadOnly: "/run/cgpu"},
		`[{"destination":"/run/cgpu/vgpu","options":["ro"]}]`:     {},
		`[{"destination":"/run","options":["ro","nosuid","rw"]}]`: {},
		`[{"destination":"/etc/ld.so.preload"}]`:                  {Preload: "/etc/ld.so.preload"},
		`[{"destination":"/etc/./"}]`:                             {Preload: "/etc"},
		`[{"destination":"/usr"}]`:                                {Loader: "/usr"},
		`[{"destination":"/lib64"}]`:                              {Loader: "/lib64"},
		`[{"destination":"/lib/x86_64-linux-gnu/x.so"}]`:          {},
		`[{"destination":"/","options":["ro"]}]`:                  {ReadOnly: "/", Preload: "/", Loader: "/"},
	} {
		got, err := decode(t, []byte(`{"mounts":`+mounts+`}`)).Own()
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", mounts, got, err, want)
		}
	}
	if _, err := decode(t, []byte(`{"mounts":{}}`)).Own(); err == nil {
		t.Error("accepted mounts that are no list")
	}
}

// TestHookMounts: cgpu-hook mounts ordinary driver files, where it can, and the runtime all others.
func TestHookMounts(t *testing.T) {
	const lib, other, own = "/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "/run/nvidia-persistenced/socket", "/usr/bin/nvidia-smi"
	const colons = "/usr/bin/nvidia-debugdump" // whose host path the hook's arguments cannot say
	p := plan(map[int]quota.Bytes{0: quota.GiB})
	p.HookMounts = true
	p.Mounts = append(p.Mounts, p.Mounts[0], // twice
		device.Mount{Host: other, Container: other, Options: append(slices.Clone(p.Mounts[0].Options), "noexec")},
		device.Mount{Host: "/opt/nvidia-smi", Container: own, Options: p.Mounts[0].Options},
		device.Mount{Host: "/opt/a::b/debugdump", Container: colons, Options: p.Mounts[0].Options})
	p.Links, p.LibDirs, p.Libraries = nil, nil, nil
	const mine = `{"destination":"/usr/bin/../bin/nvidia-smi","source":"/mine"}`
	for name, tt := range map[string]struct {
		config          string
		hook, byRuntime []string
	}{
		"a container":         {``, []string{lib, own}, []string{other, colons}},
		"a place is taken":    {`"mounts":[` + mine + `],`, []string{lib}, []string{other, colons}},
		"root of other users": {`"linux":{"namespaces":[{"type":"mount"},{"type":"user"}]},`, nil, []string{lib, other, own, colons}},
	} {
		doc := decode(t, []byte(`{`+tt.config+`"process":{}}`))
		if err := Apply(doc, p); err != nil {
			t.Fatal(err)
		}
		e := value[edited](t, doc.Encode())
		var hook, byRuntime []string
		for _, h := range e.Hooks["createContainer"] {
			for i, arg := range h.Args {
				if arg == "--mount" {
					_, at, _ := strings.Cut(h.Args[i+1], "::")
					hook = append(hook, at)
				}
			}
		}
		for _, m := range e.Mounts {
			if slices.Contains([]string{lib, other, own, colons}, m.Destination) {
				byRuntime = append(byRuntime, m.Destination)
			}
		}
		if !slices.Equal(hook, tt.hook) || !slices.Equal(byRuntime, tt.byRuntime) {
			t.Errorf("%s: the hook has %v, the runtime %v, want %v and %v", name, hook, byRuntime, tt.hook, tt.byRuntime)
		}
	}
}
