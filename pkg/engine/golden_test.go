// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

var update = flag.Bool("update", false, "write what comes out into testdata")

const (
	oursPath = "/usr/local/bin/cgpu-runtime"
	cgpuToml = "/etc/cgpu/cgpu.toml"
	wantLine = "== want\n"
)

// scenario is a file of testdata: a command line, files, and what is to come out of it.
type scenario struct {
	verb, engine  string
	name, path    string
	program       Version
	asDefault     bool
	kubernetes    bool
	pods          string // the value of pods in cgpu.toml; "" is for --kubernetes alone
	crlf, foreign bool   // foreign: what is not ours was changed since, so that uninstall does not give back the first text
	files         map[string][]byte
	want          string
}

func readScenario(t *testing.T, file string) (s scenario, head string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, s.want, _ = strings.Cut(string(text), wantLine)
	s.name, s.path, s.files = "cgpu", oursPath, map[string][]byte{}
	lines := strings.SplitAfter(head, "\n")
	words := strings.Fields(lines[0])
	s.verb, s.engine = words[0], words[1]
	for _, w := range words[2:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "default":
			s.asDefault = true
		case "crlf":
			s.crlf = true
		case "foreign":
			s.foreign = true
		case "name":
			s.name = value
		case "path":
			s.path = value
		case "kubernetes":
			s.kubernetes = true
		case "pods":
			s.pods = value
		case "major":
			s.program = Version{Major: int(value[0] - '0')}
			if _, minor, ok := strings.Cut(value, "."); ok {
				if s.program.Minor, err = strconv.Atoi(minor); err != nil {
					t.Fatal(err)
				}
			}
		default:
			t.Fatalf("%s: %q", file, w)
		}
	}
	path := ""
	for _, l := range lines[1:] {
		if p, ok := strings.CutPrefix(l, "-- "); ok {
			path = strings.TrimSuffix(p, " --\n")
			s.files[path] = []byte{}
			continue
		}
		if path == "" {
			continue // a remark
		}
		if s.crlf {
			l = strings.ReplaceAll(l, "\n", "\r\n")
		}
		s.files[path] = append(s.files[path], strings.ReplaceAll(l, "␄\n", "")...) // ␄: no line end here
	}
	return s, head
}

func root(files map[string][]byte) fs.FS {
	m := fstest.MapFS{}
	for path, text := range files {
		if dir, ok := strings.CutSuffix(path, "/"); ok {
			m[strings.TrimPrefix(dir, "/")] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
			continue
		}
		m[strings.TrimPrefix(path, "/")] = &fstest.MapFile{Data: text}
	}
	return m
}

func (s scenario) plan(verb string, files map[string][]byte) (Plan, error) {
	fsys := root(files)
	r := Request{Name: s.name, Path: s.path, Default: s.asDefault, Kubernetes: s.kubernetes}
	read := func(path string) []byte { text := files[path]; return text }
	switch verb + " " + s.engine {
	case "install docker":
		return InstallDocker(DockerConfig, read(DockerConfig), read(DockerNote(DockerConfig)), r)
	case "uninstall docker":
		return UninstallDocker(DockerConfig, read(DockerConfig), read(DockerNote(DockerConfig)), s.name)
	case "install containerd":
		return InstallContainerd(fsys, ContainerdConfig, s.program, r)
	case "uninstall containerd":
		return UninstallContainerd(fsys, ContainerdConfig, s.program, s.name)
	case "install k3s":
		return InstallGenerated(fsys, K3sConfig, r)
	case "uninstall k3s":
		return UninstallGenerated(fsys, K3sConfig, s.name)
	case "install pods":
		return InstallPods(cgpuToml, read(cgpuToml), cmp.Or(s.pods, PodsAllocated), s.pods != "")
	case "uninstall pods":
		return UninstallPods(cgpuToml, read(cgpuToml))
	case "install crio":
		return InstallCRIO(fsys, CRIOConfig(s.name), r)
	case "uninstall crio":
		return UninstallCRIO(fsys, CRIOConfig(s.name), s.name)
	case "install podman":
		return InstallPodman(fsys, PodmanConfig(s.name), r)
	case "uninstall podman":
		return UninstallPodman(fsys, PodmanConfig(s.name), s.name)
	}
	return Plan{}, fmt.Errorf("no such scenario: %s %s", verb, s.engine)
}

func applyTo(files map[string][]byte, p Plan) map[string][]byte {
	after := maps.Clone(files)
	for _, e := range p.Edits {
		if e.After == nil {
			delete(after, e.Path)
		} else {
			after[e.Path] = e.After
		}
	}
	return after
}

