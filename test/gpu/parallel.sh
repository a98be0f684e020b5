#!/usr/bin/env bash
# On a machine with several GPUs: run.sh for each argument, all at once, each with GPUs of its own that its processes alone see. As root.
#   test/gpu/parallel.sh 'GPUS [NAME=VALUE]… PART… [; [NAME=VALUE]… PART…]…' …
#   test/gpu/parallel.sh '0 checks' '1 ONLY=^many.cgpu shares ; exporter' '2,3 peers'
# A part with a slash is a command of its own. What the N-th one prints goes to $OUT/N.txt, its other files to $OUT/N.tar.gz. The driver and
# its locks are one for all: no figure of less than a millisecond is to be taken from such a run.
#   LIMIT=SECONDS   when all is over (default 560)
set -euo pipefail
cd "$(dirname "$0")/../.."

# alone GPUS COMMAND…: in a mount namespace whose /dev has only those GPUs, and whose folders that run.sh and the node use are its own
# shellcheck disable=SC2016 # the shell inside expands
alone() {
	unshare --mount bash -euc '
		gpus=,$1, dev=$(mktemp -d)
		exec {here}<"$PWD" {out}<"$OUT" # they may be in /tmp
		shift
		mount -t tmpfs -o mode=755 dev "$dev"
		for path in /dev/*; do
			name=${path##*/}
			if [[ -L $path ]]; then
				cp -P "$path" "$dev/$name"
			elif [[ -d $path ]]; then
				mkdir "$dev/$name"
				mount --rbind "$path" "$dev/$name"
			elif [[ ! $name =~ ^nvidia[0-9]+$ || $gpus == *,${name#nvidia},* ]]; then
				touch "$dev/$name"
				mount --bind "$path" "$dev/$name"
			fi
		done
		mount -o remount,ro "$dev" # NVML makes the nodes of all GPUs again
		mount --rbind "$dev" /dev
		for dir in /tmp /opt/cgpu /opt/cgpu-engines /opt/cgpu-graphics /opt/cgpu-workloads; do
			mkdir -p "$dir"
			mount -t tmpfs -o mode=1777 own "$dir"
		done
		mkdir -p "$PWD" "$OUT"
		mount -c --rbind "/proc/self/fd/$here" "$PWD"
		mount -c --bind "/proc/self/fd/$out" "$OUT"
		exec {here}<&- {out}<&-
		cd "$PWD"
		exec timeout -k 20 "${LIMIT:-560}" "$@"' alone "$@"
}

# stream OUT WORD…: what is before each ';' is for one run.sh, settings first
stream() {
	local out=$1 status=0 settings parts
	shift
	while (($# > 0)); do
		settings=(OUT="$out") parts=()
		while (($# > 0)) && [[ $1 != ';' ]]; do
			if [[ $1 == *=* ]]; then settings+=("$1"); else parts+=("$1"); fi
			shift
		done
		shift || true
		[[ ${parts[0]} == */* ]] || parts=(test/gpu/run.sh "${parts[@]}")
		env "${settings[@]}" "${parts[@]}" || status=1
	done
	return "$status"
}
if [[ ${1:-} == --stream ]]; then
	stream "${@:2}"
	exit
fi

: "${OUT:?set OUT to a folder for the logs}"
pids=() status=0 n=0
for argument in "$@"; do
	n=$((n + 1))
	read -ra words <<<"$argument"
	mkdir -p "$OUT/$n"
	alone "${words[0]}" test/gpu/parallel.sh --stream "$OUT/$n" "${words[@]:1}" >"$OUT/$n.txt" 2>&1 &
	pids+=($!)
	((n > 1)) || sleep 6 # the first adds to the machine the libraries that run.sh brings
done
for n in "${!pids[@]}"; do
	wait "${pids[n]}" || { status=1; echo "parallel: $((n + 1)) failed"; }
done
for n in "${!pids[@]}"; do
	echo "== $((n + 1))" && tail -n 25 "$OUT/$((n + 1)).txt"
	tar -C "$OUT/$((n + 1))" -czf "$OUT/$((n + 1)).tar.gz" . && rm -rf "${OUT:?}/$((n + 1))"
done
exit "$status"
