#!/usr/bin/env bash
# A random walk over the driver's calls on the real driver, while a watcher outside compares the card's own memory use with the account: it
# must never be more than what is charged and SLACK, nor than the limit and SLACK; the account never more than the limit and what page
# tables may take beyond it (tableSlack of pkg/guard, 16 MiB). Afterwards nothing may be left, of memory, records, guards
# or in the kernel log; a neighbour must not wait long. Two walks of five minutes: raw calls (cgpu-probe walk --real: memory, address spaces,
# channel groups, copies, exports, mappings, in three processes that are killed and pass each other files), and CUDA itself
# (workloads/walk.cu: contexts, cuMem*, IPC, kernels). Only calls as CUDA makes them, nothing that touches the whole GPU. The last line is
# "gpu: N passed, M failed". The seed is printed; SEED=N walks the same way again, and `cgpu-probe walk --real --print --seed N` prints a list.
#   SCALE=PERCENT   how long it takes (default 100)
#   SLACK=MIB       what the driver may take for itself, for clients, processes and page tables (default 192)
#   STALL=MS        the neighbour's longest turnaround of 1 ms of work that is borne (default 100; a reset of the engine takes 130)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/walk.log
: >"$log"
seed=${SEED:-$RANDOM$RANDOM}
slack=${SLACK:-192}
scale=${SCALE:-100}
limit=6144
probe=$CGPU_BIN/cgpu-probe

card_used() { nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits; }
# charged NAME: MiB of a container's account, rounded up
charged() { cgpu smi --json | jq --arg id "$(docker inspect -f '{{.Id}}' "$1")" '[.gpus[].vgpus[] | select(.id == $id) | .used_bytes] | add / 1048576 | ceil'; }
# What the kernel may log of the driver, as a regular expression: what the first device of a client logs (docs/troubleshooting.md).
allowed='device\.c:'
# What the kernel has logged of the driver since a line, all of it if that line is gone.
driver_log() {
	dmesg | MARK=$1 awk '$0 == ENVIRON["MARK"] { n = 0; next } { lines[n++] = $0 } END { for (i = 0; i < n; i++) print lines[i] }' |
		grep -E 'NVRM|nvidia|Xid|UVM' | grep -vE "$allowed"
}

most=-100000 # that the card's use was above the account
# look NAME: one comparison. The account is read before and after the card; where it changed meanwhile, the larger one counts.
look() {
	local before card after
	before=$(charged "$1")
	card=$(($(card_used) - base))
	after=$(charged "$1")
	[[ $before && $after ]] || { echo "cannot look"; return 1; }
	((after > before)) && before=$after
	((card - before > most)) && most=$((card - before))
	if ((before > limit + 16 || card > before + slack || card > limit + slack)); then
		echo "the card has given out $card MiB, charged are $before MiB of $limit MiB; borne are $slack MiB more"
		return 1
	fi
}
# empty NAME: the processes are gone; what is left must be nothing, within seconds.
empty() {
	local i
	for ((i = 0; i < 50; i++)); do
		(($(charged "$1") == 0 && $(card_used) - base <= slack / 2)) && return
		sleep 0.1
	done
	echo "the processes are gone; charged are $(charged "$1") MiB, the card has $(($(card_used) - base)) MiB more than at the start"
	return 1
}

