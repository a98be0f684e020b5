// SPDX-License-Identifier: Apache-2.0

package device

import (
	"os"
	"path/filepath"
)

// Where things are when the environment does not say otherwise.
const (
	DefaultRunDir     = "/run/cgpu"
	DefaultConfigFile = "/etc/cgpu/cgpu.toml"
)

// RunDir is the folder of this node's state: CGPU_RUN_DIR, or DefaultRunDir.
func RunDir() string {
	if dir := os.Getenv("CGPU_RUN_DIR"); dir != "" {
		return filepath.Clean(dir)
	}
	return DefaultRunDir
}

// ConfigFile is the node's configuration: CGPU_CONFIG, or DefaultConfigFile. The file need not exist.
func ConfigFile() string {
	if file := os.Getenv("CGPU_CONFIG"); file != "" {
		return filepath.Clean(file)
	}
	return DefaultConfigFile
}

// Program is the path of another program of ours. They all lie in one folder and find each other beside themselves.
func Program(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	return filepath.Join(filepath.Dir(self), name), nil
}

// Limiter is the preload library libcgpu.so: beside our programs, as make builds it, or in ../lib/cgpu, as make install puts
// it. Empty when it is in neither place.
func Limiter() string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	return limiterNear(filepath.Dir(self))
}

func limiterNear(bin string) string {
	const name = "libcgpu.so"
	for _, path := range []string{filepath.Join(bin, name), filepath.Join(bin, "..", "lib", "cgpu", name)} {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

// TableFile is where the table is kept; LockFile is held while it is rewritten.
func TableFile(runDir string) string { return filepath.Join(runDir, "node.json") }

// LockFile is flocked by cgpu-refresh, so that containers that start together refresh once.
func LockFile(runDir string) string { return filepath.Join(runDir, "node.lock") }

// SimSocket is where the simulated driver listens.
func SimSocket(runDir string) string { return filepath.Join(runDir, "sim.sock") }
