// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/opencgpu/cgpu/pkg/engine"
)

// checked is what an engine says of its configuration.
type checked struct {
	ran  bool           // it was asked
	err  error          // it does not start with it
	tree map[string]any // what it takes it to be, where it says so
	note string         // why it was not asked, or that it fails, for the user
}

// engineTimeout is more than an engine needs to read its configuration.
const engineTimeout = 30 * time.Second

// restartTimeout is more than an engine needs to restart, which systemd bounds: who is killed before does not know how it ended.
const restartTimeout = 15 * time.Minute

// askEngine runs a program of an engine. Standard output is what it says; the error is the last line of its complaint.
func askEngine(program string, args ...string) (out []byte, err error) {
	return runFor(engineTimeout, program, args...)
}

func runFor(limit time.Duration, program string, args ...string) (out []byte, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second // for a child of its own that keeps them open
	if err = cmd.Run(); errors.Is(err, exec.ErrWaitDelay) {
		err = nil
	}
	if err != nil {
		if said := strings.TrimSpace(stderr.String()); said != "" {
			lines := strings.Split(said, "\n")
			err = errors.New(strings.TrimSpace(lines[len(lines)-1]))
			if strings.Contains(said, "unknown flag") {
				err = errNoCheck
			}
		}
	}
	return stdout.Bytes(), err
}

// errNoCheck: this version of the engine cannot check its configuration.
var errNoCheck = errors.New("it has no check")

// programPath finds an engine's program. Daemons lie in folders that a user's PATH may lack, with sudo as well.
func programPath(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, dir := range []string{"/usr/sbin", "/usr/local/sbin", "/usr/bin", "/usr/local/bin", "/sbin"} {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}

func notInPath(program string) checked {
	return checked{note: program + " is not in PATH: its own check of the configuration was not run"}
}

// broken is a check that fails before the edit.
func broken(program string, err error) checked {
	return checked{ran: true, err: err, note: fmt.Sprintf("%s refuses its configuration: %v", program, err)}
}

func noCheck(string, bool) checked { return checked{} }

func checkDockerd(config string, missing bool) checked {
	program := programPath("dockerd")
	if program == "" {
		return notInPath("dockerd")
	}
	if missing {
		return checked{ran: true} // nothing is always right
	}
	_, err := askEngine(program, "--validate", "--config-file", config)
	switch {
	case errors.Is(err, errNoCheck):
		return checked{note: "this dockerd cannot check its configuration (23.0 and later can)"}
	case err != nil:
		return broken("dockerd", err)
	}
	return checked{ran: true}
}

func checkContainerd(config string, missing bool) checked {
	program := programPath("containerd")
	if program == "" {
		return notInPath("containerd")
	}
	args := []string{"--config", config, "config", "dump"}
	if missing {
		args = []string{"config", "default"}
	}
	out, err := askEngine(program, args...)
	if err != nil {
		return broken("containerd", err)
	}
	r := checked{ran: true}
	if err := toml.Unmarshal(out, &r.tree); err != nil {
		r.tree = nil
	}
	return r
}

// containerdVersion is the one of the program that is found; zero if nobody can say.
func containerdVersion() engine.Version {
	program := programPath("containerd")
	if program == "" {
		return engine.Version{}
	}
	out, err := askEngine(program, "--version")
	if err != nil {
		return engine.Version{}
	}
	return engine.ContainerdVersion(string(out))
}

func checkCRIO(config string, _ bool) checked {
	program := programPath("crio")
	if program == "" {
		return notInPath("crio")
	}
	dir := filepath.Dir(config)
	args := []string{"--config-dir", dir, "config"}
	if main := filepath.Join(filepath.Dir(dir), "crio.conf"); exists(main) {
		args = append([]string{"--config", main}, args...)
	}
	if _, err := askEngine(program, args...); err != nil {
		return broken("crio", err)
	}
	return checked{ran: true}
}

// dockerPid is the dockerd of a configuration, 0 if none runs.
func dockerPid(config string) int {
	text, err := os.ReadFile(config)
	if err != nil {
		text = nil
	}
	out, err := os.ReadFile(engine.DockerPidFile(text))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || pid <= 1 {
		return 0
	}
	// The file may be older than the machine's last boot.
	if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err != nil || strings.TrimSpace(string(name)) != "dockerd" {
		return 0
	}
	// One without a file of its own names the machine's usual dockerd, which may read another configuration.
	if args := commandLine(pid); configOf(args) != config {
		return 0
	}
	return pid
}

func commandLine(pid int) []string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
}

