// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/schema"
)

// engines is a folder with programs that play engines, first in PATH, and a cgpu-runtime.
type engines struct {
	*testing.T
	dir, config string
}

func newEngines(t *testing.T) engines {
	t.Helper()
	dir := t.TempDir()
	e := engines{t, dir, filepath.Join(dir, "etc")}
	if err := os.MkdirAll(e.config, 0o755); err != nil {
		t.Fatal(err)
	}
	e.program("cgpu-runtime", "exit 1")
	e.program("dockerd", "exit 0")
	e.program("containerd", `case "$*" in --version) echo "containerd x 1.6.20" ;; *default) cat <<< "" ;; *) cat "$2" ;; esac`)
	t.Setenv("PATH", filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
	return e
}

func (e engines) program(name, body string) {
	e.Helper()
	path := filepath.Join(e.dir, "bin", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		e.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/bash\n"+body+"\n"), 0o755); err != nil {
		e.Fatal(err)
	}
}

// cgpu runs install or uninstall on a file of the folder.
func (e engines) cgpu(args string) string {
	verb, rest, _ := strings.Cut(args, " ")
	if verb == "install" {
		rest += " --runtime-path " + filepath.Join(e.dir, "bin", "cgpu-runtime")
	}
	return cgpu(verb + " " + strings.ReplaceAll(rest, "--config ", "--config "+e.config+"/"))
}

func (e engines) write(name, text string, mode fs.FileMode) {
	e.Helper()
	path := filepath.Join(e.config, name)
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		e.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		e.Fatal(err)
	}
}

// files are the folder's, with their contents.
func (e engines) files() map[string]string {
	e.Helper()
	all := map[string]string{}
	entries, err := os.ReadDir(e.config)
	if err != nil {
		e.Fatal(err)
	}
	for _, entry := range entries {
		text, err := os.ReadFile(filepath.Join(e.config, entry.Name()))
		if err != nil {
			e.Fatal(err)
		}
		all[entry.Name()] = string(text)
	}
	backups, err := filepath.Glob(e.config + ".cgpu-backup/*")
	if err != nil {
		e.Fatal(err)
	}
	for _, path := range backups {
		text, err := os.ReadFile(path)
		if err != nil {
			e.Fatal(err)
		}
		all[filepath.Base(path)] = string(text)
	}
	return all
}

func (e engines) want(what, got string, parts ...string) {
	e.Helper()
	for _, p := range parts {
		if !strings.Contains(got, p) {
			e.Errorf("%s: printed\n%s\nwant %q in it", what, got, p)
		}
	}
}

const (
	daemonJSON = "{\n  \"runtimes\": {\"nvidia\": {\"path\": \"n\"}},\n\n  \"default-runtime\": \"nvidia\"\n}\n\n"
	criTOML    = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n  runtime_type = " +
		"\"io.containerd.runc.v2\"\n\n\n"
)

// TestInstallK3s: the file that k3s writes stays, the template beside it comes and goes, and nobody's containerd is asked.
func TestInstallK3s(t *testing.T) {
	e := newEngines(t)
	e.program("containerd", "exit 1")
	e.write("config.toml", criTOML, 0o640)
	before := e.files()
	e.want("install", e.cgpu("install k3s --config config.toml"), "config.toml: runtime cgpu: ", "written by "+e.config+"/config.toml.tmpl",
		"next: restart k3s; running containers live on")
	after := e.files()
	if text := after["config.toml.tmpl"]; after["config.toml"] != criTOML || !strings.Contains(text, "{{ template \"base\" . }}") ||
		!strings.Contains(text, "cgpu-runtime") || len(after) != 2 {
		t.Errorf("after install: %q", after)
	}
	e.want("again", e.cgpu("install k3s --config config.toml"), "config.toml: nothing to change\n")
	e.want("uninstall", e.cgpu("uninstall k3s --config config.toml"), "taken out of "+e.config+"/config.toml.tmpl")
	if got := e.files(); !maps.Equal(got, before) {
		t.Errorf("left behind: %q", got)
	}
	e.want("never started", e.cgpu("install rke2 --config none.toml"), "none.toml: it is not there: start k3s or RKE2 once")
}

