// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	cwd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		args string
		want call
	}{
		{"", call{}},
		{"--version", call{}},
		{"features", call{command: "features", rest: []string{}}},
		{"state create", call{command: "state", rest: []string{"create"}}},
		{"kill create 9", call{command: "kill", rest: []string{"create", "9"}}},
		{"--root create --log run delete create", call{command: "delete", root: "create", log: "run", rest: []string{"create"}}},
		{"create --bundle /b c1", call{command: "create", bundle: "/b", config: "/b/config.json", id: "c1"}},
		{"create -b /b c1", call{command: "create", bundle: "/b", config: "/b/config.json", id: "c1"}},
		{"create --bundle=/b/../x c1", call{command: "create", bundle: "/x", config: "/x/config.json", id: "c1"}},
		{"create -bundle /b create", call{command: "create", bundle: "/b", config: "/b/config.json", id: "create"}},
		{"create c1", call{command: "create", bundle: cwd, config: filepath.Join(cwd, "config.json"), id: "c1"}},
		{"run --bundle sub --detach --no-pivot c1", call{command: "run", bundle: filepath.Join(cwd, "sub"),
			config: filepath.Join(cwd, "sub", "config.json"), id: "c1"}},
		{"create --pid-file create --console-socket s --bundle /b -- -odd",
			call{command: "create", bundle: "/b", config: "/b/config.json", id: "-odd"}},
		{"create --bundle", call{command: "create", bundle: cwd, config: filepath.Join(cwd, "config.json")}},
		{
			"--root /run/docker/runtime-runc/moby --log /l.json --log-format json --systemd-cgroup create --bundle /b --pid-file /p c1",
			call{command: "create", bundle: "/b", config: "/b/config.json", id: "c1", root: "/run/docker/runtime-runc/moby",
				log: "/l.json", logFormat: "json"},
		},
		{"--root=/r --log=/l --log-format=text --rootless auto --debug create -b=/b c1",
			call{command: "create", bundle: "/b", config: "/b/config.json", id: "c1", root: "/r", log: "/l", logFormat: "text"}},
		{"restore --image-path create --work-path /w --detach --bundle /b c1",
			call{command: "restore", bundle: "/b", config: "/b/config.json", id: "c1"}},
		{"exec --process /p create", call{command: "exec", rest: []string{"--process", "/p", "create"}}},
	} {
		for _, g := range []*grammar{likeRunc, likeCrun} {
			if g == likeCrun && (strings.Contains(test.args, " -bundle ") || strings.Contains(test.args, " -b=")) {
				continue
			}
			test.want.grammar, test.want.args = g, strings.Fields(test.args)
			got := parse(strings.Fields(test.args), g)
			if got.id+got.config != "" {
				got.tail, got.values = nil, nil
			}
			if !reflect.DeepEqual(got, test.want) {
				t.Errorf("%s:\ngot  %+v\nwant %+v", test.args, got, test.want)
			}
		}
	}
}