// configOf is the configuration that a dockerd was started with.
func configOf(args []string) string {
	for i, arg := range args {
		if path, has := strings.CutPrefix(arg, "--config-file="); has {
			return path
		}
		if arg == "--config-file" && i+1 < len(args) {
			return args[i+1]
		}
	}
	return engine.DockerConfig
}

// dockerFlags refuses what the options of the running dockerd say already: with both it would not start again.
func dockerFlags(config string, asDefault bool) error {
	pid := dockerPid(config)
	if pid == 0 {
		return nil
	}
	for _, flag := range engine.DockerFlags(commandLine(pid)) {
		if flag == "--default-runtime" && !asDefault {
			continue
		}
		return fmt.Errorf("%s: dockerd (process %d) was started with %s, and does not start when the file says the same: take the option out "+
			"of its service first", config, pid, flag)
	}
	return nil
}

// systemd reports that it runs this machine.
func systemd() bool {
	info, err := os.Stat("/run/systemd/system")
	return err == nil && info.IsDir()
}

// unitOf is the first of some services that this machine has, else the first.
func unitOf(names ...string) string {
	for _, name := range names {
		for _, dir := range []string{"/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"} {
			if exists(filepath.Join(dir, name+".service")) {
				return name
			}
		}
	}
	return names[0]
}

// isUsual: the file is the one that systemd's unit of the engine reads.
func isUsual(t Target, config string) bool {
	return config == t.Config("cgpu") || filepath.Dir(config) == filepath.Dir(t.Config("cgpu")) && t.Name == "crio"
}

// restarts says whether reread has systemd do it, if it may.
func restarts(t Target, config string, may bool) bool { return may && isUsual(t, config) && systemd() }

// reread has the engine read its configuration, or says what to do. anew: a reload does not do.
func reread(w io.Writer, t Target, config string, restart, anew bool) error {
	if t.daemon == "" {
		_, err := fmt.Fprintf(w, "%s reads it at its next start of a container\n", t.Name)
		return err
	}
	usual := isUsual(t, config)
	say := fmt.Sprintf("next: restart %s; running containers live on", t.daemon)
	if usual && systemd() {
		say = fmt.Sprintf("next: systemctl %s %s", t.reload, t.unit)
	}
	if anew {
		_,
			err := fmt.Fprintf(w,
			"next: restart %s, and do not reload it: it would keep the default runtime that is gone, or crash (20.10); without live-restore its "+
				"containers stop\n", t.daemon)
		return err
	}
	if t.Name == "docker" {
		if pid := dockerPid(config); pid != 0 && !(usual && systemd()) {
			if restart {
				if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
					return fmt.Errorf("--restart: dockerd (process %d): SIGHUP: %w", pid, err)
				}
				_, err := fmt.Fprintf(w, "dockerd (process %d) reads it now\n", pid)
				return err
			}
			say = fmt.Sprintf("next: kill -HUP %d, and dockerd reads it", pid)
		} else if pid == 0 && !(usual && systemd()) {
			say = "next: start dockerd, or send it SIGHUP, and it reads it"
		}
	}
	if restarts(t, config, restart) {
		if _, err := runFor(restartTimeout, "systemctl", t.reload, t.unit); err != nil {
			return fmt.Errorf("--restart: systemctl %s %s: %w; see journalctl -u %[2]s", t.reload, t.unit, err)
		}
		_, err := fmt.Fprintf(w, "systemctl %s %s: done\n", t.reload, t.unit)
		return err
	}
	_, err := fmt.Fprintln(w, say)
	return err
}