// TestInstall: there and back leaves no trace, and the file stays what it was: link, mode, bytes.
func TestInstall(t *testing.T) {
	for _, tt := range []struct{ engine, text string }{{"docker", daemonJSON}, {"containerd", criTOML}} {
		t.Run(tt.engine, func(t *testing.T) {
			e := newEngines(t)
			e.write("real", tt.text, 0o640)
			if err := os.Symlink("real", filepath.Join(e.config, "file")); err != nil {
				t.Fatal(err)
			}
			before := e.files()
			dry := e.cgpu("install " + tt.engine + " --default --dry-run --config file")
			e.want("dry run", dry, "--- "+e.config+"/file\n", "\n+")
			if got := e.files(); !maps.Equal(got, before) {
				t.Fatalf("a dry run left %q", got)
			}
			e.want("install", e.cgpu("install "+tt.engine+" --default --config file"), "file: runtime cgpu: ", "file: default runtime: ",
				" → cgpu\n", "backup: "+e.config+".cgpu-backup/real.cgpu-backup-", "next: ")
			after := e.files()
			if target, err := os.Readlink(filepath.Join(e.config, "file")); err != nil || target != "real" {
				t.Errorf("the link is gone: %q, %v", target, err)
			}
			if info, err := os.Stat(filepath.Join(e.config, "real")); err != nil || info.Mode() != 0o640 {
				t.Errorf("mode %v, %v", info.Mode(), err)
			}
			if !strings.Contains(after["file"], "cgpu-runtime") {
				t.Errorf("file: %s", after["file"])
			}
			for name, text := range after {
				if strings.HasPrefix(name, "real.cgpu-backup-") && text != tt.text {
					t.Errorf("%s: %q", name, text)
				}
			}
			e.want("again", e.cgpu("install "+tt.engine+" --default --config file"), "file: nothing to change\n")
			if got := e.files(); !maps.Equal(got, after) {
				t.Errorf("a second install left %q", slices.Sorted(maps.Keys(got)))
			}
			e.want("uninstall", e.cgpu("uninstall "+tt.engine+" --config file"), "runtime cgpu taken out")
			if got := e.files(); !maps.Equal(got, before) {
				t.Errorf("left behind: %q", got)
			}
			e.want("uninstall again", e.cgpu("uninstall "+tt.engine+" --config file"), "nothing to change")
		})
	}
}

// TestInstallJSON: what was changed, for scripts, and nothing beside it.
func TestInstallJSON(t *testing.T) {
	e := newEngines(t)
	e.write("d.json", daemonJSON, 0o644)
	before := e.files()
	for _, step := range []struct{ args, change, line string }{
		{"install docker --dry-run", "edited", ""},
		{"install docker", "edited", "next: "},
		{"install docker", "", "nothing to change"},
		{"uninstall docker", "edited", "taken out"},
	} {
		var got schema.Install
		text := e.cgpu(step.args + " --config d.json -o json")
		if err := json.Unmarshal([]byte(text), &got); err != nil {
			t.Fatalf("%s: %v: %s", step.args, err, text)
		}
		dry := strings.Contains(step.args, "--dry-run")
		if got.Engine != "docker" || got.Runtime != "cgpu" || got.Config != e.config+"/d.json" || got.DryRun != dry {
			t.Errorf("%s: %+v", step.args, got)
		}
		want := []schema.InstallFile{}
		if step.change != "" {
			want = append(want, schema.InstallFile{Path: e.config + "/d.json", Change: step.change})
		}
		for i, f := range got.Files {
			if dry != strings.Contains(f.Diff, "\n+") {
				t.Errorf("%s: diff %q", step.args, f.Diff)
			}
			got.Files[i].Diff = ""
		}
		if !slices.Equal(got.Files, want) || !strings.Contains(strings.Join(got.Lines, "\n"), step.line) {
			t.Errorf("%s: %+v; want %+v, a line with %q", step.args, got, want, step.line)
		}
		if now := e.files(); dry && !maps.Equal(now, before) {
			t.Errorf("a dry run left %q", now)
		}
	}
}

// TestInstallOwnFile: a file that install has made needs no backup, when a second install changes it, and none is left.
func TestInstallOwnFile(t *testing.T) {
	for _, name := range []string{"docker", "containerd", "crio", "podman"} {
		e := newEngines(t)
		e.program("crio", "exit 0")
		all := e.cgpu("install "+name+" --config new") + e.cgpu("install "+name+" --default --config new")
		e.want(name, all, "runtime cgpu: ", "default runtime: ")
		if all += e.cgpu("uninstall " + name + " --config new"); strings.Contains(all, "backup") || len(e.files()) > 0 {
			t.Errorf("%s: left %v; printed\n%s", name, e.files(), all)
		}
	}
}