# raw SECONDS: the walk stops every 20 steps and is looked at.
raw() {
	local bad=0 looks=0 line words
	coproc walker { docker exec -i walks "$probe" walk --real --seed "$seed" --for "$1s" --limit "${limit}MiB" --sync 20 2>&1; }
	local in=${walker[1]} out=${walker[0]} pid=${walker_PID:?}
	while read -r line <&"$out"; do
		read -ra words <<<"$line"
		case ${words[0]:-} in
		sync) look walks || bad=1 ;;
		end) empty walks || bad=1 ;;
		*)
			echo "$line"
			continue
			;;
		esac
		looks=$((looks + 1))
		if ((bad)); then
			echo "seed and step: ${words[*]:1}"
			break
		fi
		echo go >&"$in"
	done
	exec {in}>&- # a walk that waits ends
	wait "$pid" || bad=1
	echo "$looks comparisons; at most $most MiB more than charged"
	return "$bad"
}
# stopped COMMAND…: while no process of the CUDA walk runs. A call under way ends, and new ones wait. Twice, for what was forked meanwhile.
stopped() {
	local pids status
	for _ in 1 2; do
		mapfile -t pids < <(docker top walks -o pid,comm | awk '$2 == "walk" { print $1 }')
		kill -STOP "${pids[@]}" 2>/dev/null
		sleep 0.02
	done
	"$@"
	status=$?
	kill -CONT "${pids[@]}" 2>/dev/null
	return "$status"
}
# cuda SECONDS: it is stopped by signals, anywhere, and looked at.
cuda() {
	local bad=0 looks=0 pid
	docker exec walks "$built/walk" --seconds "$1" --seed "$seed" --limit-mib "$limit" >"$OUT/walk.cuda" 2>&1 &
	pid=$!
	while kill -0 "$pid" 2>/dev/null; do
		stopped look walks || { bad=1 && break; }
		looks=$((looks + 1))
		sleep 0.05
	done
	wait "$pid" || bad=1
	tail -n 5 "$OUT/walk.cuda"
	empty walks || bad=1
	echo "$looks comparisons; at most $most MiB more than charged"
	return "$bad"
}

# beside WALK SECONDS: a walk beside a neighbour that waits for each of its kernels of 1 ms.
beside() {
	local bad=0 mark heap before worst
	most=-100000
	mark=$(dmesg | tail -n 1)
	base=$(card_used)
	heap=$("$probe" gspheap | awk -F= '$1 == "heap_used" { print $2 }')
	vgpu 6GiB -d --name waits -v "$built:$built:ro" -- sleep 900 && vgpu "${limit}MiB" -d --name walks -e HOME=/tmp -v "$built:$built:ro" -- sleep 900 || return 1
	docker exec waits "$built/latency" --seconds "$(($2 + 4))" --think-ms 0 --work-us 1000 --iters-per-us "$rate" >"$OUT/walk.neighbour" 2>&1 &
	before=$!
	sleep 3
	base=$(card_used) # with the neighbour
	"$1" "$2" || bad=1
	wait "$before" || bad=1
	worst=$(grep final "$OUT/walk.neighbour" | tail -n 1 | jq -r .max)
	echo "the neighbour's turnaround of 1 ms of work: $(grep final "$OUT/walk.neighbour" | tail -n 1 | jq -c '{count, p50, p99, max}')"
	[[ ${worst%.*} -le $((${STALL:-100} * 1000)) ]] || { echo "it waited too long"; bad=1; }
	remove waits walks
	sleep 2
	echo "the firmware's heap: $heap bytes before, $("$probe" gspheap | awk -F= '$1 == "heap_used" { print $2 }') after"
	[[ $(cgpu smi --json | jq '[.gpus[].vgpus[]] | length') == 0 ]] || { echo "records are left"; bad=1; }
	for pid in $(pgrep -x cgpu-guard); do # this node's have its pages
		! grep -qs "$CGPU_RUN_DIR" "/proc/$pid/maps" || { echo "guard $pid is left"; bad=1; }
	done
	if driver_log "$mark" >"$OUT/walk.kernel.$1"; then
		echo "the kernel logged:"
		head -n 5 "$OUT/walk.kernel.$1"
		bad=1
	fi
	return "$bad"
}

compile || exit 1
make_host_image || exit 1
rate=$(bare --rm -v "$built:$built:ro" -- "$built/share" --calibrate | jq .iters_per_us) || exit 1
echo "seed $seed"
check 'raw calls at random' beside raw $((290 * scale / 100))
check 'CUDA at random' beside cuda $((230 * scale / 100))

echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