// TestReadsAsTheyDo: the bundle that we look into is the one that runc and crun take, or they take none. They name it when it is not there.
func TestReadsAsTheyDo(t *testing.T) {
	for _, low := range []struct {
		name    string
		grammar *grammar
	}{{"runc", likeRunc}, {"crun", likeCrun}} {
		path, err := exec.LookPath(low.name)
		if err != nil {
			t.Log(err)
			continue
		}
		for _, args := range []string{
			"create --bundle /no/b c1", "create c1 --bundle /no/b", "run c1 -b /no/b", "run -b /no/b c1 --pid-file p",
			"create --no-pivot c1 --bundle /no/b", "create --no-pivot --bundle /no/b c1", "create c1 --no-pivot --bundle /no/b",
			"create --bundle=/no/b c1", "create c1 --bundle=/no/b", "create -b=/no/b c1", "create -b/no/b c1", "create -bundle /no/b c1",
			"create --bund /no/b c1", "create --bund=/no/b c1", "create --no --bundle /no/b c1", "create --no-p --bun /no/b c1",
			"create --bundle /no/a --bundle /no/b c1", "create --bundle /no/a -b /no/b c1", "create --bundle /no/a c1 --bundle=/no/b",
			"create -- c1 --bundle /no/b", "create --bundle /no/b -- c1", "create c1 --bundle /no/b --", "create --pid-file --bundle /no/b c1",
			"create --pid-file -- c1 --bundle /no/b", "create c1 c2 --bundle /no/b", "create --bundle /no/b", "create --bundle /no/b -",
			"run -db /no/b c1", "run -d c1 -b /no/b", "create --strange --bundle /no/b c1", "create --bundle /no/b --strange c1",
			"--log-f json create --bundle /no/b c1", "--log-format create create --bundle /no/b c1", "--systemd-cgroup create -b /no/b c1",
			"--debug=1 create -b /no/b c1", "create --config /no/x --bundle /no/b c1", "create -f config.json c1 --bundle /no/b",
		} {
			list := append([]string{"--root", t.TempDir()}, strings.Fields(args)...)
			out, err := exec.Command(path, list...).CombinedOutput()
			if err == nil {
				t.Fatalf("%s %s: no error", low.name, args)
			}
			theirs := ""
			if m := regexp.MustCompile(`/no/\w`).FindString(string(out)); strings.Contains(string(out), "chdir") || strings.Contains(m, "x") {
				theirs = m
			}
			ours := ""
			if c := parse(list, low.grammar); c.id != "" {
				ours = c.bundle
			}
			if strings.HasPrefix(theirs, "/no/b") && ours != theirs {
				t.Errorf("%s %s: we take %q, and it %q:\n%s", low.name, args, ours, theirs, out)
			}
		}
	}
}

// TestOtherKind: where runc and crun read differently it is the node's runtime that counts, and crun's --config is the file that is edited.
func TestOtherKind(t *testing.T) {
	dir, runDir := t.TempDir(), t.TempDir()
	for _, name := range []string{"runc", "crun"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/true\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(runDir, "node.json"),
			[]byte(`{"config":{"runtimes":["`+filepath.Join(dir, name)+`"]}}`), 0o644); err != nil {
			t.Fatal(err)
		}
		c, only := understand([]string{"create", "c1", "--bundle", "/b"}, runDir)
		if !only || (c.bundle == "/b" && c.id == "c1") != (name == "runc") {
			t.Errorf("%s: %+v", name, c)
		}
		if c, only = understand([]string{"create", "-b", "/b", "-f", "/x/y.json", "c1"}, runDir); !only ||
			(c.config == "/x/y.json") != (name == "crun") {
			t.Errorf("%s: %+v", name, c)
		}
		if c, only = understand([]string{"create", "-b", "/b", "c1"}, runDir); only || c.id != "c1" {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// TestRedirect: the low-level runtime gets our config.json; what else it would take from the engine's bundle, it still does.
func TestRedirect(t *testing.T) {
	for _, c := range []struct {
		crun       bool
		args, want string
	}{
		{false, "--root /r create --bundle /b c1", "--root /r create --bundle /m c1"},
		{false, "create c1", "create --bundle /m c1"},
		{false, "create -b=/b c1", "create -b=/m c1"},
		{false, "create --bundle= c1", "create --bundle=/m c1"},
		{false, "create --bundle /a c1 -b /b", "create --bundle /m -b /m c1"},
		{false, "run --bundle /b --pid-file p --console-socket tty.sock --pidfd-socket=@s c1",
			"run --bundle /m --pid-file p --console-socket /b/tty.sock --pidfd-socket=@s c1"},
		{false, "create --bundle /b --console-socket=x/tty --pidfd-socket s c1",
			"create --bundle /m --console-socket=/b/x/tty --pidfd-socket /b/s c1"},
		{false, "create --bundle /b --console-socket /tty c1", "create --bundle /m --console-socket /tty c1"},
		{true, "--root /r create --bundle /b --pid-file p --console-socket tty.sock c1",
			"--root /r create --config /m/config.json --bundle /b --pid-file p --console-socket tty.sock c1"},
		{true, "create -b/b -f /x c1", "create -b/b -f /m/config.json c1"},
		{true, "create --conf=config.json c1", "create --conf=/m/config.json c1"},
		{true, "run -df/x c1", "run -df/m/config.json c1"},
	} {
		g := likeRunc
		if c.crun {
			g = likeCrun
		}
		call := parse(strings.Fields(c.args), g)
		call.made = "/m"
		call.redirect(c.crun)
		if got := strings.Join(call.args, " "); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.args, got, c.want)
		}
	}
}

