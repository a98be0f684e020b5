// SPDX-License-Identifier: Apache-2.0

package main

// status is how something is known, the best way first.
type status string

const (
	measured  status = "**hardware**" // on a real GPU
	simulated status = "simulated"    // by tests on the simulated driver, with the real engines
	read      status = "read"         // in source or documentation; nothing was run, or made-up files alone
	unknown   status = "unknown"
	refused   status = "refused" // by cgpu, with a message
	fails     status = "fails"   // tried, and does not work
)

// fact is a row: what is claimed, and by what.
type fact struct {
	what    string
	commits []string // that it was tried with on hardware; docs/measurements.md has what was done
	tests   []string // FOLDER:TestName
	status  status   // where neither of these says it
	says    string
}

// dates of commits that were on hardware.
var dates = map[string]string{
	"250e6b7": "2026-11-21", "a362303": "2026-11-21", "681eb12": "2026-11-21", "98a3454": "2026-11-21", "d27edcd": "2026-11-21",
	"5ac456e": "2026-11-21", "dafb2ef": "2026-11-21", "dfc8db9": "2026-11-22", "e399f08": "2026-11-22", "2e69c9f": "2026-11-22",
	"ca35970": "2026-11-22", "a8559c1": "2026-11-22", "71b9b7d": "2026-11-22",
	"3611f8c": "2026-11-23", "3fc5bca": "2026-11-23", "7e9500c": "2026-11-24", "1f434b5": "2026-11-24", "f41971b": "2026-11-28",
	"221b2a4": "2026-11-28", "ca19c05": "2026-11-28", "f7c2ad8": "2026-11-28", "39e939b": "2026-11-28",
}

// together are whole machines: what was tried at the same time, on hardware.
var together = [][]string{
	// driver, GPU, kernel, engine, low-level runtime, orchestrator, commits, what
	{"580.159.04, open modules", "H200", "6.18", "Docker 20.10", "runc 1.1.5", "–",
		"ca35970 2e69c9f e399f08 71b9b7d 3611f8c 3fc5bca 7e9500c 1f434b5 f41971b 39e939b",
		"CUDA 13.0, PyTorch 2.11, JAX; `checks`, `faults`, `ends`, hostile cases"},
	{"580.159.04, open modules", "H200", "6.18", "Docker 20.10, containerd, crun by turns", "runc 1.1.5, crun 1.8.1", "–",
		"250e6b7 681eb12", "the conformance suite"},
	{"580.159.04, open modules", "H200", "6.18", "containerd 2.4.2", "runc", "Kubernetes 1.36.3", "5ac456e",
		"claims and `aliyun.com/gpu-mem`, 17 checks"},
	{"580.159.04, open modules", "H200", "6.18", "none (`cgpu run`)", "–", "–", "98a3454 d27edcd", "`bare`: PyTorch, hostile cases"},
	{"580.159.04, open modules", "two H200, NVSwitch", "6.18", "Docker 20.10", "runc 1.1.5", "–", "dfc8db9 a8559c1",
		"peer copies, CUDA IPC, NCCL, spill"},
	{"580.159.04, open modules", "two H200", "6.18", "containerd 2.4.2", "runc", "Kubernetes 1.36.3", "dafb2ef",
		"claims of two GPUs and of shares on two; NCCL"},
}

// branches say more of driver branches than that their structures were read.
var branches = map[string]fact{
	"580": {commits: []string{"ca35970"}, tests: []string{"test/integration:TestWalk"}, says: "580.159.04, open modules"},
	// The test's client makes calls as they are since 535.
	"515": {status: read, says: readBranch}, "520": {status: read, says: readBranch}, "525": {status: read, says: readBranch},
	"530": {status: read, says: readBranch},
}

// otherBranches are those of which nothing more is said.
var otherBranches = fact{tests: []string{"test/integration:TestDriverBranches"},
	says: "structures laid out by a compiler ([drivers.md](drivers.md))"}

const readBranch = "structures laid out by a compiler ([drivers.md](drivers.md))"