// TestUninstallKeepsBackup: the file was changed since, so the backup may still be of use.
func TestUninstallKeepsBackup(t *testing.T) {
	e := newEngines(t)
	e.write("d.json", daemonJSON, 0o644)
	e.cgpu("install docker --config d.json")
	e.write("d.json", strings.Replace(e.files()["d.json"], "{", `{"dns": [],`, 1), 0o644)
	e.want("uninstall", e.cgpu("uninstall docker --config d.json"), "kept: "+e.config+".cgpu-backup/d.json.cgpu-backup-")
	got := e.files()
	if want := strings.Replace(daemonJSON, "{", `{"dns": [],`, 1); got["d.json"] != want || len(got) != 2 {
		t.Errorf("left: %q", got)
	}
}

// TestUninstallDefault: a dockerd that reloads a file without a default keeps the old one, which is gone.
func TestUninstallDefault(t *testing.T) {
	for text, want := range map[string]string{"{}": "next: restart dockerd, and do not reload it", daemonJSON: "SIGHUP"} {
		e := newEngines(t)
		e.write("d.json", text, 0o644)
		e.cgpu("install docker --default --config d.json")
		e.want(text, e.cgpu("uninstall docker --restart --config d.json"), want)
	}
}

// TestInstallRollsBack: an engine that refuses the edit finds everything as it was.
func TestInstallRollsBack(t *testing.T) {
	for _, tt := range []struct{ name, engine, program, body, text, want string }{
		{"docker refuses", "docker", "dockerd",
			`grep -q cgpu "$3" || exit 0; echo "noise" >&2; echo "unable to configure: no cgpu here" >&2; exit 1`, daemonJSON,
			"error: install: dockerd refuses the edited configuration: unable to configure: no cgpu here; the files are as they were"},
		{"docker refuses a new file", "docker", "dockerd", `echo "no" >&2; exit 1`, "",
			"refuses the edited configuration: no; the files are as they were"},
		{"containerd refuses", "containerd", "containerd",
			`case "$*" in --version) echo "x 1.6.20" ;; *) grep -q cgpu "$2" && exit 3; cat "$2" ;; esac`, criTOML,
			"error: install: containerd refuses the edited configuration: exit status 3; the files are as they were"},
		{"containerd sees more", "containerd", "containerd",
			`case "$*" in --version) echo "x 1.6.20" ;; *) grep -q cgpu "$2" || echo 'root = "/r"'; cat "$2" ;; esac`, criTOML,
			"error: install: with the edit containerd would also see a change of root: edit"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEngines(t)
			e.program(tt.program, tt.body)
			if tt.text != "" {
				e.write("file", tt.text, 0o600)
			}
			before := e.files()
			e.want("install", e.cgpu("install "+tt.engine+" --default --config file"), tt.want)
			if got := e.files(); !maps.Equal(got, before) {
				t.Errorf("left: %q", got)
			}
		})
	}
}

// TestInstallUnchecked: what an engine cannot check, or refused before, is said and not held against the edit.
func TestInstallUnchecked(t *testing.T) {
	for body, want := range map[string]string{
		`echo "Status: unknown flag: --validate" >&2; echo "See help" >&2; exit 125`: "note: this dockerd cannot check its configuration",
		`echo "bip: no such network" >&2; exit 1`: "note: dockerd refuses its configuration: bip: no such " +
			"network\n",
	} {
		e := newEngines(t)
		e.program("dockerd", body)
		e.write("d.json", daemonJSON, 0o644)
		e.want(body, e.cgpu("install docker --config d.json"), want, "runtime cgpu: ")
		if !strings.Contains(e.files()["d.json"], "cgpu-runtime") {
			t.Errorf("%s: nothing was installed", body)
		}
	}
}

