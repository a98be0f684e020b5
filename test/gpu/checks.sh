#!/usr/bin/env bash
# Checks of real programs in real containers on the real driver; run by run.sh on a private node. Every check runs,
# whatever failed before; the last line is "gpu: N passed, M failed".
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/checks.log
: >"$log"
smi_size() {
	local out
	out=$(vgpu 6GiB --rm -- nvidia-smi) || { echo "$out"; return 1; }
	echo "$out"
	grep -qE '/ +6144MiB' <<<"$out"
}
smi_query() {
	local out
	out=$(vgpu 6GiB --rm -- nvidia-smi --query-gpu=memory.total,memory.used --format=csv,noheader,nounits) || { echo "$out"; return 1; }
	echo "$out"
	[[ $out == 6144,* ]]
}
# PyTorch must be refused with no more than 2 MiB of the limit left or passed.
oom() { # oom DOCKER_OPTIONS…
	local out
	out=$(vgpu 6GiB --rm "$@" -- "$python" "$built/oom.py" 2) || { echo "$out"; return 1; }
	echo "$out"
	near "$(number total_MiB <<<"$out")" 6144 0 && near "$(number used_MiB <<<"$out")" 6144 2 && grep 'goes on' <<<"$out"
}
fill() { # fill WAY DOCKER_OPTIONS…
	local out way=$1
	shift
	out=$(vgpu 6GiB --rm "$@" -- "$built/fill" "$way" 2) || { echo "$out"; return 1; }
	echo "$out"
	near "$(number total_MiB <<<"$out")" 6144 0 && grep -q 'cudaErrorMemoryAllocation canary 1' <<<"$out" &&
		(($(number allocated_MiB <<<"$out") <= 6144 && $(number allocated_MiB <<<"$out") > 5000))
}
cleared_environment() {
	local out
	out=$(vgpu 6GiB --rm -- env -i "$built/fill" malloc 16) || { echo "$out"; return 1; }
	echo "$out"
	near "$(number total_MiB <<<"$out")" 6144 0
}
no_preload() {
	local out
	out=$(vgpu 6GiB --rm -- env -u LD_PRELOAD "$built/fill" malloc 16) || { echo "$out"; return 1; }
	echo "$out"
	near "$(number total_MiB <<<"$out")" 6144 0 && (($(number allocated_MiB <<<"$out") <= 6144))
}
two_containers() {
	local out status=1
	vgpu 6GiB -d --name six -- "$built/fill" malloc 64 5000 120 && vgpu 8GiB -d --name eight -- "$built/fill" malloc 64 6500 120 &&
		wait_log six 'kept canary 1' && wait_log eight 'kept canary 1' && {
		cgpu smi
		out=$(docker exec six nvidia-smi; docker exec eight nvidia-smi)
		echo "$out"
		grep -qE '/ +6144MiB' <<<"$out" && grep -qE '/ +8192MiB' <<<"$out" &&
			docker exec eight "$built/fill" malloc 16 | tee /dev/stderr | grep -q 'total_MiB 8192'
		status=$?
	}
	remove six eight
	return "$status"
}
four_processes() {
	local out status=1 i
	vgpu 6GiB -d --name four -- sleep 300 || return 1
	for i in 1 2 3; do docker exec -d four "$built/fill" malloc 16 1024 120; done
	sleep 15
	out=$(docker exec four "$built/fill" malloc 2)
	echo "$out"
	# Three contexts of about half a GiB and three GiB are gone; a fourth process gets the rest.
	(($(number allocated_MiB <<<"$out") < 2000)) && near "$(number total_MiB <<<"$out")" 6144 0
	status=$?
	remove four
	return "$status"
}
killed_program() {
	local status=1 used i
	vgpu 6GiB -d --name killed -- "$built/fill" malloc 64 5000 300 && wait_log killed 'kept canary 1' && {
		docker kill killed
		for ((i = 0; i < 10; i++)); do
			sleep 0.1
			used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
			((used < 1000)) && status=0 && break
		done
		echo "used $used MiB after $((i + 1)) tenths of a second"
	}
	remove killed
	return "$status"
}
killed_guard() {
	local out status=1 guard id
	vgpu 6GiB -d --name neighbour -- "$built/fill" malloc 64 1024 300 && vgpu 6GiB -d --name victim -- "$built/fill" malloc 64 1024 300 &&
		wait_log neighbour 'kept canary 1' && wait_log victim 'kept canary 1' && {
		guard=$(jq -r --arg id "$(docker inspect -f '{{.Id}}' victim)" '.records[] | select(.id == $id) | .guardPid' "$CGPU_RUN_DIR/ledger.json")
		kill -9 "$guard"
		if timeout 30 docker exec victim "$built/fill" malloc 16; then
			echo "a GPU program ran without a guard"
		elif ! docker exec neighbour "$built/fill" malloc 64 1024 0; then
			echo "the neighbour suffers"
		else
			id=$(docker inspect -f '{{.Id}}' victim)
			timeout 30 docker rm -f victim && cgpu gc && ! cgpu smi -o json | grep -q "$id" && nvidia-smi >/dev/null
			status=$?
		fi
	}
	remove neighbour victim
	return "$status"
}
driver_files() {
	docker run --rm --runtime cgpu --network none -e ALIYUN_COM_GPU_MEM_CONTAINER=1 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 probe \
		busybox find / -path /proc -prune -o -name 'libcuda.so*' -print | tee /dev/stderr | grep -q libcuda
}
nodes() {
	local out
	out=$(docker run --rm --runtime cgpu --network none -e ALIYUN_COM_GPU_MEM_CONTAINER=1 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 probe \
		sh -c 'ls -d /dev/nvidia*') || return 1
	echo "$out"
	! grep -qE 'modeset|caps|uvm-tools' <<<"$out" && grep -q nvidiactl <<<"$out"
}
# A user other than root keeps its memory while the guard looks who holds what (cgpu smi makes it sweep).
another_user() {
	local status=1 i
	vgpu 6GiB -d --name another -u 1000:1000 -- "$built/steady" 8 || return 1
	for ((i = 0; i < 12; i++)); do
		sleep 1
		cgpu smi | grep steady
	done
	timeout 30 docker wait another | grep -qx 0 && status=0
	docker logs another
	remove another
	return "$status"
}
# Vulkan's own view of the card is the quota too.
vulkan() {
	local out
	out=$(vgpu 6GiB --rm -e VK_DRIVER_FILES="${VK_DRIVER_FILES:-}" -- vulkaninfo) || { tail -n 5 <<<"$out"; return 1; }
	grep -E 'deviceName|size += ' <<<"$out" | head -n 6
	grep -q 'deviceName *= NVIDIA' <<<"$out"
}
# CUDA asks for clocks that stay up; where that does not reach the driver each burst after a rest is slow.
clocks() {
	local out
	out=$(vgpu 6GiB --rm -- "$python" "$built/duty.py") || { echo "$out"; return 1; }
	echo "$out"
	(($(number burst_percent <<<"$out") < 150))
}
# A container that is not cgpu's gets the files of one that is, and takes with them what it can. It must be ended within two seconds of
# its first allocation, and what it took must be free again; a neighbour of cgpu's, and one with the whole card, go on.
passed_descriptors() {
	local status=1 volume used i before
	volume=$(mktemp -d)
	chmod 777 "$volume"
	vgpu 6GiB -d --name neighbour -- "$built/fill" malloc 64 1024 300 && bare -d --name whole -- "$built/fill" malloc 64 1024 300 &&
		wait_log neighbour 'kept canary 1' && wait_log whole 'kept canary 1' &&
		docker run -d --name sender --runtime cgpu --network none -v "$volume:/vol" -e ALIYUN_COM_GPU_MEM_CONTAINER=1 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 probe \
			cgpu-probe send-fds /vol/socket && wait_log sender 'ready=1' && {
		before=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
		docker run -d --name thief --runtime runc --network none -v "$volume:/vol" probe cgpu-probe recv-fds /vol/socket
		i=$(timeout 30 docker wait thief)
		docker logs thief
		docker logs sender
		sleep 1
		used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
		echo "exit status $i, $before MiB in use before, $used MiB after; the thief lived $(docker logs thief 2>&1 | grep -oE 'alive_ms=[0-9]+' | tail -n 1)"
		cgpu events 2>/dev/null | grep 'outside of the container'
		# 137: killed. 0: refused.
		if [[ $i != 0 && $i != 137 ]] || (($(docker logs thief 2>&1 | grep -oE 'alive_ms=[0-9]+' | tail -n 1 | cut -d= -f2 || true) + 0 > 2500)); then
			echo "the thief was not ended in time"
		elif ((used > before + 300)); then
			echo "what it took is not free"
		elif ! docker exec neighbour "$built/fill" malloc 64 1024 0 || ! docker exec whole "$built/fill" malloc 64 1024 0; then
			echo "a neighbour suffers"
		else
			[[ $(docker inspect -f '{{.State.Running}}' neighbour whole | sort -u) == true ]]
			status=$?
		fi
	}
	remove neighbour whole sender thief
	rm -rf "$volume"
	return "$status"
}
probe() { docker run --rm --runtime cgpu --network none -e ALIYUN_COM_GPU_MEM_CONTAINER=1 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 probe cgpu-probe "$@"; }