func describe(p Plan, err error) string {
	if err != nil {
		return "error: " + err.Error() + "\n"
	}
	var b strings.Builder
	for _, d := range p.Done {
		fmt.Fprintf(&b, "done: %s\n", d)
	}
	for _, e := range p.Elsewhere {
		fmt.Fprintf(&b, "elsewhere: %s\n", e)
	}
	for _, h := range p.Hints {
		fmt.Fprintf(&b, "hint: %s\n", h)
	}
	if p.Restart {
		b.WriteString("restart, not reload\n")
	}
	for _, e := range p.Edits {
		b.WriteString(Diff(e))
	}
	if len(p.Edits) == 0 {
		b.WriteString("nothing to change\n")
	}
	return strings.ReplaceAll(b.String(), "\r", "␍")
}

func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no testdata", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			s, head := readScenario(t, file)
			p, err := s.plan(s.verb, s.files)
			got := describe(p, err)
			if *update {
				if err := os.WriteFile(file, []byte(head+wantLine+got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != s.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, s.want)
			}
			if err != nil {
				return
			}
			for _, e := range p.Edits {
				if !e.Note && s.crlf && bytes.Contains(bytes.ReplaceAll(e.After, []byte("\r\n"), nil), []byte("\n")) {
					t.Errorf("%s: line ends are mixed", e.Path)
				}
			}
			after := applyTo(s.files, p)
			again, err := s.plan(s.verb, after)
			if err != nil || len(again.Edits) > 0 {
				t.Errorf("a second %s: %s", s.verb, describe(again, err))
			}
			if s.verb != "install" || len(p.Edits) == 0 || s.foreign {
				return
			}
			back, err := s.plan("uninstall", after)
			if err != nil {
				t.Fatalf("uninstall: %v", err)
			}
			left := applyTo(after, back)
			if a, b := slices.Sorted(maps.Keys(s.files)), slices.Sorted(maps.Keys(left)); !slices.Equal(a, b) {
				t.Errorf("files after uninstall: %q, before install: %q", b, a)
			}
			for path, text := range s.files {
				if !Restorable(text, left[path], strings.HasSuffix(path, ".json")) {
					t.Errorf("%s after uninstall:\n%q\nbefore install:\n%q", path, left[path], text)
				}
			}
		})
	}
}

// TestDiff: what Diff prints is what patch takes.
func TestDiff(t *testing.T) {
	numbers := func(n int, but map[int]string) string {
		var b strings.Builder
		for i := range n {
			if text, has := but[i]; has {
				b.WriteString(text)
				continue
			}
			fmt.Fprintf(&b, "%d\n", i)
		}
		return b.String()
	}
	for _, tt := range []struct {
		name, before, after, want string
	}{
		{"one hunk", "a\nb\nc\n", "a\nx\nc\n", "@@ -1,3 +1,3 @@\n a\n-b\n+x\n c\n"},
		{"no line end", "a", "a\nb", "@@ -1 +1,2 @@\n-a\n\\ No newline at end of file\n+a\n+b\n\\ No newline at end of file\n"},
		{"empty", "", "a\n", "@@ -0,0 +1 @@\n+a\n"},
		{"far apart", numbers(20, nil), numbers(20, map[int]string{2: "x\n", 15: ""}),
			"@@ -1,6 +1,6 @@\n 0\n 1\n-2\n+x\n 3\n 4\n 5\n@@ -13,7 +13,6 @@\n 12\n 13\n 14\n-15\n 16\n 17\n 18\n"},
		{"near", numbers(12, nil), numbers(12, map[int]string{2: "x\n", 9: "y\n"}),
			"@@ -1,12 +1,12 @@\n 0\n 1\n-2\n+x\n 3\n 4\n 5\n 6\n 7\n 8\n-9\n+y\n 10\n 11\n"},
	} {
		got := Diff(Edit{Path: "/f", Before: []byte(tt.before), After: []byte(tt.after)})
		if want := "--- /f\n+++ /f\n" + tt.want; got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", tt.name, got, want)
		}
	}
}

