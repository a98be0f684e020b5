// SPDX-License-Identifier: Apache-2.0

package health

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
	"github.com/opencgpu/cgpu/pkg/device"
)

// File is where the state of a run directory is kept. It goes with the boot, as the run directory does.
func File(runDir string) string { return filepath.Join(runDir, "health.json") }

func lockFile(runDir string) string  { return filepath.Join(runDir, "health.lock") }
func watchFile(runDir string) string { return filepath.Join(runDir, "health.watch") }

// maxFile bounds health.json: 64 GPUs with maxFaults each.
const maxFile = 1 << 20

// Read is the state of a run directory. A file that cannot be read is an error, and no state: whoever gives out GPUs goes on with what he
// knew, or says so.
func Read(runDir string) (State, error) {
	f, err := os.Open(File(runDir))
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("health: %w", err)
	}
	defer f.Close()
	var s State
	text, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return State{}, fmt.Errorf("health: %s: %w: remove it, and the watcher makes it anew", f.Name(), err)
	}
	return s, nil
}

// Change steps the state of a run directory, under its lock, and returns it before and after.
func Change(runDir string, step func(State) State) (before, after State, err error) {
	lock, err := open(lockFile(runDir))
	if err != nil {
		return State{}, State{}, err
	}
	defer lock.Close()
	for err = syscall.EINTR; errors.Is(err, syscall.EINTR); {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return State{}, State{}, fmt.Errorf("health: lock %s: %w", lock.Name(), err)
	}
	if before, err = Read(runDir); err != nil {
		return State{}, State{}, err
	}
	if after = step(before); after.equal(before) {
		return before, after, nil
	}
	return before, after, after.write(runDir)
}

func (s State) write(runDir string) error {
	text, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("health: %w", err)
	}
	if err := atomicfile.Write(File(runDir), append(text, '\n'), 0o600); err != nil { // only the lock's holder writes
		return fmt.Errorf("health: %w", err)
	}
	return nil
}

// Clear forgets what was reported of a GPU. What is still so is found again at the next look.
func Clear(runDir, uuid string) (cleared []Fault, err error) {
	_, _, err = Change(runDir, func(s State) State {
		next := State{Loaded: s.Loaded, GPUs: map[string][]Fault{}}
		for other, faults := range s.GPUs {
			if other == uuid {
				cleared = faults
			} else {
				next.GPUs[other] = faults
			}
		}
		return next
	})
	return cleared, err
}

// errWatched: another process watches already.
var errWatched = errors.New("health: another process watches the GPUs of this node already: cgpu health tells what it finds")

// Watched says whether somebody watches the GPUs of a run directory. It asks for the lock and takes none, so that it is in no watcher's
// way.
func Watched(runDir string) bool {
	f, err := os.Open(watchFile(runDir))
	if err != nil {
		return false
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_RDLCK}
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock) == nil && lock.Type != unix.F_UNLCK
}

// watchAlone is held by the one who watches; the file's end gives it back.
func watchAlone(runDir string) (*os.File, error) {
	f, err := open(watchFile(runDir))
	if err != nil {
		return nil, err
	}
	err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return nil, errWatched
	}
	return nil, fmt.Errorf("health: lock %s: %w", f.Name(), err)
}

func open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("health: %w", err)
	}
	return f, nil
}

// Marked is a table marked with what is wrong with its GPUs. Where that cannot be read it is the table as it was, with an error.
func Marked(runDir string, t *device.Table) (*device.Table, error) {
	s, err := Read(runDir)
	if err != nil {
		return t, err
	}
	return s.Mark(t), nil
}

// Loaded tells one load of the driver from the next, within a boot: numbers of sysfs' entries are not used again.
func Loaded(t *device.Table, runDir string) string {
	path := "/sys/module/nvidia"
	if t.Driver == device.DriverSim {
		path = device.SimSocket(runDir)
	}
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	if t.Driver == device.DriverSim { // each server makes its socket
		return fmt.Sprint(st.Ino, ".", st.Ctim.Nano())
	}
	return fmt.Sprint(st.Ino)
}