func TestReport(t *testing.T) {
	for format, want := range map[string]string{
		"json": `{"level":"error","msg":"cgpu: a \"b\"","time":"20`,
		"text": `level=error msg="cgpu: a \"b\""`,
		"":     `level=error msg="cgpu: a \"b\""`,
	} {
		log := filepath.Join(t.TempDir(), "log")
		c := call{log: log, logFormat: format}
		c.report(testError(`a "b"`))
		c.report(testError("second"))
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		if lines := strings.Split(string(text), "\n"); len(lines) != 3 || !strings.Contains(lines[0], want) {
			t.Errorf("%q: %s", format, text)
		}
	}
	call{log: "/nonexistent/dir/log"}.report(testError("nowhere to write"))
}

type testError string

func (e testError) Error() string { return string(e) }

func TestFindRuntime(t *testing.T) {
	dir, runDir := t.TempDir(), t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sub := func(name string) string {
		path := filepath.Join(dir, name)
		os.MkdirAll(path, 0o755)
		return path
	}
	for _, link := range []string{filepath.Join(sub("a"), "runc"), filepath.Join(sub("b"), "runc")} {
		if err := os.Symlink(self, link); err != nil { // ourselves in the place of runc
			t.Fatal(err)
		}
	}
	os.WriteFile(filepath.Join(sub("c"), "runc"), nil, 0o644) // not executable
	real := filepath.Join(sub("d"), "runc")
	other := filepath.Join(dir, "my-crun")
	for _, file := range []string{real, other} {
		if err := os.WriteFile(file, []byte("#!/bin/true\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var path []string
	for _, name := range []string{"a", "b", "c", "d"} {
		path = append(path, sub(name))
	}
	t.Setenv("PATH", "relative:"+strings.Join(path, ":"))
	for _, test := range []struct{ table, creator, want string }{
		{"", "", real},
		{"broken{", "", real},
		{`{"config":{"runtimes":[]}}`, "", real},
		{`{"config":{"runtimes":["nonexistent","` + other + `"]}}`, "", other},
		{`{"config":{"runtimes":["nonexistent-runtime"]}}`, "", ""},
		{`{"config":{"runtimes":["` + other + `","runc"]}}`, "runc", real},
		{`{"config":{"runtimes":["` + other + `"]}}`, "runc", real},
		{`{"config":{"runtimes":["runc","` + other + `"]}}`, "crun", other},
		{`{"config":{"runtimes":["runc","` + other + `"]}}`, "", real},
	} {
		if err := os.WriteFile(filepath.Join(runDir, "node.json"), []byte(test.table), 0o644); err != nil {
			t.Fatal(err)
		}
		low, err := findRuntime(configured(runDir), test.creator)
		if low != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%s: %q, %v, want %q", test.table, low, err, test.want)
		}
	}
}

func TestCreator(t *testing.T) {
	root := t.TempDir()
	for _, file := range []string{"one/state.json", "two/status", "delete/status"} {
		path := filepath.Join(root, file)
		os.MkdirAll(filepath.Dir(path), 0o755)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for args, want := range map[string]string{
		"state one":                           "runc",
		"state two":                           "crun",
		"start three":                         "",
		"delete three":                        "",
		"delete --force delete":               "crun",
		"kill one KILL":                       "runc",
		"exec --process /tmp/p -d one ps two": "runc",
		"create two":                          "",
		"state ../" + filepath.Base(root) + "/two": "",
		"features": "",
	} {
		if got := parse(append([]string{"--root", root}, strings.Fields(args)...), likeRunc).creator(); got != want {
			t.Errorf("%s: %q, want %q", args, got, want)
		}
	}
}

// TestIsRunc: a runtime is what a link leads to, and what is not known is not runc.
func TestIsRunc(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"my-runc", "crun", "youki"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"oci": "my-runc", "docker-runc": "runc", "runc": "crun"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]bool{"my-runc": true, "oci": true, "crun": false, "youki": false, "runc": false, "docker-runc": false,
		"gone-runc": false} {
		if got := isRunc(filepath.Join(dir, name)); got != want {
			t.Errorf("%s: %t, want %t", name, got, want)
		}
	}
}
