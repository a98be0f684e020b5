// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestFolderWhole: a folder without the file of parts, as builds before seats made it, is made anew.
func TestFolderWhole(t *testing.T) {
	testenv.NeedsRoot(t, "folders of other users")
	d := Domain{t.TempDir(), "GPU-1", "a"}
	made(t, d)
	parts := filepath.Join(page.Pipes(d.RunDir, d.UUID, d.Name), page.Parts)
	if err := os.Remove(parts); err != nil {
		t.Fatal(err)
	}
	made(t, d)
	if _, err := os.Stat(parts); err != nil {
		t.Error(err)
	}
}

// TestSockets: each seat has a socket that answers when the server listens, in the place of one that a killed server has left, however long
// the folder's path is. In it the server's user has nothing to write to on the host: neither there nor in the daemon's folder, to which it
// has no way.
func TestSockets(t *testing.T) {
	testenv.NeedsRoot(t, "folders of other users")
	d := Domain{filepath.Join(t.TempDir(), strings.Repeat("long", 30)), "GPU-1", "a"}
	user := made(t, d)
	pipes := page.Pipes(d.RunDir, d.UUID, d.Name)
	var last []*os.File
	for range 2 {
		fd, err := sockets(pipes)
		if err != nil {
			t.Fatal(err)
		}
		if _, last, err = mps.Receive(fd); err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(fd)
	}
	for i, file := range last {
		folder, err := os.Open(page.Seat(filepath.Join(pipes, page.Members), i))
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Listen(int(file.Fd()), 1); err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("unixpacket", fmt.Sprintf("/proc/self/fd/%d/%s", folder.Fd(), mps.SocketName))
		if err != nil {
			t.Errorf("seat %d: %v", i, err)
			continue
		}
		_, _, _ = c.Close(), folder.Close(), file.Close()
	}
	err := filepath.WalkDir(pipes, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		err = unix.Lstat(path, &st)
		if int(st.Uid) == user && filepath.Base(path) != page.Daemon {
			t.Errorf("%s is the server's user's", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(page.Seat(filepath.Join(pipes, page.Members), 7)); err != nil {
		t.Fatal(err)
	}
	if fd, err := sockets(pipes); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%d, %v: want the folder of seat 7", fd, err)
	}
}