func TestInstallRefuses(t *testing.T) {
	e := newEngines(t)
	e.write("bad.json", "{,}", 0o644)
	e.write("d.json", daemonJSON, 0o644)
	before := e.files()
	for args, want := range map[string]string{
		"install":                     "error: install: want one of docker, containerd, k3s, rke2, crio, podman",
		"install lxc":                 `error: install: "lxc": want docker, containerd, k3s, rke2, crio, podman; see`,
		"install docker --name runc":  `error: install: --name "runc": engines use this name`,
		"uninstall docker --name a/b": `error: uninstall: --name "a/b": want letters`,
		"install docker --runtime-path cgpu-runtime":          `--runtime-path "cgpu-runtime": want an absolute path`,
		"install docker --runtime-path /no/where":             `--runtime-path "/no/where": no such file or directory: run make install first`,
		"install docker --runtime-path /":                     `--runtime-path "/": want a program`,
		"install docker -o yaml":                              `error: install: -o "yaml": want table or json`,
		"uninstall auto --host-root / -o json":                "error: uninstall: -o json: not with --host-root",
		"install docker --runtime-path /bin/true --x":         "error: install: -x: no such option",
		"uninstall docker --config " + e.config + "/bad.json": e.config + "/bad.json: line 1, column 2: invalid character ','",
	} {
		e.want(args, cgpu(args), want)
	}
	if got := e.files(); !maps.Equal(got, before) {
		t.Errorf("left: %q", got)
	}
}

// TestInstallImportedFolder: an import of all files of a folder does not find the backup, and a runtime that containerd does
// not see is not installed.
func TestInstallImportedFolder(t *testing.T) {
	e := newEngines(t)
	e.program("containerd", `case "$*" in --version) echo "x 1.6.20" ;; *) cat "$2" ;; esac`)
	e.write("a.toml", criTOML, 0o644)
	e.want("install", e.cgpu("install containerd --config a.toml"), "runtime cgpu: ", "backup: ")
	if got, err := filepath.Glob(e.config + "/*"); err != nil || len(got) != 1 {
		t.Errorf("beside it: %q, %v", got, err)
	}
	e.cgpu("uninstall containerd --config a.toml")
	if _, err := os.Stat(e.config + ".cgpu-backup"); err == nil {
		t.Error("the folder of backups stays")
	}
	e.program("containerd", `case "$*" in --version) echo "x 1.6.20" ;; *) sed s,cgpu-runtime,other, "$2" ;; esac`)
	before := e.files()
	e.want("overridden", e.cgpu("install containerd --config a.toml"), "error: install: containerd does not see runtime",
		"the files are as they were")
	if got := e.files(); !maps.Equal(got, before) {
		t.Errorf("left: %q", got)
	}
}

// TestReinstallBacksUp: a backup of an earlier install does not stand for the file of today.
func TestReinstallBacksUp(t *testing.T) {
	for _, tt := range []struct{ engine, first, second string }{
		{"docker", daemonJSON, "{\n  \"dns\": []\n}\n"},
		{"containerd", criTOML, "# another\n" + criTOML},
	} {
		e := newEngines(t)
		e.write("file", tt.first, 0o644)
		e.cgpu("install " + tt.engine + " --config file")
		e.write("file", tt.second, 0o644)
		e.want("another file", e.cgpu("install "+tt.engine+" --config file"), "backup: ")
		e.cgpu("install " + tt.engine + " --default --config file")
		var got []string
		for name, text := range e.files() {
			if strings.HasPrefix(name, "file.cgpu-backup-") {
				got = append(got, text)
			}
		}
		slices.Sort(got)
		if want := slices.Sorted(slices.Values([]string{tt.first, tt.second})); !slices.Equal(got, want) {
			t.Errorf("%s: backups %q, want %q", tt.engine, got, want)
		}
	}
}

// TestInstallAgainChecks: a file without anything to change is still checked, and read by the engine if that is asked for.
func TestInstallAgainChecks(t *testing.T) {
	e := newEngines(t)
	e.write("d.json", daemonJSON, 0o644)
	e.cgpu("install docker --config d.json")
	e.want("restart", e.cgpu("install docker --restart --config d.json"), "d.json: nothing to change\n", "next: start dockerd")
	e.program("dockerd", `echo "no" >&2; exit 1`)
	e.want("refused", e.cgpu("install docker --config d.json"), "error: install: ",
		"d.json: nothing to change, but dockerd refuses its configuration: no")
	e.write("c.toml", criTOML, 0o644)
	e.cgpu("install containerd --config c.toml")
	e.program("containerd", `case "$*" in --version) echo "x 1.6.20" ;; *) sed s,cgpu-runtime,other, "$2" ;; esac`)
	e.want("overridden", e.cgpu("install containerd --config c.toml"), "nothing to change, but containerd does not see runtime")
}

