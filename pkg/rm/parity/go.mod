module github.com/opencgpu/cgpu/pkg/rm/parity

go 1.26.3

require (
	github.com/opencgpu/cgpu v0.0.0
	gvisor.dev/gvisor v0.0.0-20260905035102-160fafc42237
)

require golang.org/x/sys v0.49.0 // indirect

replace github.com/opencgpu/cgpu => ../../..
