// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// Config is what cgpu-runtime tells a guard; GPU is one GPU of the container.
type (
	Config = guardcfg.Config
	GPU    = guardcfg.GPU
)

// Driver carries out the guard's calls, on a Target.
type (
	Driver = rmclient.Driver
	Target = rmclient.Target
)

// simFile is a simulated driver's name for a file; 0 means that it was not told of it.
type simFile uint32
