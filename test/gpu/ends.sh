#!/usr/bin/env bash
# Programs that end in the middle of their work, a hundred and more, in every way in which programs end: a neighbour must wait no longer than
# beside the same on the bare GPU, and the kernel log must stay empty, but for what the driver alone does: that its list of switch
# records ran full is said and counted (docs/troubleshooting.md). Run by run.sh on a private node; 150 s. The last line is
# "gpu: N passed, M failed". Beside them a program waits for each of its kernels of 1 ms; its worst turnarounds are printed, in microseconds.
#   SCALE=PERCENT   how long it takes (default 100)
#   KINDS=REGEX     the kinds of ends that match
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/ends.log
: >"$log"
lanes=2 # so many programs at once
seed=${SEED:-$RANDOM}

# Kinds of ends, with how long each goes on: on the vGPU, and bare. The guard kills only programs that have a limit.
kinds=(
	'alone 4 4'      # nobody ends: what the neighbour sees beside the load as such
	'killed 16 7'    # kill -9 of the process inside
	'exited 16 7'    # its main returns, with kernels queued behind
	'exception 12 6' # a kernel ends in a hardware exception
	'dying 7 4'      # kill -9 while it does
	'kill 11 6'      # docker kill
	'remove 11 6'    # docker rm -f
	'managed 9 0'    # killed by the guard for managed memory beyond the limit
)
# What the kernel may log of the driver, as a regular expression: what the first client of a container logs (docs/troubleshooting.md).
allowed='device\.c:'
# The driver's list of switch records ran full, while somebody held its lock.
full='FECS Exception: Logging error 0x2'

load=(--seconds 60 --ramp-ms 10 --kernel-us 1200)
# Inside a container: programs end until a time, at random moments. Prints their number.
# shellcheck disable=SC2016 # the container's shell expands
inside='
	kind=$1 until=$2 RANDOM=$3 built=$4 rate=$5 n=0
	exceptions=(trap breakpoint misaligned address stack shared local assert)
	load="--seconds 60 --ramp-ms 10 --kernel-us 1200 --iters-per-us $rate"
	while (($(date +%s%3N) < until)); do
		case $kind in
		alone) timeout -s KILL 6 "$built/share" $load ;;
		killed) timeout -s KILL 0.$((650 + RANDOM % 300)) "$built/share" $load ;;
		exited) "$built/share" $load --seconds 0.$((10 + RANDOM % 20)) ;;
		exception) "$built/exceptions" "${exceptions[RANDOM % 8]}" ;;
		dying) timeout -s KILL 0.$((300 + RANDOM % 400)) "$built/exceptions" "${exceptions[RANDOM % 8]}" ;;
		managed) timeout 6 "$built/share" $load --managed-mib 8192 ;;
		esac >/dev/null 2>&1
		[[ $? -ne 137 && $kind == managed ]] || ((n++)) # else the guard did not kill it
	done
	echo "$n"'

# lane WAY KIND SECONDS LANE: lets programs end for so long
lane() {
	local way=$1 kind=$2 until=$(($(date +%s%3N) + $3 * 1000)) name=ends$4 n=0 start=() options=()
	RANDOM=$((seed + $4))
	[[ $way == bare ]] && start=(bare) || start=(vgpu 6GiB)
	case $kind in
	kill | remove)
		while (($(date +%s%3N) < until)); do
			"${start[@]}" -d --name "$name" -v "$built:$built:ro" -- "$built/share" "${load[@]}" --iters-per-us "$rate" >/dev/null || return
			sleep 0.$((700 + RANDOM % 300))
			if [[ $kind == kill ]]; then docker kill "$name" >/dev/null; fi
			remove "$name"
			((n++))
		done
		echo "$n"
		;;
	*)
		[[ $kind == managed ]] && options=(-e CGPU_LIMITER=off)
		"${start[@]}" --rm --name "$name" "${options[@]}" -e HOME=/tmp -v "$built:$built:ro" -- \
			bash -c "$inside" ends "$kind" "$until" "$((seed + $4))" "$built" "$rate"
		;;
	esac
}

# driver_log MARK: what the kernel has logged of the driver since a line, but what is allowed. All of it if that line is gone.
driver_log() {
	dmesg | MARK=$1 awk '$0 == ENVIRON["MARK"] { n = 0; seen = 1; next } { lines[n++] = $0 } END { for (i = 0; i < n; i++) print lines[i] }' |
		grep -E 'NVRM|nvidia|Xid' | grep -vE "$allowed"
}

