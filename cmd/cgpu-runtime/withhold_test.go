// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// refusedNumbers are those of sweep's numbers that a pod's container without a GPU may not call.
func refusedNumbers(number uint64) bool {
	low := uint8(number)
	switch number &^ 0xff {
	case 0:
		return slices.Contains([]uint8{0x21, 0x22, 0x42, 0x4e}, low) // UVM
	case 0xc0204600:
		return slices.Contains([]uint8{0x27, 0x2a, 0x2b, 0x39, 0x4a, 0xd9}, low)
	case 0xffffffff_c0304600:
		return slices.Contains([]uint8{0x27, 0x28, 0x29, 0x2a, 0x2b, 0x34, 0x35, 0x39, 0x4a, 0x54, 0x57, 0xce, 0xd3, 0xd9}, low)
	}
	return false
}

// checkSweep holds what sweep printed to a set of refused numbers.
func checkSweep(t *testing.T, out string, refused func(uint64) bool) {
	t.Helper()
	calls, wrong := 0, 0
	for line := range strings.Lines(out) {
		var abi string
		var fd, number uint64
		var got unix.Errno
		if _, err := fmt.Sscanf(line, "%s %d %x %d", &abi, &fd, &number, &got); err != nil {
			t.Fatal(line, err)
		}
		want := []unix.Errno{unix.EBADF}
		if refused(number) {
			want = []unix.Errno{unix.EPERM}
		} else if abi == "x32" {
			want = append(want, unix.ENOSYS) // a kernel without x32
		}
		calls++
		if !slices.Contains(want, got) {
			if wrong++; wrong < 10 {
				t.Errorf("%s %d %#x: %v, want %v", abi, fd, number, got, want)
			}
		}
	}
	if calls != 2*2*5*256 {
		t.Errorf("%d calls", calls)
	}
}

// TestWithhold starts containers of pods that have no GPU, and commands in them.
func TestWithhold(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		none := func(uint64) bool { return false }
		for i, c := range []struct {
			name, pods, profile string
			kind                string
			privileged          bool
			env                 []string
			refused             func(uint64) bool
		}{
			{name: "no profile", pods: device.PodsAllocated, refused: refusedNumbers},
			{name: "docker's profile", pods: device.PodsGPUShare, profile: dockerProfile(t, ""), refused: refusedNumbers},
			{name: "of our business otherwise", pods: device.PodsAllocated, env: []string{"IMAGE=registry/cgpu.io/x"}, refused: refusedNumbers},
			{name: "any", pods: device.PodsAny, refused: none},
			{name: "pause container", pods: device.PodsAllocated, kind: "sandbox", refused: none},
			{name: "privileged", pods: device.PodsAllocated, privileged: true, refused: none},
		} {
			t.Run(c.name, func(t *testing.T) {
				n.t = t
				n.table.Config.Pods = c.pods
				n.saveTable()
				if c.kind == "" {
					c.kind = "container"
				}
				bundle := n.podBundle(c.kind, c.env, nil)
				file := filepath.Join(bundle, "config.json")
				var config map[string]any
				raw, _ := os.ReadFile(file)
				if err := json.Unmarshal(raw, &config); err != nil {
					t.Fatal(err)
				}
				if c.profile != "" {
					config["linux"].(map[string]any)["seccomp"] = json.RawMessage(c.profile)
				}
				process := config["process"].(map[string]any)
				process["args"] = []string{"/sweep", "sleep"}
				if c.privileged {
					process["capabilities"] = map[string]any{"bounding": []string{"CAP_SYS_ADMIN"}, "effective": []string{"CAP_SYS_ADMIN"},
						"permitted": []string{"CAP_SYS_ADMIN"}}
				}
				raw, _ = json.Marshal(config)
				if err := os.WriteFile(file, raw, 0o640); err != nil {
					t.Fatal(err)
				}
				id := fmt.Sprintf("cgpu-test-withhold-%d-%d", os.Getpid(), i)
				defer n.run("delete", "--force", id)
				for _, args := range [][]string{{"create", "--bundle", bundle, id}, {"start", id}} {
					if r := n.run(args...); r.err != nil {
						t.Fatalf("%v: %v\n%s\n%s", args, r.err, r.stderr, r.log)
					}
				}
				if after, _ := os.ReadFile(file); bytes.Equal(raw, after) == c.refused(0x21) {
					t.Errorf("config.json is the same: %v", bytes.Equal(raw, after))
				}
				if records := n.records(); len(records) != 0 {
					t.Errorf("ledger: %+v", records)
				}
				r := n.run("exec", id, "/sweep")
				if r.err != nil {
					t.Fatalf("%v\n%s\n%s", r.err, r.stderr, r.log)
				}
				checkSweep(t, r.stdout, c.refused)
			})
		}
	})
}

