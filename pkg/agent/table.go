// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
)

const refreshRemedy = "run cgpu refresh on the node; systemctl enable --now cgpu-refresh does so at boot"

// watcher follows the node's table.
//
// device.Load compares the table with files of the host (libcuda, cgpu.toml, device nodes) that an agent in a container does
// not see, and would call every table stale. So the watcher asks only what the kernel tells everybody: same boot, same
// driver, same GPUs. The rest is cgpu-runtime's to notice, at the next container; it makes a table anew, which is seen here.
type watcher struct {
	runDir  string
	readKey func(t *device.Table) (device.Key, error)

	file  stamp         // of the table that was read last
	read  *device.Table // what was in it
	wrong error         // or what was wrong with it

	told *device.Table // what look returned last
	text string        // and its error
	any  bool          // it was called
}

// stamp tells one file from the next of the same name.
type stamp struct {
	time time.Time
	size int64
	info os.FileInfo
}

func (s stamp) same(other stamp) bool {
	if s.info == nil || other.info == nil {
		return s.info == nil && other.info == nil
	}
	return os.SameFile(s.info, other.info) && s.time.Equal(other.time) && s.size == other.size
}

// stampOf is the stamp of a file; of none it has no info.
func stampOf(path string) (stamp, error) {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	return stamp{time: info.ModTime(), size: info.Size(), info: info}, nil
}

func newWatcher(runDir string) *watcher {
	return &watcher{runDir: runDir, readKey: func(t *device.Table) (device.Key, error) {
		return device.ReadKey(t.Driver, t.Key.ConfigFile, "", "")
	}}
}

// load returns the table, or why there is none that can be used; changed says that it is not what the last look returned.
func (w *watcher) load() (table *device.Table, changed bool, err error) {
	w.readAgain()
	table, err = w.read, w.wrong
	if err == nil {
		if err = w.current(table); err != nil {
			table = nil
		}
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	changed = !w.any || table != w.told || text != w.text
	w.told, w.text, w.any = table, text, true
	return table, changed, err
}

// readAgain reads the file if it is not the one that was read.
func (w *watcher) readAgain() {
	now, err := stampOf(device.TableFile(w.runDir))
	if now.info != nil && now.same(w.file) && w.wrong == nil {
		return
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.read, w.wrong, w.file = nil, fmt.Errorf("agent: %w", err), now
		return
	}
	t, err := device.Load(w.runDir)
	if t != nil && errors.Is(err, device.ErrStale) {
		err = nil // current asks what can be asked here
	}
	if err != nil {
		t = nil
	}
	w.read, w.wrong, w.file = t, err, now
}

// current says why the table does not tell of this node as it is.
func (w *watcher) current(t *device.Table) error {
	now, err := w.readKey(t)
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	switch was := t.Key; {
	case was.BootID != now.BootID:
		return fmt.Errorf("agent: %s: %w: the node was booted since", device.TableFile(w.runDir), device.ErrStale)
	case was.DriverText != now.DriverText && now.DriverText == "":
		return errors.New("agent: the NVIDIA driver is not loaded")
	case was.DriverText != now.DriverText:
		return fmt.Errorf("agent: %s: %w: another driver was loaded since", device.TableFile(w.runDir), device.ErrStale)
	case !slices.Equal(was.DriverGPUs, now.DriverGPUs):
		return fmt.Errorf("agent: %s: %w: the driver had GPUs %v then and has %v now", device.TableFile(w.runDir), device.ErrStale,
			was.DriverGPUs, now.DriverGPUs)
	}
	return nil
}
