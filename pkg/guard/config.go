package guard

import "github.com/opencgpu/cgpu/pkg/guard/guardcfg"

// Config is what cgpu-runtime tells a guard; GPU is one GPU of the container.
type (
	Config = guardcfg.Config
	GPU    = guardcfg.GPU
)
