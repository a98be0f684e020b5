// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// escapes are the cases of cgpu-probe hostile that the self-test runs: each shows another wall in less than a second.
var escapes = []string{"env", "int80", "x32", "type", "upper", "mknod", "nodes", "timeslice", "pause", "registry",
	"unknown-control", "page"}

const (
	// selfLimit is the slice that the self-test asks for.
	selfLimit = 512 * quota.MiB
	selfTime  = time.Minute
	probe     = "cgpu-probe"
)

var selfTest = Check{Name: "self-test",
	Means: "A container with a slice of 512 MiB is started through cgpu-runtime, sees that size, and fails to escape in a dozen ways. Only " +
		"with --self-test.",
	Run: checkSelf, Remedy: "see the guard's log below log/ in the run directory, and report it: SECURITY.md"}

func checkSelf(h *Host) Result {
	switch path := filepath.Join(h.Bin, probe); {
	case h.UID != 0:
		return fail("needs root").but("sudo cgpu doctor --self-test")
	case !regular(path):
		return fail("%s is not there, which plays the container's program", path).but("install cgpu-probe beside cgpu; make build makes it")
	case h.settings().Limits() == device.LimitsDriver:
		return skip(`limits = "driver": there is no guard to prove`)
	case h.preload():
		return skip("in preload mode a static program walks around the limit; there is nothing to prove")
	}
	if r, stop := h.room(); stop {
		return r
	}
	dir, err := os.MkdirTemp("", "cgpu-doctor")
	if err != nil {
		return fail("%v", err)
	}
	defer os.RemoveAll(dir)
	if err := makeRoot(filepath.Join(dir, "rootfs"), filepath.Join(h.Bin, probe)); err != nil {
		return fail("make a container: %v", err).but("make room in the folder for temporary files")
	}
	begin := time.Now()
	if err := h.inContainer(dir, probe, "self", "--limit", fmt.Sprintf("%dMiB", selfLimit/quota.MiB)); err != nil {
		return fail("%v", err)
	}
	for _, name := range escapes {
		if err := h.inContainer(dir, probe, "hostile", name, "--tries", "1000"); err != nil {
			return fail("hostile %s: %v", name, err)
		}
	}
	return ok("a container of %v holds against %d attempts, %v", selfLimit, len(escapes), time.Since(begin).Round(100*time.Millisecond))
}

func regular(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// room says when there is no place for the self-test's container. A node that is full is none that is ill.
func (h *Host) room() (Result, bool) {
	t, err := h.node()
	if err != nil {
		return Result{}, false // cgpu-runtime makes the table
	}
	records, err := ledger.Open(h.RunDir).List()
	if err != nil {
		return fail("%v", err), true
	}
	if !roomy(t, records) {
		return skip("no GPU has %v free; cgpu smi lists who has it", selfLimit), true
	}
	return Result{}, false
}

// roomy says whether a GPU has place for one more container of the self-test's size.
func roomy(t *device.Table, records []ledger.Record) bool {
	for _, g := range t.GPUs {
		left, places := quota.Bytes(float64(g.Memory)*t.Config.Overcommit), t.Config.MaxInst
		for _, r := range records {
			for _, v := range r.VGPUs {
				if v.UUID == g.UUID {
					left -= min(left, v.Limit)
					places--
				}
			}
			if slices.Contains(r.Native, g.UUID) {
				left = 0
			}
		}
		if left >= selfLimit && places > 0 {
			return true
		}
	}
	return false
}

// makeRoot makes a container's root of one static program.
func makeRoot(root, program string) error {
	for _, dir := range []string{"bin", "dev", "proc", "sys", "tmp", "etc", "run"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	in, err := os.Open(program)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Join(root, "bin", probe), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

// inContainer runs a command in a new container, through cgpu-runtime and no engine.
func (h *Host) inContainer(dir string, args ...string) error {
	var nonce [4]byte
	_, _ = rand.Read(nonce[:])
	id := "doctor-" + hex.EncodeToString(nonce[:])
	bundle := filepath.Join(dir, id)
	if err := os.Mkdir(bundle, 0o711); err != nil {
		return err
	}
	config, err := json.Marshal(bundleConfig(filepath.Join(dir, "rootfs"), args))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600); err != nil {
		return err
	}
	// A file, not a pipe: cgpu-sim, which cgpu-refresh may start, would hold it open.
	said, err := os.CreateTemp(dir, "said")
	if err != nil {
		return err
	}
	defer said.Close()
	ctx, cancel := context.WithTimeout(context.Background(), selfTime)
	defer cancel()
	low := filepath.Join(h.Bin, "cgpu-runtime")
	cmd := exec.CommandContext(ctx, low, "run", "--bundle", bundle, id)
	cmd.Stdout, cmd.Stderr = said, said
	runErr := cmd.Run()
	if runErr != nil { // what is over already cannot be deleted
		_ = exec.Command(low, "delete", "--force", id).Run()
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("was not over after %v", selfTime)
	case runErr != nil:
		text, _ := readSome(said.Name())
		return fmt.Errorf("%w: %s", runErr, lastLine(string(text)))
	}
	// The guard's log is full of what the attacks were refused; it stays only where it must explain a failure.
	logs, _ := filepath.Glob(filepath.Join(h.RunDir, "log", id[:12]+"-*.log"))
	for _, log := range logs {
		_ = os.Remove(log)
	}
	return nil
}

// lastLine is the last line of an output, where programs say why they fail.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// bundleConfig is the container's config.json: its own namespaces, no capabilities, everything else at the kernel's defaults, so
// that nothing but cgpu holds it.
func bundleConfig(root string, args []string) map[string]any {
	type object = map[string]any
	var namespaces []object
	for _, n := range []string{"pid", "mount", "ipc", "uts", "network"} {
		namespaces = append(namespaces, object{"type": n})
	}
	return object{
		"ociVersion": "1.0.2",
		"root":       object{"path": root, "readonly": false},
		"process": object{
			"user": object{"uid": 0, "gid": 0}, "cwd": "/", "args": args, "noNewPrivileges": true,
			"env":          []string{"PATH=/bin", "ALIYUN_COM_GPU_MEM_CONTAINER=" + fmt.Sprintf("%dMiB", selfLimit/quota.MiB)},
			"capabilities": object{"bounding": []string{}, "effective": []string{}, "permitted": []string{}},
		},
		"mounts": []object{
			{"destination": "/proc", "type": "proc", "source": "proc"},
			{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "nodev", "mode=755", "size=1024k"}},
		},
		"linux": object{"namespaces": namespaces, "resources": object{"devices": []object{{"allow": false, "access": "rwm"}}}},
	}
}
