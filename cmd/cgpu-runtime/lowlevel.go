package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// lowLevel is the runtime that does the work: runc or crun.
type lowLevel struct{ path string }

// marker holds our process id across execve, to notice that the runtime which we became started us again.
const marker = "CGPU_RUNTIME_ACTIVE"

// usual are folders that an engine's PATH may lack; runc is in /usr/sbin on Debian.
var usual = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// findRuntime finds the low-level runtime: the first of the configured names, or of runc and crun, that is installed.
func findRuntime(runDir string) (lowLevel, error) {
	if os.Getenv(marker) == strconv.Itoa(os.Getpid()) {
		return lowLevel{}, errors.New("cgpu-runtime: started by itself: runtimes in cgpu.toml names a program that runs cgpu-runtime; name runc or crun")
	}
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return lowLevel{}, fmt.Errorf("cgpu-runtime: %w", err)
	}
	names := configured(runDir)
	for _, name := range names {
		candidates := []string{name}
		if !strings.Contains(name, "/") {
			candidates = nil
			for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), usual...) {
				if filepath.IsAbs(dir) {
					candidates = append(candidates, filepath.Join(dir, name))
				}
			}
		}
		for _, path := range candidates {
			info, err := os.Stat(path)
			// Not ourselves, under whatever name: somebody may have put us in the place of runc.
			if err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 && !os.SameFile(info, self) {
				return lowLevel{path}, nil
			}
		}
	}
	return lowLevel{}, fmt.Errorf("cgpu-runtime: no low-level runtime found, looked for %s: install runc, or set runtimes in cgpu.toml", strings.Join(names, ", "))
}

// configured are the names to look for. The node table has them from cgpu.toml; when it is missing or broken the
// defaults do, because containers that are not ours must start all the same.
func configured(runDir string) []string {
	if raw, err := os.ReadFile(device.TableFile(runDir)); err == nil {
		var names []string
		if raw, ok := spec.Member(raw, "config", "runtimes"); ok && json.Unmarshal(raw, &names) == nil && len(names) > 0 {
			return names
		}
	}
	return []string{"runc", "crun"}
}

// exec becomes the runtime. It returns only when that failed.
func (l lowLevel) exec(args []string) error {
	argv := append([]string{l.path}, args...)
	err := syscall.Exec(l.path, argv, setEnv(os.Environ(), marker, strconv.Itoa(os.Getpid())))
	return fmt.Errorf("cgpu-runtime: execute %s: %w", l.path, err)
}

// setEnv returns env with name set to value.
func setEnv(env []string, name, value string) []string {
	var kept []string
	for _, entry := range env {
		if !strings.HasPrefix(entry, name+"=") {
			kept = append(kept, entry)
		}
	}
	return append(kept, name+"="+value)
}