func TestNames(t *testing.T) {
	for name, good := range map[string]bool{"cgpu": true, "cgpu-2.x_y": true, "": false, "runc": false, "-x": false,
		"a b": false, "a\"": false} {
		if err := CheckName(name); (err == nil) != good {
			t.Errorf("%q: %v", name, err)
		}
	}
	for path, good := range map[string]bool{"/a b/\"c": true, "cgpu-runtime": false, "/a\nb": false, "/\xff": false} {
		if err := CheckPath(path); (err == nil) != good {
			t.Errorf("%q: %v", path, err)
		}
	}
	for text, want := range map[string]Version{
		"containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3": {1, 6},
		"containerd github.com/containerd/containerd/v2 v2.1.4 abc":                   {2, 1},
		"containerd github.com/containerd/containerd/v2 2.1.4+unknown ":               {2, 1},
		"nonsense": {},
	} {
		if got := ContainerdVersion(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func TestDockerFlags(t *testing.T) {
	args := []string{"dockerd", "--add-runtime=x=/y", "--default-runtime", "x", "--add-runtimes"}
	if got := DockerFlags(args); !slices.Equal(got, []string{"--add-runtime", "--default-runtime"}) {
		t.Errorf("got %q", got)
	}
	if got := DockerFlags([]string{"dockerd", "-H", "fd://", "--containerd=/run/c"}); got != nil {
		t.Errorf("got %q", got)
	}
}

func FuzzDocker(f *testing.F) {
	f.Add([]byte(`{"runtimes": {"a": {"path": "b\\\""}}, "x": [1, {"}": "]"}], "default-runtime": "a"}`))
	f.Add([]byte("{\n\t\"a\": 1\r\n}"))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		r := Request{Name: "cgpu", Path: oursPath, Default: true}
		p, err := InstallDocker(DockerConfig, text, nil, r)
		if d, _ := parseDaemon(DockerConfig, text); err != nil || d.top.find("default-runtime") >= 0 && d.byName != "runc" {
			return // what is no runtime of the file does not come back
		}
		files := applyTo(map[string][]byte{DockerConfig: text}, p)
		back, err := UninstallDocker(DockerConfig, files[DockerConfig], files[DockerNote(DockerConfig)], "cgpu")
		if err != nil {
			t.Fatalf("%q → %q: %v", text, files[DockerConfig], err)
		}
		if got := applyTo(files, back)[DockerConfig]; len(p.Edits) == 2 && !Restorable(text, got, true) && !bytes.Contains(text, []byte("cgpu")) {
			t.Errorf("%q → %q → %q", text, files[DockerConfig], got)
		}
	})
}

func FuzzContainerd(f *testing.F) {
	f.Add([]byte("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  default_runtime_name = 'runc' # x\n"), 1)
	f.Add([]byte("version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\ncontainerd.default_runtime_name = \"runc\"\r\n"), 2)
	f.Add([]byte("version = 2\nplugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options = {SystemdCgroup = true}\nx = "+
		"\"\"\"\n[a]\"\"\""), 1)
	f.Add([]byte("# nothing"), 0)
	f.Fuzz(func(t *testing.T, text []byte, major int) {
		s := scenario{engine: "containerd", name: "cgpu", path: oursPath, program: Version{Major: major}, asDefault: true, kubernetes: true}
		before := map[string][]byte{ContainerdConfig: text}
		p, err := s.plan("install", before)
		if err != nil || bytes.Contains(text, []byte("cgpu")) {
			return
		}
		after := applyTo(before, p)
		if again, err := s.plan("install", after); err != nil || len(again.Edits) > 0 {
			t.Fatalf("%q → %q: again: %s", text, after[ContainerdConfig], describe(again, err))
		}
		back, err := s.plan("uninstall", after)
		if err != nil {
			t.Fatalf("%q → %q: %v", text, after[ContainerdConfig], err)
		}
		if got := applyTo(after, back)[ContainerdConfig]; !Restorable(text, got, false) && len(back.Hints) == 0 {
			t.Errorf("%q → %q → %q", text, after[ContainerdConfig], got)
		}
	})
}

// TestForges: the patterns of containerd's sources, matched as they match there.
func TestForges(t *testing.T) {
	for pattern, want := range map[string]bool{
		"cgpu.io/*": false, "*": false, "*.io": false, "ALIYUN_COM_GPU_*": false, "nvidia.com/*": false, "cgpu.io/[": false, "": false,
		"*/*": true, "*.io/*": true, "*cgpu.io/*": true, "alloc.cgpu.io/*": true, "alloc.cgpu.io/shares": true, "?????.cgpu.io/*": true,
		"alloc.cgpu.io/new":        true,
		"alloc.cgpu.io[!-~]shares": true,
	} {
		if got := forges(pattern); got != want {
			t.Errorf("%q: %v, want %v", pattern, got, want)
		}
	}
}

func FuzzPods(f *testing.F) {
	f.Add([]byte("max_inst = 3 # x\n[sim]\ngpus = [1]\n"))
	f.Add([]byte("pods = 'any'\r\n"))
	f.Add([]byte("# only\n\n# of the table\n[[sim.gpus]]\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := InstallPods(cgpuToml, text, PodsAllocated, true)
		if err != nil || len(p.Edits) == 0 || bytes.Contains(text, []byte("cgpu install")) {
			return
		}
		after := p.Edits[0].After
		if again, err := InstallPods(cgpuToml, after, PodsAllocated, true); err != nil || len(again.Edits) > 0 {
			t.Fatalf("%q → %q: again: %s", text, after, describe(again, err))
		}
		back, err := UninstallPods(cgpuToml, after)
		if err != nil || len(back.Edits) != 1 || !Restorable(text, back.Edits[0].After, false) {
			t.Errorf("%q → %q → %s", text, after, describe(back, err))
		}
	})
}
