// SPDX-License-Identifier: Apache-2.0

// Package mount shows a container files of the host to which nobody can write: a mount has its flags before it has a place.
package mount

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Copy copies the mount of a file or folder, with what is mounted in it, read-only. The copy has no place yet.
func Copy(host string) (tree int, err error) {
	tree, err = unix.OpenTree(unix.AT_FDCWD, host, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return -1, fmt.Errorf("copy the mount of %s: %w", host, err)
	}
	flags := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &flags); err != nil {
		unix.Close(tree)
		return -1, fmt.Errorf("make it read-only: %w", err)
	}
	return tree, nil
}

// Move gives a copy its place, over an open file or folder.
func Move(tree, place int) error {
	return unix.MoveMount(tree, "", place, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}
