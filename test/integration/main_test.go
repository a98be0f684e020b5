// SPDX-License-Identifier: Apache-2.0

//go:build integration

// Package integration is the conformance suite: real docker, containerd, runc and crun start containers through
// cgpu-runtime, and cgpu-probe asks the driver from inside what a tenant can see, take and break.
//
// It runs on the simulated driver (two GPUs, in CI) and, with CGPU_TEST_DRIVER=nvidia, on the real one; the tests are
// the same, so the simulation stays honest. Run it by `make integration`; hack/with-node.sh makes the node around it.
package integration

import (
	"testing"

	"github.com/opencgpu/cgpu/test/node"
)

var lab *node.Node

func TestMain(m *testing.M) { node.Main(m, &lab) }