// TestInstallLeftover: what a killed install left of its file is not read, and goes at the next start.
func TestInstallLeftover(t *testing.T) {
	e := newEngines(t)
	e.program("crio", "exit 0")
	half := "# half\n[crio.runtime.runtimes.cgpu]\nruntime_path = \"/half\"\n"
	e.write(".99-cgpu.conf.cgpu-123", half, 0o644)
	e.write(".other.cgpu-123", "", 0o644)
	e.want("dry run", e.cgpu("install crio --dry-run --config 99-cgpu.conf"), "+++ "+e.config+"/99-cgpu.conf")
	if len(e.files()) != 2 {
		t.Errorf("a dry run left %q", e.files())
	}
	e.want("install", e.cgpu("install crio --config 99-cgpu.conf"), "runtime cgpu: ")
	if got := slices.Sorted(maps.Keys(e.files())); !slices.Equal(got, []string{".other.cgpu-123", "99-cgpu.conf"}) {
		t.Errorf("left: %q", got)
	}
}

// TestInstallKubernetes: both files change together, go back together, and a refusal leaves both as they were.
func TestInstallKubernetes(t *testing.T) {
	e := newEngines(t)
	e.program("containerd", `case "$*" in --version) echo "x 1.7.27" ;; *) cat "$2" ;; esac`)
	own := filepath.Join(e.config, "cgpu.toml")
	t.Setenv("CGPU_CONFIG", own)
	e.write("c.toml", criTOML, 0o644)
	e.write("cgpu.toml", "# mine\nmax_inst = 4\n", 0o600)
	before := e.files()
	e.want("dry run", e.cgpu("install containerd --kubernetes --dry-run --config c.toml"), "--- "+e.config+"/c.toml\n", "--- "+own+"\n",
		`+pods = "allocated" #`, "+  enable_cdi = true")
	if got := e.files(); !maps.Equal(got, before) {
		t.Fatalf("a dry run left %q", got)
	}
	e.want("install", e.cgpu("install containerd --kubernetes --config c.toml"), "c.toml: runtime cgpu: ", "c.toml: CDI: on",
		own+`: pods: (none set) → "allocated"`)
	after := e.files()
	if want := "# mine\nmax_inst = 4\npods = \"allocated\" # cgpu install: was unset.\n"; after["cgpu.toml"] != want {
		t.Errorf("cgpu.toml: %q, want %q", after["cgpu.toml"], want)
	}
	if info, err := os.Stat(own); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	e.want("again", e.cgpu("install containerd --kubernetes --config c.toml"), "c.toml: nothing to change\n")
	if got := e.files(); !maps.Equal(got, after) {
		t.Errorf("a second install left %q", slices.Sorted(maps.Keys(got)))
	}
	e.want("gpushare", e.cgpu("install containerd --kubernetes --pods gpushare --config c.toml"), `pods: "allocated" → "gpushare"`)
	e.want("kept", e.cgpu("install containerd --kubernetes --config c.toml"), "nothing to change")
	// Until it is restarted the engine has the runtime, and pods would take GPUs that nobody allocated.
	stays := "note: " + own + ": pods stays, since containerd has the runtime until it is restarted"
	e.want("uninstall", e.cgpu("uninstall containerd --config c.toml"), stays, "runtime cgpu taken out", "next: restart containerd")
	if got := e.files()["cgpu.toml"]; !strings.Contains(got, `pods = "gpushare"`) {
		t.Errorf("before the engine is restarted: %q", got)
	}
	e.want("dry run of the rest", e.cgpu("uninstall containerd --dry-run --config c.toml"), "--- "+own+"\n", `-pods = "gpushare"`)
	e.want("the rest", e.cgpu("uninstall containerd --config c.toml"), `pods: "gpushare" → (none set)`)
	e.want("nothing left", e.cgpu("uninstall containerd --config c.toml"), "nothing to change")
	if got := e.files(); !maps.Equal(got, before) {
		t.Errorf("left behind: %q", got)
	}

	e.want("one", e.cgpu("install containerd --kubernetes --config c.toml"), "runtime cgpu: ")
	e.want("another", e.cgpu("install containerd --kubernetes --name other --config c.toml"), "runtime other: ")
	e.want("one of two", e.cgpu("uninstall containerd --config c.toml"), "runtime cgpu taken out",
		own+`: pods stays: runtime "other" is cgpu's, too`)
	if got := e.files()["cgpu.toml"]; got != after["cgpu.toml"] {
		t.Errorf("with a runtime left: %q", got)
	}
	e.want("the last", e.cgpu("uninstall containerd --name other --config c.toml"), "runtime other taken out", stays)
	e.want("the rest of it", e.cgpu("uninstall containerd --name other --config c.toml"), `pods: "allocated" → (none set)`)

	e.write("cgpu.toml", "max_isnt = 4\n", 0o600)
	e.want("a bad cgpu.toml", e.cgpu("install containerd --kubernetes --config c.toml"), "error: install: config: ", "unknown key max_isnt")
	e.write("cgpu.toml", before["cgpu.toml"], 0o600)
	e.program("containerd", `case "$*" in --version) echo "x 1.7.27" ;; *) grep -q cgpu "$2" && exit 3; cat "$2" ;; esac`)
	e.want("refused", e.cgpu("install containerd --kubernetes --config c.toml"), "the files are as they were")
	if got := e.files(); !maps.Equal(got, before) {
		t.Errorf("left after a refusal: %q", got)
	}
	for args, want := range map[string]string{
		"install docker --kubernetes --config c.toml": "error: install: --kubernetes: docker does not start the containers of " +
			"pods",
		"install containerd --pods allocated --config c.toml":        `error: install: --pods "allocated": only with --kubernetes`,
		"install containerd --kubernetes --pods any --config c.toml": `error: install: --pods "any": want "allocated" or "gpushare"`,
	} {
		e.want(args, e.cgpu(args), want)
	}
}

