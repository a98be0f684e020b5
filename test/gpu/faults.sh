#!/usr/bin/env bash
# Programs that fail, on the real driver: what they see must be what they see without cgpu, and neighbours must notice nothing. Run by
# run.sh on a private node. Every check runs, whatever failed before; the last line is "gpu: N passed, M failed".
#   ONLY=REGEX   the checks whose names match
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/faults.log
: >"$log"
cubin=$built/nothing.cubin

# A kernel whose first instruction is none. nvcc cannot make one, so its code is overwritten.
make_cubin() {
	echo 'extern "C" __global__ void nothing() {}' >"$built/nothing.cu"
	nvcc -arch=sm_90 -cubin -o "$cubin" "$built/nothing.cu" || return 1
	python3 - "$cubin" <<'PYTHON'
import struct, sys
data = bytearray(open(sys.argv[1], 'rb').read())
at, = struct.unpack_from('<Q', data, 40)
size, count, names = struct.unpack_from('<HHH', data, 58)
sections = [struct.unpack_from('<IIQQQ', data, at + i * size) for i in range(count)]
name = lambda s: bytes(data[sections[names][4] + s[0]:]).split(b'\0')[0]
offset, = [s[4] for s in sections if name(s) == b'.text.nothing']
data[offset:offset + 16] = b'\xff' * 16
open(sys.argv[1], 'wb').write(data)
PYTHON
}

same() { # same COMMAND…: the vGPU says what the bare GPU says, and ends as it does
	local want got
	want=$(bare --rm -e HOME=/tmp -v "$built:$built:ro" -- timeout 60 "$@" 2>/dev/null; echo "exit $?")
	got=$(vgpu 6GiB --rm -e HOME=/tmp -v "$built:$built:ro" -- timeout 60 "$@" 2>/dev/null; echo "exit $?")
	printf 'bare: %s\nvgpu: %s\n' "$want" "$got"
	[[ $want == "$got" && $want != *'exit 124'* ]]
}
tool() { # tool REGEX COMMAND…: the tool finds on the vGPU what it finds on the bare GPU
	local regex=$1 way out status=0
	shift
	for way in bare 'vgpu 6GiB'; do
		# shellcheck disable=SC2086 # two words on purpose
		out=$($way --rm -e HOME=/tmp -v "$built:$built:ro" -- timeout 60 "$@" 2>&1)
		printf '%s: %s\n' "$way" "$(grep -E "$regex" <<<"$out" || tail -n 5 <<<"$out")"
		grep -qE "$regex" <<<"$out" || status=1
	done
	return "$status"
}

core_dump() { # a core dump of some size on both
	local way out status=0
	for way in bare 'vgpu 6GiB'; do
		# shellcheck disable=SC2086,SC2016 # two words on purpose; the container's shell expands
		out=$($way --rm -e CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 -e CUDA_COREDUMP_FILE=/tmp/core -v "$built:$built:ro" -- \
			sh -c 'timeout 60 "$0" misaligned >/dev/null 2>&1; stat -c %s /tmp/core' "$built/exceptions" 2>&1)
		echo "$way: $out bytes"
		[[ $out -gt 1000000 ]] || status=1
	done
	return "$status"
}
not() { ! "$@"; }

# Hardware counters are the node's choice: denied, and with profiling = true in cgpu.toml there.
counters() { # counters WANT
	local out
	out=$(vgpu 6GiB --rm -e HOME=/tmp -v "$built:$built:ro" -- timeout 60 ncu --clock-control none "$built/exceptions" assert 2>&1)
	grep -E 'ERR|==ERROR|Total SM Elapsed' <<<"$out" | head -n 3
	if [[ $1 == allowed ]]; then grep -q 'Total SM Elapsed' <<<"$out"; else ! grep -q 'Total SM Elapsed' <<<"$out"; fi
}
profiling() { # profiling true|false
	sed -i '/^profiling/d' "$CGPU_CONFIG" && sed -i "1i profiling = $1" "$CGPU_CONFIG" && cgpu refresh
}

# What a program that waits for each of its kernels sees beside one with kernels of two seconds that never asks for compute preemption,
# or against it (workloads/nopreempt.c). Prints the worst turnaround of 1 ms of work, and fails if it is above BOUND_US.
long_kernels() { # long_kernels BOUND_US NOPREEMPT WAY…
	local bound=$1 mode=$2 worst
	shift 2
	"$@" -d --name waits -v "$built:$built:ro" -- sleep 600 &&
		"$@" -d --name long -v "$built:$built:ro" -e LD_PRELOAD="$built/nopreempt.so" -e NOPREEMPT="$mode" -- \
			"$built/share" --seconds 20 --kernel-us 2000000 --iters-per-us "$rate" || return 1
	sleep 5
	docker exec waits "$built/latency" --seconds 12 --think-ms 0 --work-us 1000 --iters-per-us "$rate" >"$built/turnaround" 2>&1
	docker logs long 2>&1 | grep nopreempt | sort | uniq -c
	remove waits long
	tail -n 1 "$built/turnaround" | jq -c '{count, p50, p99, max}'
	worst=$(tail -n 1 "$built/turnaround" | jq .max)
	((${worst:-999999999} <= bound))
}

compile || exit 1
gcc -shared -fPIC -o "$built/nopreempt.so" "$workloads/nopreempt.c" || exit 1
make_host_image || exit 1
make_cubin || exit 1
rate=$(bare --rm -v "$built:$built:ro" -- "$built/share" --calibrate | jq .iters_per_us) || exit 1
for kind in trap breakpoint misaligned address stack shared local assert instruction; do
	check "exception: $kind" same "$built/exceptions" "$kind" "$cubin"
done
check 'cuda-gdb stops at the exception' tool 'trap_\(\)<<<' cuda-gdb -batch -ex run -ex bt --args "$built/exceptions" trap
check 'compute-sanitizer finds the access' tool 'is misaligned' compute-sanitizer "$built/exceptions" misaligned
check 'core dump' core_dump
check 'counters are denied' counters denied
profiling true
check 'counters where the node allows them' counters allowed
profiling false
# Bare, for comparison: with 580.159.04 the driver preempts even where another mode was asked for, so these never fail.
check 'kernels of 2 s, another mode asked for, bare' long_kernels 99999999 wfi bare
check 'kernels of 2 s, the mode never asked for, bare' long_kernels 99999999 drop bare
check 'kernels of 2 s, the mode never asked for, vGPU' long_kernels 100000 drop vgpu 6GiB
check 'kernels of 2 s, another mode asked for, vGPU' long_kernels 100000 wfi vgpu 6GiB

echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
