// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// again is the mark of this process, which execve keeps and a child does not inherit: a timer that signals after a century of
// computing. A variable of the environment would get to every hook, and a hook may well start a container.
var again = unix.Itimerval{Value: unix.Timeval{Sec: 100 * 365 * 24 * 3600}, Interval: unix.Timeval{Sec: 0x63677075}}

// notAgain refuses to be the low-level runtime of ourselves.
func notAgain() error {
	if timer, err := unix.Getitimer(unix.ITIMER_VIRTUAL); err == nil && timer.Interval == again.Interval {
		return errors.New("cgpu-runtime: started by itself: runtimes in cgpu.toml names a program that runs cgpu-runtime; name runc or crun")
	}
	return nil
}

// creator tells from a container's state folder who created it, runc or crun; empty for a new container and where
// nothing tells. The runtimes of cgpu.toml may be others than when the container was created, and crun does not know
// runc's containers. The first argument that has a state folder is the container: the id comes before all that could
// be mistaken for it, and so no table of every command's options is needed.
func (c call) creator() string {
	for _, id := range c.rest {
		if id == "" || id == "." || id == ".." || strings.HasPrefix(id, "-") || strings.Contains(id, "/") {
			continue
		}
		for _, state := range c.states(id) {
			if _, err := os.Stat(state.file); err == nil {
				return state.maker
			}
		}
	}
	return ""
}

// stateFile is where a low-level runtime keeps the state of a container.
type stateFile struct{ maker, file string }

// states are the files of which one exists for a container.
func (c *call) states(id string) [2]stateFile {
	return [2]stateFile{{"runc", filepath.Join(c.stateRoot(false), id, "state.json")},
		{"crun", filepath.Join(c.stateRoot(true), id, "status")}}
}

// stateRoot is the folder in which a low-level runtime keeps the state of its containers.
func (c call) stateRoot(crun bool) string {
	switch {
	case c.root != "":
		return absolute(c.root)
	case crun:
		return filepath.Join(cmp.Or(os.Getenv("XDG_RUNTIME_DIR"), "/run"), "crun")
	}
	return "/run/runc" // root's, whatever the environment
}

// isCrun says whether a configured runtime is a crun; the others keep their state as runc does.
func isCrun(name string) bool { return strings.Contains(filepath.Base(name), "crun") }

// isRunc says whether a runtime is runc, by the name of the file that it is, whatever link leads to it.
func isRunc(path string) bool {
	real, err := resolved(path)
	return err == nil && strings.Contains(filepath.Base(real), "runc")
}

// findRuntime finds the low-level runtime, which does the work: the first of names that is installed. For a container
// that has a creator, those of its kind come first, and that one itself even if names lacks it.
func findRuntime(names []string, creator string) (path string, err error) {
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return "", fmt.Errorf("cgpu-runtime: %w", err)
	}
	if creator != "" {
		other := func(name string) bool { return isCrun(name) != isCrun(creator) }
		same := slices.DeleteFunc(slices.Clone(names), other)
		names = append(append(same, creator), names...)
	}
	for _, name := range names {
		candidates := []string{name}
		if !strings.Contains(name, "/") {
			candidates = nil
			for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), launch.RuntimeFolders...) {
				if filepath.IsAbs(dir) {
					candidates = append(candidates, filepath.Join(dir, name))
				}
			}
		}
		for _, path := range candidates {
			info, err := os.Stat(path)
			// Not ourselves, under whatever name: somebody may have put us in the place of runc.
			if err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 && !os.SameFile(info, self) {
				return path, nil
			}
		}
	}
	return "", fmt.Errorf("cgpu-runtime: no low-level runtime found, looked for %s: install runc, or set runtimes in cgpu.toml",
		strings.Join(names, ", "))
}

// configured are the names to look for. The node table has them from cgpu.toml; when it is missing or broken the
// defaults do, because containers that are not ours must start all the same.
func configured(runDir string) []string {
	if raw, err := readFile(device.TableFile(runDir)); err == nil {
		if names := spec.Strings(raw, "config", "runtimes"); len(names) > 0 {
			return names
		}
	}
	return []string{"runc", "crun"}
}

// preloads says that the node table, as it was last written, has no guards. It is looked at before the table is read
// properly, so that a guard can start meanwhile; the table decides.
func preloads(runDir string) bool {
	raw, err := readFile(device.TableFile(runDir))
	return err == nil && spec.String(raw, "driver") == device.DriverNVIDIA &&
		device.Config{Enforcement: spec.String(raw, "config", "enforcement")}.Unguarded() != ""
}

// execute becomes the runtime. It returns only when that failed.
func execute(path string, args []string) error {
	_, err := unix.Setitimer(unix.ITIMER_VIRTUAL, again)
	if err == nil {
		err = syscall.Exec(path, append([]string{path}, args...), os.Environ())
	}
	return fmt.Errorf("cgpu-runtime: execute %s: %w", path, err)
}
