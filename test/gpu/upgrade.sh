#!/usr/bin/env bash
# Twenty busy containers whose guards become another program (cgpu upgrade) again and again: no call may fail, results stay right, the
# throughput stays what it is, and accounts agree with the driver's. Run by run.sh on a private node; 110 s at most. Where a call waited
# long, the table says for what, as far as the guard logs it: of each time on its line at a hand-over's end, median, nine tenths, most; and
# the lines of the longest whole. The last line is "gpu: N passed, M failed".
#   ROUNDS=N     how often all are upgraded (default 8)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/upgrade.log
: >"$log"
rounds=${ROUNDS:-8}
names=(steady{1..8} share{1..4} decoder{1..3} resnet{1..2} managed{1..3})

# busy NAME COMMAND…: a container that goes on until it is told to end
busy() {
	local name=$1
	shift
	vgpu 5GiB -d --name "$name" -e HOME=/tmp -v "$built:$built:ro" -- "$@" >/dev/null
}
begin_all() {
	local i
	for i in {1..8}; do busy "steady$i" "$built/steady" "$seconds" || return; done
	for i in {1..4}; do busy "share$i" "$built/share" --seconds "$seconds" --iters-per-us "$rate" || return; done
	for i in {1..3}; do busy "decoder$i" "$python" "$built/models.py" --model decoder --seconds "$seconds" || return; done
	for i in 1 2; do busy "resnet$i" "$python" "$built/models.py" --model resnet --seconds "$seconds" || return; done
	for i in {1..3}; do busy "managed$i" "$built/managed" 0.25 100000 || return; done
}
# work FROM TO: microseconds of the GPU that the share programs got between two times, for each second
work() {
	for name in share{1..4}; do docker logs "$name" 2>/dev/null; done |
		jq -rs --argjson from "$1" --argjson to "$2" '[.[] | select(.t and .t >= $from and .t < $to).done] | add / ($to - $from)'
}

# upgrades: all of them, again and again. Prints stalls.
upgrades() {
	local i bad=0
	for ((i = 0; i < rounds; i++)); do
		cgpu upgrade --all --program "$other$((i % 2))/cgpu-guard" -o json >"$told/$i.json" 2>"$told/$i.err" || bad=1
		jq -c '[.containers[] | select(.outcome != "upgraded") | {id: .id[:12], outcome, error}][:3][]' "$told/$i.json"
		cat "$told/$i.err"
		sleep 0.5
	done
	jq -s . "$told"/*.json >"$OUT/upgrade.json"
	jq -s '[.[].containers[] | .stall_seconds * 1e3] | sort | "stalls of \(length) hand-overs: median \(.[length / 2 | floor]) ms, p90 \(.[length * 0.9 | floor]) ms, max \(.[-1]) ms"' "$told"/*.json
	jq -s '[.[].containers[].tries] | "tries: \(add / length), at most \(max)"' "$told"/*.json
	return "$bad"
}
# stalls: what the guards log of their hand-overs, by part.
stalls() {
	cat "$CGPU_RUN_DIR"/log/*.log >"$OUT/upgrade.guards.log" 2>/dev/null
	"$python" - "$OUT/upgrade.guards.log" <<-'END'
		import re, sys
		units = {"ns": 1e-6, "µs": 1e-3, "us": 1e-3, "ms": 1, "s": 1e3, "m": 6e4}
		parts, lines = {}, []
		for line in open(sys.argv[1], errors="replace"):
		    if "this program goes on with the container" not in line:
		        continue
		    found = {}
		    for key, text in re.findall(r'(\w+)=((?:[\d.]+(?:ns|µs|us|ms|m|s))+)(?=\s|$)', line):
		        found[key] = sum(float(n) * units[u] for n, u in re.findall(r"([\d.]+)(ns|µs|us|ms|m|s)", text))
		        parts.setdefault(key, []).append(found[key])
		    lines.append((found.get("stall", 0), line.strip()))
		print("| part of %d hand-overs, ms | median | p90 | most |\n|---|---|---|---|" % len(lines))
		for key, values in sorted(parts.items(), key=lambda x: -max(x[1])):
		    values.sort()
		    print("| %s | %.2f | %.2f | %.2f |" % (key, values[len(values) // 2], values[len(values) * 9 // 10], values[-1]))
		for _, line in sorted(lines)[-3:]:
		    print(line)
	END
}
# accounts: what the driver says of each container's processes is what its account says; contexts' own memory is in both.
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
		share* | decoder* | resnet*) ((account - driver <= 64 && driver - account <= 64)) || bad=1 ;;
		esac # the others change meanwhile
	done
	return "$bad"
}
# results: everybody ends as if nothing had been
results() {
	local name code bad=0
	for name in "${names[@]}"; do
		case $name in
		managed*)
			docker logs "$name" >"$told/managed" 2>&1
			if [[ $(docker inspect -f '{{.State.Running}}' "$name") != true ]] || grep -qvE '^(managed cudaSuccess|right 1 .*|ordinary cudaSuccess)$' "$told/managed"; then
				echo "$name: $(docker inspect -f '{{.State.Status}} {{.State.ExitCode}}' "$name")"
				grep -vE '^(managed cudaSuccess|right 1 .*|ordinary cudaSuccess)$' "$told/managed" | head -n 3
				bad=1
			fi
			echo "$name: $(grep -c '^right 1' "$told/managed") rounds"
			;;
		*)
			code=$(timeout 60 docker wait "$name")
			echo "$name: exit $code: $(docker logs "$name" 2>&1 | tail -n 1 | cut -c 1-100)"
			[[ $code == 0 ]] || bad=1
			;;
		esac
	done
	return "$bad"
}
throughput() {
	echo "before, µs a second: $1; during: $2"
	awk -v a="$1" -v b="$2" 'BEGIN { printf "ratio %.4f\n", b / a; exit !(b >= 0.97 * a) }'
}

compile steady share managed || exit 1
make_host_image || exit 1
rate=$(bare --rm -v "$built:$built:ro" -- "$built/share" --calibrate | jq .iters_per_us) || exit 1
told=$(mktemp -d)
other=$(mktemp -d /tmp/cgpu-other.XXXXXX)
for i in 0 1; do mkdir "$other$i" && cp "$CGPU_BIN"/cgpu-* "$other$i"/; done
seconds=$((rounds * 2 + 40))
# ready: all that say when they begin have said it
ready() {
	local name
	for name in share{1..4} decoder{1..3} resnet{1..2}; do wait_log "$name" '"ready"' || return; done
}
check 'twenty busy containers begin' begin_all
check 'all compute' ready
sleep 2
from=$(date +%s.%N)
sleep 6
to=$(date +%s.%N)
check 'all are upgraded again and again' upgrades
end=$(date +%s.%N)
sleep 0.5 # the last lines of the logs
parts=$(stalls)
[[ ${CGPU_TEST_DRIVER:-} == sim ]] || check 'accounts agree with the driver' accounts # by nvidia-smi
before=$(work "$from" "$to") during=$(work "$to" "$end")
check 'throughput' throughput "$before" "$during"
check 'results' results
grep -A 40 'all are upgraded' "$log" | head -n 12
echo "$parts"
for pid in $(jq -r '.records[].guardPid' "$CGPU_RUN_DIR/ledger.json" | head -n 3); do # of those with managed memory
	descriptors=("/proc/$pid/fd"/*)
	echo "guard $pid: ${#descriptors[@]} descriptors, $(awk '/VmRSS/ {print $2}' "/proc/$pid/status") KiB"
done
remove "${names[@]}"
rm -rf "$told" "$other" "$other"0 "$other"1

echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
