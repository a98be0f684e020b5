// SPDX-License-Identifier: Apache-2.0

package dryrun

import (
	"io"
	"os"
	"path/filepath"

	"github.com/opencgpu/cgpu/pkg/spec"
)

// IDOf is the container's ID: engines call the bundle's folder so.
func IDOf(path string) string {
	if abs, err := filepath.Abs(path); err == nil && path != "-" {
		if id := filepath.Base(filepath.Dir(abs)); id != "/" {
			return id
		}
	}
	return "container"
}

// Read reads a config.json; - is standard input.
func Read(path string) ([]byte, error) {
	in := os.Stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	return io.ReadAll(io.LimitReader(in, 16*spec.MaxSize))
}