// architectures of GPUs, as pkg/rm's classes are called; others are unknown to its tables.
var architectures = []struct {
	name, cards string
	fact        fact
}{
	{"PASCAL", "P100, P40", fact{tests: []string{"cmd/cgpu-refresh:TestGPUsLeftOut"},
		says: "its channels are mapped by their own handles, and a guard maps memory alone; `enforcement = \"preload\"` shares it"}},
	{"VOLTA", "V100", fact{says: "its driver is closed and has no GSP firmware"}},
	{"TURING", "T4", fact{says: "the simulator plays a T4, which says nothing of the card"}},
	{"AMPERE", "A100, A10", fact{}},
	{"ADA", "L4, L40S", fact{}},
	{"HOPPER", "H100, H200", fact{commits: []string{"ca35970", "3611f8c"}, says: "H200; of others nothing"}},
	{"BLACKWELL", "B200, RTX PRO 6000", fact{}},
}

const readArchitecture = "its channel and compute classes are in the tables; whether shares of time are as exact is not known: " +
	"`cgpu doctor` tries what it can"

type section struct {
	title, before string
	facts         []fact
}

var afterDrivers = []section{{"More of drivers", "", []fact{
	{what: "NVIDIA's own memory limits, 615 and newer", tests: []string{"cmd/cgpu-refresh:TestLimitCgroup"}, status: read,
		says: "`limits`, in preload mode or alone; made-up NVML, never a driver that has them"},
	{what: "branches from 610 on", tests: []string{"pkg/rm:TestForDriver"}, status: refused,
		says: "a channel's fields lie elsewhere there; also with `allow_unknown_driver`"},
	{what: "another unknown branch", status: refused, says: "unless `allow_unknown_driver = true`"},
	{what: "open modules with GSP firmware", commits: []string{"ca35970"}},
	{what: "proprietary modules", status: unknown, says: "the same interface by NVIDIA's word; `cgpu doctor` (`gsp`) tells what is loaded"},
	{what: "without GSP firmware", status: unknown, says: "pauses, so hard caps and `cgpu pause`, may lack; `cgpu doctor` " +
		"(`scheduling`) tries"},
}}}