# ends WAY: all kinds. Prints one line for each, "kind ends count p50 p99 max", to $OUT/ends.WAY; fails if the kernel logged anything else
# than that the list ran full, of which $OUT/full.WAY has "kind lines".
ends() {
	local way=$1 spec kind seconds number mark own lines bad=0 said before start=() pids
	[[ $way == bare ]] && start=(bare) || start=(vgpu 6GiB)
	said=$OUT/neighbour.$way
	: >"$OUT/ends.$way"
	: >"$OUT/full.$way"
	coproc neighbour { "${start[@]}" --rm -i --name waits -v "$built:$built:ro" -- "$built/latency" --stdin --think-ms 0 --work-us 1000 --iters-per-us "$rate" 2>&1 | tee "$said"; }
	for ((number = 0; number < 100; number++)); do
		grep -q ready "$said" 2>/dev/null && break
		sleep 0.1
	done
	for spec in "${kinds[@]}"; do
		read -r kind seconds number _ <<<"$spec"
		[[ $kind =~ ${KINDS:-} ]] || continue
		[[ $way == bare ]] && seconds=$number
		seconds=$((seconds * ${SCALE:-100} / 100))
		((seconds > 0)) || continue
		mark=$(dmesg | tail -n 1)
		before=$(grep -c final "$said")
		echo "--seconds $seconds" >&"${neighbour[1]}"
		pids=()
		for ((number = 0; number < lanes; number++)); do
			lane "$way" "$kind" $((seconds - 1)) "$number" >"$OUT/lane$number" 2>&1 &
			pids+=($!)
		done
		wait "${pids[@]}"
		for ((number = 0; number < 100; number++)); do
			(($(grep -c final "$said") > before)) && break
			sleep 0.1
		done
		printf '%s %s %s\n' "$kind" "$(cat "$OUT"/lane[0-9] | awk '/^[0-9]+$/ { n += $1 } END { print n + 0 }')" \
			"$(grep final "$said" | tail -n 1 | jq -r '[.count, .p50, .p99, .max] | join(" ")')" | tee -a "$OUT/ends.$way"
		if (($(grep -c final "$said") == before)); then
			echo "$kind: the neighbour did not finish"
			bad=1
		fi
		# A kernel's own exception is logged as with the driver alone; that of `address` is a fault at page 0.
		own=
		[[ $kind != exception && $kind != dying ]] || own='Xid .*: (13|43|31, .* faulted @ 0x0_00000000)'
		driver_log "$mark" >"$OUT/kernel.$way.$kind.all"
		lines=$(grep -c "$full" "$OUT/kernel.$way.$kind.all")
		echo "$kind $lines" >>"$OUT/full.$way"
		((lines == 0)) || echo "$kind: the list of switch records ran full: $lines lines"
		if grep -vE "$full${own:+|$own}" "$OUT/kernel.$way.$kind.all" >"$OUT/kernel.$way.$kind"; then
			echo "$kind: the kernel logged:"
			head -n 5 "$OUT/kernel.$way.$kind"
			[[ $way == bare ]] || bad=1
		fi
	done
	remove waits
	return "$bad"
}

enough() { # a hundred ends on the vGPU, some of each kind
	awk '$1 != "alone" && $2 < 2 { print $1, "ended", $2, "times"; bad = 1 } $1 != "alone" { n += $2 } END { print n, "ends"; exit bad || n < 100 }' "$OUT/ends.vgpu"
}
table() {
	echo 'kind: worst turnaround of 1 ms of work, µs (ends): bare, vGPU'
	awk 'NR == FNR { bare[$1] = $6 " (" $2 ")"; next } { print $1 ": " ($1 in bare ? bare[$1] : "-") ", " $6 " (" $2 ")" }' "$OUT/ends.bare" "$OUT/ends.vgpu"
	echo "lines of a full list of switch records: bare $(awk '{ n += $2 } END { print n + 0 }' "$OUT/full.bare"), vGPU $(awk '{ n += $2 } END { print n + 0 }' "$OUT/full.vgpu")"
}

compile || exit 1
make_host_image || exit 1
rate=$(bare --rm -v "$built:$built:ro" -- "$built/share" --calibrate | jq .iters_per_us) || exit 1
echo "seed $seed"
check 'ends with work in flight, bare' ends bare
check 'ends with work in flight, vGPU' ends vgpu
[[ ${KINDS:-} ]] || check 'a hundred of them' enough
table | tee -a "$log"

echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
