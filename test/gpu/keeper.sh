#!/usr/bin/env bash
# Twelve containers whose programs allocate, map and free in loops, decode and use managed memory; every guard is killed with -9 once, at a
# random moment. Programs go on, or have been ended and a log says why; what they compute stays right; each container can begin a new
# context; accounts agree with the driver's. Run by run.sh on a private node; 100 s at most. Prints how long calls waited. The last line is
# "gpu: N passed, M failed".
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/keeper.log
: >"$log"
names=(steady{1..6} share{1..2} decoder{1..2} managed{1..2})
seconds=35
undecided='nobody can tell what came of it'

busy() { # busy NAME COMMAND…: a container that goes on when its program is over, so that others can begin in it
	local name=$1
	shift
	vgpu 5GiB -d --name "$name" -e HOME=/tmp -v "$built:$built:ro" -- sh -c '"$@"; echo "exit $?"; sleep 1000' - "$@" >/dev/null
}
begin_all() {
	local i
	for i in {1..6}; do busy "steady$i" "$built/steady" "$seconds" || return; done
	for i in 1 2; do busy "share$i" "$built/share" --seconds "$seconds" --iters-per-us 1 || return; done
	for i in 1 2; do busy "decoder$i" "$python" "$built/models.py" --model decoder --seconds "$seconds" || return; done
	for i in 1 2; do busy "managed$i" "$built/managed" 0.25 100 || return; done
}
ready() {
	local name
	for name in share{1..2} decoder{1..2}; do wait_log "$name" '"ready"' || return; done
}
# record NAME FIELD: of a container in the ledger
record() {
	jq -r --arg id "$(docker inspect -f '{{.Id}}' "$1")" --arg field "$2" '.records[] | select(.id == $id) | .[$field]' "$CGPU_RUN_DIR/ledger.json"
}
kill_all() {
	local name before now i bad=0
	for name in "${names[@]}"; do
		before=$(record "$name" guardPid)
		sleep "0.$((RANDOM % 1000))"
		kill -9 "$before" || bad=1
		for ((i = 0; i < 100; i++)); do
			now=$(record "$name" guardPid)
			[[ $now == "$before" ]] || break
			sleep 0.05
		done
		[[ $now != "$before" ]] || { echo "$name: nobody goes on in the place of guard $before"; bad=1; }
	done
	return "$bad"
}
new_contexts() {
	local name out bad=0
	for name in "${names[@]}"; do
		out=$(timeout 30 docker exec "$name" "$built/steady" 0.3 2>&1) || { echo "$name: $out"; bad=1; }
	done
	return "$bad"
}
guards_log() { cat "$CGPU_RUN_DIR"/log/*"$(record "$1" nonce)"*.log 2>/dev/null; }
# ended: of how many programs a guard's log says that it ended them
results() {
	local name bad=0 ended=0 text
	for name in "${names[@]}"; do
		wait_log "$name" '^exit ' || return
		text=$(docker logs "$name" 2>&1)
		if grep -q '^exit 0$' <<<"$text" && ! grep -qE 'wrong [1-9]|right 0|managed cudaError' <<<"$text"; then
			continue
		fi
		if guards_log "$name" | grep -q "$undecided"; then
			ended=$((ended + 1))
		else
			echo "$name: $(tail -n 3 <<<"$text")"
			bad=1
		fi
	done
	echo "$((${#names[@]} - ended)) of ${#names[@]} programs went on, $ended were ended and the log says why"
	return "$bad"
}
# accounts: what the driver says of each container's processes is what its account says, where nobody allocates meanwhile
accounts() {
	local name pid driver account bad=0 apps
	apps=$(nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits)
	for name in "${names[@]}"; do
		account=$(cgpu smi --json | jq --arg id "$(docker inspect -f '{{.Id}}' "$name")" '[.gpus[].vgpus[] | select(.id == $id) | .used_bytes] | add / 1048576 | round')
		driver=0
		for pid in $(docker top "$name" -o pid | tail -n +2); do
			driver=$((driver + $(awk -F', ' -v p="$pid" '$1 == p { n += $2 } END { print n + 0 }' <<<"$apps")))
		done
		echo "$name: account $account MiB, driver $driver MiB"
		case $name in
		share* | decoder*) ((account - driver <= 64 && driver - account <= 64)) || bad=1 ;;
		esac
	done
	return "$bad"
}
# empty: programs are over, and nothing is charged or held any more
empty() {
	local left
	left=$(cgpu smi --json | jq '[.gpus[].vgpus[].used_bytes] | add')
	echo "accounts of containers whose programs are over: $left bytes"
	[[ $left == 0 ]] && { [[ ${CGPU_TEST_DRIVER:-} == sim ]] || [[ -z $(nvidia-smi --query-compute-apps=pid --format=csv,noheader) ]]; }
}
stalls() {
	cat "$CGPU_RUN_DIR"/log/*.log | grep 'this one goes on' | grep -oE 'stall=[0-9.]+(ms|s|µs)' | sed -E 's/stall=//; s/µs/e-3/; s/ms//; s/([0-9])s$/\1e3/' |
		jq -s 'sort | "calls waited for \(length) guards: median \(.[length / 2 | floor]) ms, most \(.[-1]) ms"'
	grep -hE 'level=(ERROR|WARN)' "$CGPU_RUN_DIR"/log/*.log | sed -E 's/^time=[^ ]+ //; s/pid=[0-9]+//; s/stall=[^ ]+//' | sort | uniq -c | sort -rn | head -n 20
}

sed -i '1i keeper = true' "$CGPU_CONFIG"
compile steady share managed || exit 1
make_host_image || exit 1
check 'twelve busy containers begin' begin_all
check 'all compute' ready
check 'every guard is killed, and another one goes on' kill_all
[[ ${CGPU_TEST_DRIVER:-} == sim ]] || check 'accounts agree with the driver' accounts # by nvidia-smi
check 'each container begins a new context' new_contexts
check 'results' results
sleep 2
check 'nothing is left' empty
cat "$CGPU_RUN_DIR"/log/*.log >"$OUT/keeper.guards.log"
stalls | tee -a "$log"
remove "${names[@]}"

echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
