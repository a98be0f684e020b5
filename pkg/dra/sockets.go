// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// bindTime is how long a socket may be there before somebody listens at it.
const bindTime = 5 * time.Second

// removeDead removes the sockets of agents that were killed. Their names have the UID of a pod, so that no other agent would
// use them again, and the kubelet would dial them whenever it starts. Where somebody listens, it is the agent that this one
// replaces, and its sockets stay.
func removeDead(registryDir, dir string, log *slog.Logger) error {
	for _, pattern := range []string{filepath.Join(registryDir, DriverName+"-*reg.sock"), filepath.Join(dir, "dra*.sock")} {
		sockets, err := filepath.Glob(pattern)
		if err != nil {
			return fmt.Errorf("dra: sockets %s: %w", pattern, err)
		}
		for _, path := range sockets {
			if !dead(path) {
				continue
			}
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("dra: dead socket: %w", err)
			}
			log.Info("removed the socket of an agent that is gone", "socket", path)
		}
	}
	return nil
}

// dead: it is a socket, not a new one, and the kernel says that nobody listens. A listener whose queue is full is alive.
func dead(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket || time.Since(info.ModTime()) < bindTime {
		return false
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