// TestInstallLinks: a link stays a link, also one to a file that is not there yet; uninstall takes the file, and leaves the link.
func TestInstallLinks(t *testing.T) {
	e := newEngines(t)
	for _, target := range []string{"../managed/daemon.json", filepath.Join(e.dir, "managed", "daemon.json"), "again.json"} {
		link := filepath.Join(e.config, "daemon.json")
		for from, to := range map[string]string{link: target, filepath.Join(e.config, "again.json"): "../managed/daemon.json"} {
			if err := os.Symlink(to, from); err != nil {
				t.Fatal(err)
			}
		}
		if out := e.cgpu("install docker --config daemon.json"); strings.Contains(out, "error: ") {
			t.Fatal(out)
		}
		if to, err := os.Readlink(link); err != nil || to != target {
			t.Errorf("%s: the link leads to %q, %v", target, to, err)
		}
		if text, err := os.ReadFile(filepath.Join(e.dir, "managed", "daemon.json")); err != nil ||
			!strings.Contains(string(text), "cgpu-runtime") {
			t.Errorf("%s: %q, %v", target, text, err)
		}
		if out := e.cgpu("uninstall docker --config daemon.json"); strings.Contains(out, "error: ") {
			t.Fatal(out)
		}
		if to, err := os.Readlink(link); err != nil || to != target {
			t.Errorf("%s: after uninstall the link leads to %q, %v", target, to, err)
		}
		if err := errors.Join(os.RemoveAll(filepath.Join(e.dir, "managed")), os.Remove(link),
			os.Remove(filepath.Join(e.config, "again.json"))); err != nil {
			t.Fatal(err)
		}
	}
}

// TestInstallUmask: what an administrator with a tight umask installs, others can still read.
func TestInstallUmask(t *testing.T) {
	e := newEngines(t)
	defer syscall.Umask(syscall.Umask(0o077))
	e.write("daemon.json", "{}", 0o644)
	for _, config := range []string{"daemon.json", "new/folder/daemon.json"} {
		if out := e.cgpu("install docker --config " + config); strings.Contains(out, "error: ") {
			t.Fatal(out)
		}
	}
	modes := map[string]fs.FileMode{"etc.cgpu-backup": 0o755, "etc/new": 0o755, "etc/new/folder": 0o755, "etc/new/folder/daemon.json": 0o644}
	for name, want := range modes {
		info, err := os.Stat(filepath.Join(e.dir, name))
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %v", name, info.Mode(), err, want)
		}
	}
	if now := syscall.Umask(0o077); now != 0o077 {
		t.Errorf("the umask is %o after it", now)
	}
}