// TestWithholdUnread: a config.json that is too large for us is not for runc. A pod's container with one is refused where it would go
// without the filter, and no other is. Nor is a pod's container brought back from a checkpoint there.
func TestWithholdUnread(t *testing.T) {
	n := newNode(t, "runc")
	large := map[string]string{"large": strings.Repeat("x", spec.MaxSize)}
	for i, c := range []struct {
		name, command, pods string
		outside             bool
		annotations         map[string]string
		refused             string // "": it is runc's to say
	}{
		{name: "large", command: "create", pods: device.PodsAllocated, annotations: large, refused: "want at most 16777216: shorten"},
		{name: "large, gpushare", command: "create", pods: device.PodsGPUShare, annotations: large, refused: "want at most 16777216: shorten"},
		{name: "large, any", command: "create", pods: device.PodsAny, annotations: large},
		{name: "large, outside of pods", command: "create", pods: device.PodsAllocated, outside: true, annotations: large},
		{name: "names that differ in case", command: "create", pods: device.PodsAllocated,
			annotations: map[string]string{"example.org/x": "1", "example.org/X": "2"}},
		{name: "checkpoint", command: "restore", pods: device.PodsAllocated, refused: "is not restored from a checkpoint"},
		{name: "checkpoint, any", command: "restore", pods: device.PodsAny},
		{name: "checkpoint, outside of pods", command: "restore", pods: device.PodsAllocated, outside: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.t = t
			n.table.Config.Pods = c.pods
			n.saveTable()
			bundle := n.podBundle("container", nil, c.annotations)
			file := filepath.Join(bundle, "config.json")
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if c.outside {
				raw = bytes.ReplaceAll(raw, []byte("io.kubernetes.cri.container-type"), []byte("io.kubernetes.cri.other"))
				if err := os.WriteFile(file, raw, 0o640); err != nil {
					t.Fatal(err)
				}
			}
			id := fmt.Sprintf("cgpu-test-unread-%d-%d", os.Getpid(), i)
			before, _ := os.ReadFile(event.File(n.runDir))
			args := []string{c.command, "--bundle", bundle, id}
			if c.command == "restore" {
				args = []string{c.command, "--image-path", t.TempDir(), "--work-path", t.TempDir(), "--bundle", bundle, id}
			}
			r := n.run(args...)
			defer n.run("delete", "--force", id)
			ours := strings.Contains(r.log, "cgpu: a pod's container")
			if ours != (c.refused != "") || !strings.Contains(r.log, c.refused) || c.command == "create" && (r.err == nil) == ours {
				t.Fatalf("%v, want %q\n%s\n%s", r.err, c.refused, r.stderr, r.log)
			}
			after, _ := os.ReadFile(event.File(n.runDir))
			if told := strings.TrimPrefix(string(after), string(before)); strings.Contains(told, id) != ours ||
				strings.Contains(told, "starts without") {
				t.Errorf("events: %s", told)
			}
			if now, _ := os.ReadFile(file); bytes.Equal(now, raw) == strings.HasPrefix(c.name, "names") {
				t.Errorf("config.json is the same: %v", bytes.Equal(now, raw))
			}
		})
	}
}

// TestWithholds: without a node table cgpu.toml decides, as text.
func TestWithholds(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "cgpu.toml")
	t.Setenv("CGPU_CONFIG", file)
	for text, want := range map[string]bool{
		"":                              false,
		"pods = \"any\" # or allocated": false,
		"pods = \"allocated\"":          true,
		"  pods='gpushare' # any":       true,
		"broken [\npods=\"allocated\"":  true,
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := withholds(dir); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	if err := os.Remove(file); err != nil || withholds(dir) {
		t.Error("no cgpu.toml: ", err)
	}
	if err := os.Mkdir(file, 0o755); err != nil || !withholds(dir) {
		t.Error("one that cannot be read: ", err)
	}
	if err := os.WriteFile(device.TableFile(dir), []byte(`{"config":{"pods":"any"}}`), 0o644); err != nil || withholds(dir) {
		t.Error("the table says any: ", err)
	}
}

// BenchmarkWithholdCreate is what the filter adds to the runtime's part of a create.
func BenchmarkWithholdCreate(b *testing.B) {
	raw, err := os.ReadFile("../../pkg/spec/testdata/cri16-default.json")
	if err != nil {
		b.Fatal(err)
	}
	dir := b.TempDir()
	if err := os.WriteFile(device.TableFile(dir), []byte(`{"config":{"pods":"allocated"}}`), 0o644); err != nil {
		b.Fatal(err)
	}
	file := bundleFile{path: filepath.Join(dir, "config.json")}
	if err := os.WriteFile(file.path, raw, 0o644); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := withhold(file, raw, dir); err != nil {
			b.Fatal(err)
		}
	}
}
