#!/usr/bin/env bash
# Two GPUs in one container: their memory used from each other by CUDA's ways, NCCL with a process for each, and the attack that takes
# one's memory for the other's. Each way first with the bare cards: what they cannot do, a share of them need not. Run by run.sh on a
# private node, on a machine with two GPUs; the last line is "gpu: N passed, M failed".
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/peers.log
: >"$log"

both() { # both COMMAND…: in a container with 8 GiB of each GPU
	docker run --rm --runtime cgpu "${host_options[@]}" --shm-size 1g -e ALIYUN_COM_GPU_MEM_CONTAINER=8 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0,1 \
		-e NCCL_NVLS_ENABLE=0 "${settings[@]}" host "$@"
}
way() { # way NAME: the program on the bare cards, then on shares of them
	bare --rm -- "$built/peers" "$1" || { echo "the bare cards cannot"; return 1; }
	both "$built/peers" "$1"
}
nccl() { # nccl [SETTING…]
	local out setting settings=()
	for setting in "$@"; do settings+=(-e "$setting"); done
	out=$(both "$python" "$built/nccl.py") || { echo "$out"; return 1; }
	echo "$out"
	grep -q 'sum_ok True' <<<"$out"
}
attack() {
	docker run --rm --runtime cgpu --network none -e ALIYUN_COM_GPU_MEM_CONTAINER=1 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0,1 probe \
		cgpu-probe hostile other-gpu
}

settings=()
compile peers || exit 1
make_host_image
check 'a copy between the GPUs, and a kernel on the memory of the other' way copy
check 'CUDA IPC from one GPU to the other' way ipc
check 'VMM import on the other GPU' way vmm
check 'NCCL, a process for each GPU' nccl
check 'NCCL, without host memory' nccl NCCL_SHM_DISABLE=1
check 'NCCL, without the peer path' nccl NCCL_P2P_DISABLE=1
check 'NCCL, without cuMem' nccl NCCL_CUMEM_ENABLE=0
check 'attack: memory of one GPU taken for memory of the other' attack
echo "gpu: $passed passed, $failed failed"
((failed == 0))