var afterGPUs = []section{
	{"More of GPUs", "", []fact{
		{what: "two GPUs in a container, NVLink, NCCL", commits: []string{"dfc8db9", "dafb2ef"}},
		{what: "a node with four GPUs", tests: []string{"test/kubernetes:TestHundredPods", "test/kubernetes:TestClaimOfTwoGPUs"}},
		{what: "more than two GPUs in a container", status: unknown},
		{what: "MIG", tests: []string{"cmd/cgpu-refresh:TestGPUsLeftOut"}, status: refused, says: "a GPU in MIG mode is left out of the table"},
		{what: "vGPU guests, confidential computing, WSL", status: unknown},
	}},
	{"What programs use", "Memory is counted where every program enters the kernel, whatever the library. That a program *runs* has to " +
		"be tried.", []fact{
		{what: "CUDA 13.0: runtime, driver API, VMM, graphs, IPC, managed memory", commits: []string{"ca35970", "e399f08"}},
		{what: "PyTorch 2.11, JAX, cuBLAS, NCCL, torch.compile", commits: []string{"250e6b7", "71b9b7d"}},
		{what: "cuda-gdb, compute-sanitizer, Nsight Compute", commits: []string{"71b9b7d"}},
		{what: "TensorFlow, vLLM, Triton", status: unknown, says: "they use the same CUDA"},
		{what: "CUDA MPS between containers of a [trust domain](space.md)", commits: []string{"f7c2ad8", "39e939b"}},
		{what: "Vulkan, OpenGL and EGL off screen", commits: []string{"221b2a4", "ca19c05"},
			says: "with `graphics = true`, no hard cap at its start ([tried](internals/graphics.md))"},
		{what: "OpenCL, OptiX, NVDEC, NVENC", tests: []string{"cmd/cgpu-refresh:TestCapabilities"}, status: read,
			says: "on an H200 OpenCL and NVDEC fail without cgpu, too; the others nobody has run"},
		{what: "NVJPEG", commits: []string{"7e9500c", "1f434b5"}, says: "our program only (`graphics`)"},
		{what: "X servers, Wayland, Vulkan's windows", tests: []string{"pkg/spec:TestForeignNames"}, status: refused,
			says: "they need nvidia-modeset or `/dev/dri`, [which no vGPU gets](internals/graphics.md#nodes-that-no-vgpu-gets)"},
	}},
	{"Kernels", "", []fact{
		{what: "6.18, cgroup v2", commits: []string{"ca35970"}},
		{what: "6.18, cgroup v1", tests: []string{"test/integration:TestFirstContainer"}, says: "the suite's own machine"},
		{what: "6.12 and 6.1, cgroup v2", status: simulated, says: "2026-11-28, by hand: Debian's, emulated, `cgpu run` " +
			"(`test/kernel.sh`): what doctor tries, memory to the MiB, work on 6.12; of the hostile cases the first ones"},
		{what: "5.10, cgroup v2", status: simulated,
			says: "2026-11-28, by hand, the same: memory and work; 41 hostile cases pass, 6 did not end in " +
				"a minute, `managed-pieces` and `retain` fail: whether by the kernel or by the emulator is not known"},
		{what: "others from 5.19 to 6.17", status: read,
			says: "all that must be there is; 6.6 answers trapped calls quicker, 6.9 spares the guard " +
				"a look-up for each; `cgpu doctor` tries it"},
		{what: "others from 5.9 to 5.18", status: read, says: "without SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (5.19): signals cut calls off"},
		{what: "before 5.9", status: refused, says: "no guard; [preload mode](install.md#hosts-without-seccomp-notification) only"},
		{what: "arm64", status: simulated, says: "2026-11-28, by hand, the same with Debian's 6.1 for arm64 and the package's programs: what " +
			"doctor tries, memory, work, the first hostile cases; no engine, no GPU"},
	}},
	{"Engines", "", []fact{
		{what: "Docker 20.10", commits: []string{"ca35970"}, tests: []string{"test/integration:TestInstallDocker"}},
		{what: "Docker 23 to 28", tests: []string{"pkg/spec:TestHooks"}, status: read, says: "a config.json of 28; none has run"},
		{what: "Docker 29", tests: []string{"test/integration:TestInstallDocker"}, says: "as moby v2.0.0-beta.24, which came after 28"},
		{what: "containerd 1.6", tests: []string{"test/integration:TestContainerd", "test/kubernetes:TestContainerdWithoutCDI"}},
		{what: "containerd 1.7", tests: []string{"test/kubernetes:TestClaimIsALimit", "test/kubernetes:TestMemoryByDevicePlugin",
			"test/kubernetes:TestRestarts"}, says: "2026-11-23, by hand: 1.7.24 of Debian 13 below Kubernetes 1.36.3"},
		{what: "containerd 2.0 to 2.3", tests: []string{"pkg/engine:TestGolden"}, status: read, says: "configuration files alone"},
		{what: "containerd 2.4", commits: []string{"5ac456e"}, tests: []string{"test/integration:TestInstallContainerd"}},
		{what: "podman 4.3, as root", tests: []string{"test/integration:TestInstallPodman"}},
		{what: "CRI-O 1.34", tests: []string{"test/integration:TestInstallCRIO", "test/kubernetes:TestDevicePluginBelowCRIO"},
			says: "also below a kubelet (1.36.3), claims alone; built without seccomp"},
		{what: "rootless engines", tests: []string{"test/integration:TestRootless"}, status: refused, says: "a share is; other containers start"},
		{what: "no engine: `cgpu run`", commits: []string{"98a3454", "d27edcd"}, tests: []string{"test/integration:TestRun"}},
		{what: "runc 1.1.5", commits: []string{"ca35970"}, tests: []string{"test/integration:TestRuntimes"}},
		{what: "crun 1.8.1", commits: []string{"681eb12"}, tests: []string{"test/integration:TestRuntimes"}},
		{what: "other versions of runc and crun, youki, gVisor, Kata", status: unknown,
			says: "[install.md](install.md): runc ≥ 1.1; gVisor and Kata never reach cgpu-runtime"},
	}},
	{"Orchestrators", "", []fact{
		{what: "Kubernetes 1.36, claims (DRA)", commits: []string{"5ac456e"}, tests: []string{"test/kubernetes:TestClaimIsALimit",
			"test/kubernetes:TestHundredPods"}},
		{what: "Kubernetes 1.36, `aliyun.com/gpu-mem`", commits: []string{"5ac456e"},
			tests: []string{"test/kubernetes:TestMemoryByDevicePlugin"}},
		{what: "Kubernetes 1.34, 1.35 with DRAConsumableCapacity", tests: []string{"test/kubernetes:TestClaimIsALimit",
			"test/kubernetes:TestMemoryByDevicePlugin"},
			says: "2026-11-23, by hand: 1.36.3's control plane emulating them, its kubelet as it is; a real one of them has not run"},
		{what: "Kubernetes 1.37", tests: []string{"test/kubernetes:TestClaimIsALimit", "test/kubernetes:TestMemoryByDevicePlugin",
			"test/kubernetes:TestSlicesDeleted"},
			says: "2026-11-23, by hand: 1.37.2, the suite in parts"},
		{what: "Kubernetes 1.30 to 1.33 with the device plugin", status: read},
		{what: "gpushare's scheduler extender", tests: []string{"test/kubernetes:TestGPUShareExtender"},
			says: "where its checkout is brought; not in CI"},
		{what: "Kueue 0.19", tests: []string{"deploy:TestExamples"},
			says: "its manifest against Kueue's CRDs; 2026-11-23, by hand: its controller, quota in bytes"},
		{what: "ResourceQuota, of claims and of units", tests: []string{"test/kubernetes:TestResourceQuota"}},
		{what: "`limits: {cgpu.io/gpu: 1}` by claims", tests: []string{"test/kubernetes:TestExtendedResource"}, says: "Kubernetes 1.36"},
		{what: "cgpu-installer, containerd", tests: []string{"test/kubernetes:TestInstaller"},
			says: "not on CRI-O, k3s, RKE2, nor with SELinux or a restart by systemd"},
		{what: "HAMi's, KAI's, Volcano's schedulers", tests: []string{"pkg/nri:TestAgainstAPIServer"}, status: read,
			says: "[schedulers.md](schedulers.md): stand-ins that write what they write; none of them has run"},
		{what: "k3s, RKE2", tests: []string{"pkg/engine:TestGeneratedRestart"}, status: read,
			says: "files made up from their documentation; none has run"},
		{what: "NVIDIA's toolkit on the same machine", tests: []string{"pkg/doctor:TestToolkit", "pkg/spec:TestApply"}, status: read,
			says: "made-up files, and a config.json that it wrote; [beside.md](beside.md)"},
		{what: "NVIDIA's device plugin on the same node", tests: []string{"pkg/doctor:TestOfferedOnce"}, status: read,
			says: "[beside.md](beside.md)"},
		{what: "GPU Operator's driver container, Flatcar", tests: []string{"cmd/cgpu-refresh:TestDriverRoot"}, status: read,
			says: "made-up files"},
		{what: "Talos, MicroK8s, k0s, OpenShift, GKE, EKS, AKS", status: unknown,
			says: "hosted nodes' driver folders are looked into; on one with `/usr/local/nvidia` everything was measured"},
		{what: "Slurm 22.05", tests: []string{"test/slurm:TestSlurm"}, says: "the SPANK plugin, [slurm.md](slurm.md); never on hardware"},
		{what: "SSH by `cgpu run`", status: unknown, says: "`cgpu run` was tried on hardware"},
	}},
}
