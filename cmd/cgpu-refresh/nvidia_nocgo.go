// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package main

import (
	"errors"
	"io"

	"github.com/opencgpu/cgpu/pkg/device"
)

// nvidia needs cgo: go-nvml loads NVIDIA's library with the C linker.
func (r refresh) nvidia(*device.Table, string, device.Key) error {
	return errors.New(`this cgpu-refresh was built with CGO_ENABLED=0 and cannot load NVML; build it with cgo, or set driver = "sim" in cgpu.toml`)
}

var errNoCgo = errors.New("this cgpu-refresh was built with CGO_ENABLED=0 and cannot load NVML")

func nvmlHardware(string, io.Reader, io.Writer) error { return errNoCgo }

func limitCgroup(string, string, string, []string) error { return errNoCgo }