compile || exit 1
make_host_image || exit 1

check 'bare container works (the rig itself)' bare --rm -- nvidia-smi
check 'only its own nodes' nodes
check 'driver files are there without the host userland' driver_files
check 'probe: self' probe self
check 'nvidia-smi shows the quota' smi_size
check 'nvidia-smi query shows the quota' smi_query
check 'PyTorch stops at the limit' oom
check 'PyTorch stops at the limit, seccomp=unconfined' oom --security-opt seccomp=unconfined
check 'static CUDA program: cudaMalloc' fill malloc
check 'cudaMallocAsync' fill async
check 'VMM (cuMemCreate)' fill vmm
check 'privileged' fill malloc --privileged
check 'environment cleared' cleared_environment
check 'env -u LD_PRELOAD' no_preload
check 'two containers at once' two_containers
check 'four processes, one limit' four_processes
check 'CUDA graphs' vgpu 6GiB --rm -- "$built/graph"
check 'contexts that are made and ended again and again' vgpu 6GiB --rm -- "$built/contexts" 12
check 'memory pools that other processes can be given' vgpu 6GiB --rm -- "$built/pools" device
check 'CUDA IPC inside one container' vgpu 6GiB --rm -- "$built/ipc"
check 'page-locked host memory of every kind' vgpu 6GiB --rm -- "$built/pinned"
check 'page-locked host memory made and freed by ten threads' vgpu 6GiB --rm -- "$built/pinthreads" 5
check 'ResNet-50 training, inference, cuBLAS' vgpu 16GiB --rm --shm-size 1g -- "$python" "$built/train.py"
for program in ipc compile profile jax vmm; do
	check "PyTorch and JAX: $program" vgpu 16GiB --rm --shm-size 1g -e HOME=/tmp -- "$python" "$built/programs.py" "$program"
done
for query in '-q' '-L' 'pmon -c 1' 'dmon -c 1' 'topo -m'; do
	# shellcheck disable=SC2086 # several words on purpose
	check "nvidia-smi $query" vgpu 6GiB --rm -- nvidia-smi $query
done
if command -v vulkaninfo >/dev/null; then check 'Vulkan' vulkan; fi
check 'clocks stay up on a GPU that is not always busy' clocks
check 'another user than root' another_user
check 'killed program: memory back within a second' killed_program
check 'killed guard' killed_guard
check 'passed descriptors' passed_descriptors

for case in toctou-root-file toctou-root-rights; do # a guard forgives one swapped call an hour: each case with one of its own
	check "probe: hostile $case" probe hostile "$case" --tries 5000
done
check 'probe: hostile' probe hostile all --tries 5000 # with more, what does not succeed waits for the guard's time
echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
