#!/usr/bin/env bash
# Managed memory, memory spilled to the host, and preload mode, with real programs in real containers on the real driver; run by
# run.sh on a private node. Every check runs, whatever failed before; the last line is "gpu: N passed, M failed".
#   ONLY=REGEX   the checks whose names match
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/memory.log
: >"$log"

run() { # run SIZE OPTIONS… -- COMMAND…: prints what the container says, and fails as it does
	vgpu "$1" --rm "${@:2}" 2>&1
}
managed_fits() {
	local out
	out=$(run 6GiB -- "$built/managed" 5 3) || { echo "$out"; return 1; }
	echo "$out"
	[[ $(grep -c 'right 1' <<<"$out") -eq 3 ]] && (($(number used_MiB <<<"$out") > 5120)) && near "$(number total_MiB <<<"$out")" 6144 0
}
managed_refused() { # managed_refused GIB OPTIONS…
	local out
	out=$(run 6GiB "${@:2}" -- "$built/managed" "$1" 3) || { echo "$out"; return 1; }
	echo "$out"
	[[ $(grep -c 'managed cudaErrorMemoryAllocation' <<<"$out") -eq 3 && $(grep -c 'ordinary cudaSuccess' <<<"$out") -eq 3 ]]
}
# What is refused must not spoil what comes after, in the same process.
managed_after_refusal() {
	local out
	out=$(run 6GiB -- "$built/managed" 7.1,4,6.3,0.7,9,4.3 2) || { echo "$out"; return 1; }
	echo "$out"
	[[ $(grep -c 'right 1' <<<"$out") -eq 6 && $(grep -c 'managed cudaErrorMemoryAllocation' <<<"$out") -eq 6 ]]
}
# Without the limiter nobody asks, and the guard finds it in the maps.
managed_bypass() { # managed_bypass OPTIONS…
	local begin status
	vgpu 6GiB -d --name bypass -e CGPU_LIMITER=off "$@" -- "$built/managed" 20 1 30 ${HOW:+"$HOW"} || return 1
	begin=$(date +%s%N)
	status=$(timeout 20 docker wait bypass)
	echo "exit $status $((($(date +%s%N) - begin) / 1000000)) ms after the container's start"
	docker logs bypass
	remove bypass
	[[ $status -eq 137 ]] && (($(date +%s%N) - begin < 4000000000))
}
managed_leaderless() { HOW=leaderless managed_bypass "$@"; }
managed_probe() {
	local begin status
	docker run -d --name bypass --runtime cgpu --network none -e ALIYUN_COM_GPU_MEM_CONTAINER=6 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 probe \
		cgpu-probe managed 20GiB --hold 30 || return 1
	begin=$(date +%s%N)
	status=$(timeout 20 docker wait bypass)
	echo "exit $status $((($(date +%s%N) - begin) / 1000000)) ms after the container's start"
	remove bypass
	[[ $status -eq 137 ]] && (($(date +%s%N) - begin < 3000000000))
}
# What looking at memory maps costs the guard: milliseconds of CPU in ten seconds, beside a PyTorch process that sleeps and one
# that keeps a CPU busy.
looking() {
	local status=1 guard before
	vgpu 6GiB -d --name looked -- "$python" -c '
import time, torch
x = torch.zeros(1 << 20, device="cuda")
print("maps", sum(1 for _ in open("/proc/self/maps")), flush=True)
time.sleep(14)
print("busy", flush=True)
end = time.time() + 16
while time.time() < end: pass' || return 1
	total() { cat /proc/"$guard"/task/*/schedstat | awk '{s += $1} END {printf "%d", s / 1e6}'; }
	wait_log looked maps && sleep 2 && {
		guard=$(jq -r '.records[0].guardPid' "$CGPU_RUN_DIR/ledger.json")
		before=$(total)
		sleep 10
		echo "asleep: $(($(total) - before)) ms in 10 s"
		wait_log looked busy && sleep 1
		before=$(total)
		sleep 10
		echo "busy: $(($(total) - before)) ms in 10 s, resident $(awk '/VmRSS/ {print $2, $3}' "/proc/$guard/status"), $(docker logs looked | head -n 1)"
		status=0
	}
	remove looked
	return "$status"
}
spill_oom() {
	local out
	out=$(run 6GiB -e CGPU_MEM_SPILL=4 -- "$python" "$built/oom.py" 2) || { echo "$out"; return 1; }
	echo "$out"
	near "$(number total_MiB <<<"$out")" 10240 0 && near "$(number used_MiB <<<"$out")" 10240 102 && grep 'goes on' <<<"$out"
}
spill_speed() {
	local out gbs
	out=$(run 3GiB -e CGPU_MEM_SPILL=6 -- "$built/spill" 2496 2048) || { echo "$out"; return 1; }
	echo "$out"
	gbs=$(awk '$1 == "read_GBs" {print int($2)}' <<<"$out")
	grep -q 'right 1' <<<"$out" && grep -q 'texture_worst 0' <<<"$out" && grep -q 'ipc cudaErrorNotSupported' <<<"$out" &&
		grep -q 'vmm 0 export CUDA_ERROR_NOT_SUPPORTED' <<<"$out" && grep -q 'again ok' <<<"$out" && ((gbs >= 45 && gbs < 200))
}
# The same losses with a third of the memory on the host.
spill_training() {
	local whole spilled
	whole=$(run 40GiB -- "$python" "$built/train_spill.py" 128 4) || { echo "$whole"; return 1; }
	spilled=$(run 9GiB -e CGPU_MEM_SPILL=8 "$@" -- "$python" "$built/train_spill.py" 128 4) || { echo "$spilled"; return 1; }
	grep -hE 'losses [0-9]|step_ms|reserved' <(echo "$whole") <(echo "$spilled")
	[[ $(grep 'losses [0-9]' <<<"$whole") == $(grep 'losses [0-9]' <<<"$spilled") ]]
}
# Two containers whose limits go beyond the card only by what they may spill.
spill_two() {
	local total half status=1
	total=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
	half=$((total / 2))
	vgpu "${half}MiB" -d --name one -e CGPU_MEM_SPILL=8 -- "$built/fill" malloc 512 $((half + 3072)) 60 &&
		vgpu "${half}MiB" -d --name two -e CGPU_MEM_SPILL=8 -- "$built/fill" malloc 512 $((half + 3072)) 60 &&
		wait_log one 'kept canary 1' && wait_log two 'kept canary 1' && {
		cgpu smi
		cgpu smi --json | jq -e '[.gpus[0].vgpus[] | .spilled_bytes > 2*1024*1024*1024 and .spilled_bytes <= .spill_bytes and .used_bytes <= .limit_bytes] == [true, true]'
		status=$?
	}
	docker logs one
	docker logs two
	remove one two
	return "$status"
}
spill_killed() {
	local status=1 before after
	before=$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
	vgpu 2GiB -d --name spiller -e CGPU_MEM_SPILL=10 -- "$built/fill" malloc 512 10240 60 && wait_log spiller 'kept canary 1' && {
		after=$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
		docker kill spiller
		sleep 1
		echo "host has $before MiB, then $after, then $(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)"
		((before - after > 8000 && before - $(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo) < 1000))
		status=$?
	}
	remove spiller
	return "$status"
}

preload_oom() {
	local out
	out=$(run 6GiB "$@" -- "$python" "$built/oom.py" 2) || { echo "$out"; return 1; }
	echo "$out"
	near "$(number total_MiB <<<"$out")" 6144 0 && near "$(number used_MiB <<<"$out")" 6144 32 && grep 'goes on' <<<"$out"
}
preload_fill() {
	local out
	out=$(run 6GiB -- "$built/fill" "$1" 2) || { echo "$out"; return 1; }
	echo "$out"
	grep -q 'cudaErrorMemoryAllocation canary 1' <<<"$out" && (($(number allocated_MiB <<<"$out") <= 6144 && $(number allocated_MiB <<<"$out") > 5000))
}
preload_killed() {
	local out status=1
	vgpu 6GiB -d --name preloaded -- sleep 120 || return 1
	docker exec -d preloaded "$built/fill" malloc 64 4096 100
	sleep 4
	cgpu smi
	docker exec preloaded sh -c 'kill -9 $(pidof fill)'
	out=$(docker exec preloaded "$built/fill" malloc 64)
	echo "$out"
	(($(number allocated_MiB <<<"$out") > 5000))
	status=$?
	remove preloaded
	return "$status"
}
preload_walk_around() { # a static program goes past it, and the documentation says so
	docker run --rm --runtime cgpu --network none -e ALIYUN_COM_GPU_MEM_CONTAINER=1 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 probe cgpu-probe alloc 2GiB
}
preload_weights() {
	local one three status=1 rate start
	rate=$(vgpu 6GiB --rm -- "$built/share" --calibrate | jq .iters_per_us)
	start=$(($(date +%s) + 6))
	vgpu 6GiB -d --name light -e ALIYUN_COM_GPU_SCHD_WEIGHT=1 -- "$built/share" --seconds 6 --start-at "$start" --iters-per-us "$rate" &&
		vgpu 6GiB -d --name heavy -e ALIYUN_COM_GPU_SCHD_WEIGHT=3 -- "$built/share" --seconds 6 --start-at "$start" --iters-per-us "$rate" && {
		docker wait light heavy
		one=$(docker logs light | tail -n 1 | jq .work_us)
		three=$(docker logs heavy | tail -n 1 | jq .work_us)
		awk -v a="$one" -v b="$three" 'BEGIN {printf "work %.2f s and %.2f s of 6, ratio %.2f\n", a / 1e6, b / 1e6, b / a; exit !(b / a > 2.7 && b / a < 3.3)}'
		status=$?
	}
	remove light heavy
	return "$status"
}

compile || exit 1
make_host_image || exit 1
cgpu refresh >/dev/null

check 'managed memory within the limit' managed_fits
check 'managed memory over the limit: cudaErrorMemoryAllocation' managed_refused 7
check 'managed memory over the limit, an odd size' managed_refused 7.1
check 'managed memory works after a refusal' managed_after_refusal
check 'managed memory past the limiter is found' managed_bypass
check 'managed memory past the limiter is found, another user' managed_bypass -u 1000:1000
check 'managed memory past the limiter is found, without a first thread' managed_leaderless
check 'raw mapping of 20 GiB is found' managed_probe
check 'what looking at maps costs' looking
check 'spill: PyTorch reaches limit + spill' spill_oom
check 'spill: speed, textures, IPC, export' spill_speed
check 'spill: training gives the same losses' spill_training
check 'spill: the same with expandable segments' spill_training -e PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
check 'spill: two containers beyond the card' spill_two
check 'spill: killed, the host has its memory again' spill_killed

config=$(cat "$CGPU_CONFIG")
printf 'enforcement = "preload"\n%s\n' "$config" >"$CGPU_CONFIG"
check 'preload: PyTorch stops at the limit' preload_oom
check 'preload: env -u LD_PRELOAD' preload_oom -e LD_PRELOAD=
check 'preload: cudaMalloc' preload_fill malloc
check 'preload: cudaMallocAsync' preload_fill async
check 'preload: VMM' preload_fill vmm
check 'preload: managed memory over the limit' managed_refused 7.1
check 'preload: managed memory after a refusal' managed_after_refusal
check 'preload: killed, its memory is free again' preload_killed
check 'preload: weights 1:3' preload_weights
check 'preload: a static program walks around it' preload_walk_around
printf '%s\n' "$config" >"$CGPU_CONFIG"

echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
