// SPDX-License-Identifier: Apache-2.0

package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/proc"
)

// The two locks of a GPU, board/<UUID>.arbiter and .standby in the run dir. The kernel gives them back with their holder, whatever it
// died of. Nobody removes the files: whoever waited for one that is gone would hold a lock that nobody else sees.
const (
	leaderLock  = ".arbiter"
	standbyLock = ".standby"
)

func lockPath(runDir, uuid, which string) string {
	return filepath.Join(runDir, "board", filepath.Base(uuid)+which)
}

// openLock opens a lock, and makes it if there is none.
func openLock(runDir, uuid, which string) (*os.File, error) {
	path := lockPath(runDir, uuid, which)
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err == nil {
		var f *os.File
		if f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err == nil {
			return f, nil
		}
	}
	return nil, fmt.Errorf("lock of the arbiter of GPU %s: %w", uuid, err)
}

// take waits for a lock. It goes on until the last descriptor of the file is closed, also those that children inherit.
func take(f *os.File) error {
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// takeIfFree does not wait.
func takeIfFree(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// Leader is what an arbiter writes into its lock file.
type Leader struct {
	PID   int           `json:"pid"`
	Start uint64        `json:"start"` // of the process (ledger.ProcStart)
	Since time.Duration `json:"since"` // when it began to decide, by CLOCK_MONOTONIC
	Hasty int           `json:"hasty"` // how many before it, one after the other, decided for a short time only
}

// maxLeader is the length of the text: it has one, so that a shorter one leaves nothing of a longer one behind.
const maxLeader = 128

func (l Leader) write(f *os.File) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(fmt.Appendf(nil, "%-*s\n", maxLeader-1, text), 0)
	return err
}

func readLeader(f *os.File) (l Leader) {
	b := make([]byte, maxLeader)
	n, _ := f.ReadAt(b, 0)
	if json.Unmarshal(b[:n], &l) != nil {
		return Leader{} // nobody yet
	}
	return l
}

// Find tells who decides for a GPU. False: nobody.
func Find(runDir, uuid string) (Leader, bool, error) {
	f, err := os.Open(filepath.Join(runDir, "board", filepath.Base(uuid)+leaderLock))
	if errors.Is(err, fs.ErrNotExist) {
		return Leader{}, false, nil
	}
	if err != nil {
		return Leader{}, false, fmt.Errorf("who decides for GPU %s: %w", uuid, err)
	}
	defer f.Close()
	l := readLeader(f)
	start, err := ledger.ProcStart(l.PID)
	return l, err == nil && start == l.Start && !proc.Exiting(l.PID), nil
}
