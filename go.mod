module github.com/opencgpu/cgpu

go 1.26
