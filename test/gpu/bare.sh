#!/usr/bin/env bash
# cgpu run on the real driver: real programs on a slice of the GPU, without a container. As root; needs no engine, and takes about
# a minute. Every check runs, whatever failed before; the last line is "gpu: N passed, M failed".
#   CGPU_BIN=FOLDER OUT=FOLDER test/gpu/bare.sh
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=${CGPU_BIN:?set CGPU_BIN to the folder of the programs}
log=${OUT:?set OUT to a folder for the logs}/bare.log
dir=$(mktemp -d /tmp/cgpu-bare.XXXXXX)
chmod 755 "$dir"
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/run"
echo 'driver = "nvidia"' >"$dir/cgpu.toml"
export CGPU_RUN_DIR=$dir/run CGPU_CONFIG=$dir/cgpu.toml
cp "$here"/workloads/*.py "$bin/cgpu-probe" "$dir/"
python=$(command -v python3)
: >"$log"
passed=0 failed=0

check() { # check NAME COMMAND…
	local begin=$SECONDS
	echo "=== $1" >>"$log"
	if "${@:2}" >>"$log" 2>&1; then
		passed=$((passed + 1))
		echo "ok   $1 ($((SECONDS - begin)) s)"
	else
		failed=$((failed + 1))
		echo "FAIL $1 ($((SECONDS - begin)) s): $(tail -n 3 "$log" | tr '\n' ';')"
	fi
}
run() { "$bin/cgpu" run --gpu 0 --memory "$@"; }
number() { awk -v name="$1" '{for (i = 1; i < NF; i++) if ($i == name) {print int($(i + 1)); exit}}'; }
near() { (($1 - $2 <= $3 && $2 - $1 <= $3)); }

smi_size() {
	local out
	out=$(run 6GiB -- nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits) || return 1
	echo "$out"
	[[ $out == 6144 ]]
}
# PyTorch must be refused with no more than 2 MiB of the limit left or passed.
oom() { # oom FLAGS…
	local out
	out=$(run 6GiB "$@" -- "$python" "$dir/oom.py" 2) || { echo "$out"; return 1; }
	echo "$out"
	near "$(number total_MiB <<<"$out")" 6144 0 && near "$(number used_MiB <<<"$out")" 6144 2 && grep 'goes on' <<<"$out"
}
two() {
	local a b status=0
	run 6GiB -- "$python" "$dir/oom.py" 2 >"$dir/a" & a=$!
	run 8GiB -- "$python" "$dir/oom.py" 2 >"$dir/b" & b=$!
	wait "$a" || status=1
	wait "$b" || status=1
	cat "$dir/a" "$dir/b"
	# PyTorch asks for 20 MiB at a time.
	near "$(number used_MiB <"$dir/a")" 6144 20 && near "$(number used_MiB <"$dir/b")" 8192 20 && return "$status"
}
nodes() {
	local out
	out=$(run 1GiB -- sh -c 'ls -d /dev/nvidia*')
	echo "$out"
	[[ $(wc -l <<<"$out") -eq 3 ]]
}
killed() {
	local pid i
	"$bin/cgpu" run --gpu 0 --memory 6GiB -- "$dir/cgpu-probe" hold 5GiB & pid=$! # run itself would be a shell
	sleep 3
	kill -KILL "$pid"
	wait "$pid"
	for ((i = 0; i < 20; i++)); do
		"$bin/cgpu" smi | tee -a "$log" | grep -q '^run-' || return 0
		sleep 0.1
	done
	return 1
}
start_cost() {
	local i begin=$EPOCHREALTIME
	for ((i = 0; i < 20; i++)); do run 1GiB -- true || return 1; done
	awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN {printf "cgpu run -- true: %.1f ms\n", (b - a) / 20 * 1000}' | tee -a "$OUT/bare.txt"
}

check 'only its own nodes' nodes
check 'nvidia-smi shows the slice' smi_size
check 'PyTorch stops at the limit' oom
check 'PyTorch stops at the limit, without the preload library' oom --no-limiter
check 'PyTorch stops at the limit, another user' oom --user 1234:1234
check 'two runs at once' two
check 'probe: hostile, a user' run 1GiB --user 1234:1234 -- "$dir/cgpu-probe" hostile all --tries 1000
check 'probe: hostile, root' run 1GiB -- "$dir/cgpu-probe" hostile all --tries 1000
check 'killed: all is given back' killed
check 'what a start costs' start_cost
cp "$dir"/run/log/* "$OUT/" 2>/dev/null || true
echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
