// SPDX-License-Identifier: Apache-2.0

package server

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
)

// Servers have their users among these numbers, which no distribution, systemd or directory of users gives out, and nobody can guess: the
// kernel counts threads and descriptors in flight by user, also of a container that has no user namespace and any number that it likes.
const (
	firstUser = 2_001_000_000
	users     = 1 << 27
)

func isServers(user int) bool { return user >= firstUser && user < firstUser+users }

// newUser draws one that is not taken.
func newUser(taken map[int]bool) (user int) {
	for user = 0; user == 0 || taken[user]; {
		var number [4]byte
		_, _ = rand.Read(number[:]) // never fails
		user = firstUser + int(binary.NativeEndian.Uint32(number[:])%users)
	}
	return user
}

// folder makes the domain's folder of pipes, unless it is there: members that live have what is in it mounted, whatever becomes of the
// server. It is root's, but for the folder of the daemon, over which the server has a file system of its own: that says the server's user,
// to whom no other's belongs, and no process. Folders of domains that nobody names are removed.
func (d Domain) folder() (user int, err error) {
	root := root(d.RunDir)
	path := page.Pipes(d.RunDir, d.UUID, d.Name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil { // members come by their mounts, and nobody else
		return 0, err
	}
	unlock, err := domain.Lock(root)
	if err != nil {
		return 0, err
	}
	defer unlock()
	if _, err := Evict(d.RunDir); err != nil {
		return 0, err
	}
	taken, err := heldUsers()
	if err != nil {
		return 0, err
	}
	records, err := ledger.Open(d.RunDir).List()
	if err != nil {
		return 0, err
	}
	dirs, err := filepath.Glob(filepath.Join(root, "*", "*"))
	if err != nil {
		return 0, err
	}
	for _, dir := range dirs {
		uuid, name := filepath.Base(filepath.Dir(dir)), filepath.Base(dir)
		owner, ok := ownerOf(dir)
		if dir == path && ok {
			return owner, nil
		}
		if used := isNamed(records, name, uuid); !used || !ok {
			if err := os.RemoveAll(dir); err != nil {
				return 0, err
			}
			continue
		}
		taken[owner] = true
	}
	user = newUser(taken)
	return user, makeFolder(path, user)
}

// root is the folder of all domains' folders, each in one of its GPU's.
func root(runDir string) string {
	return filepath.Dir(filepath.Dir(page.Pipes(runDir, "uuid", "name")))
}

// isNamed reports a domain that a record names on a GPU.
func isNamed(records []ledger.Record, name, uuid string) bool {
	for _, r := range records {
		if r.Serves(name, uuid) {
			return true
		}
	}
	return ledger.HasMembers(records, name, uuid)
}

// ownerOf is whose a folder is; false: it is not whole.
func ownerOf(dir string) (int, bool) {
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, page.Parts), &st); err != nil { // a build before seats made it
		return 0, false
	}
	if err := unix.Lstat(filepath.Join(dir, page.Daemon), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return 0, false
	}
	return int(st.Uid), true
}

// makeFolder makes one at once, whole: with the members' folders, and the daemon's own.
func makeFolder(path string, user int) error {
	made := filepath.Join(filepath.Dir(path), ".new") // no domain's name
	if err := os.RemoveAll(made); err != nil {
		return err
	}
	type folder struct {
		path string
		mode fs.FileMode
		user int
	}
	members := filepath.Join(made, page.Members)
	list := []folder{{made, 0o711, 0}, {members, 0o755, 0}, {filepath.Join(made, page.Daemon), 0o700, user}}
	for seat := range page.Seats + 1 {
		list = append(list, folder{page.Seat(members, seat), 0o755, 0})
	}
	for _, dir := range list {
		if err := os.Mkdir(dir.path, dir.mode); err != nil {
			return err
		}
		if err := errors.Join(os.Chmod(dir.path, dir.mode), os.Chown(dir.path, dir.user, dir.user)); err != nil { // whatever the umask
			return err
		}
	}
	if err := domain.MakeParts(made); err != nil {
		return err
	}
	return os.Rename(made, path)
}
