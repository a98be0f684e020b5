#!/usr/bin/env bash
# Trust domains on a GPU (docs/space.md): an MPS server in a run of its own, members in others, strangers beside. As root, with the driver's own
# nvidia-cuda-mps-control; no engine. All run as one unprivileged user. Leaves summary.txt and logs.tar.gz in $OUT.
#   CGPU_BIN=FOLDER OUT=FOLDER test/gpu/domains.sh
#   BUDGET=SECONDS   for all (150). Every step is bounded, and one that fails ends nothing.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:?set OUT to a folder for the logs}
: "${CGPU_BIN:?set CGPU_BIN to the folder of the programs}"
BUDGET=${BUDGET:-150}
uid=64123 # nobody's
dir=$(mktemp -d /tmp/cgpu-domains.XXXXXX)
chmod 755 "$dir"
mkdir -p "$OUT" "$dir/run" "$dir/home"
chown "$uid:$uid" "$dir/home"
summary=$OUT/summary.txt
: >"$summary"
say() { printf '%s\n' "$*" | tee -a "$summary"; }
left() { echo $((BUDGET - SECONDS)); }
show() { # show TITLE FILE [LINES]
	say "--- $1 (at $SECONDS s)"
	tail -n "${3:-14}" "$2" | cut -c 1-200 | sed 's/^/        /' | tee -a "$summary"
}
card() { say "card: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader | head -n 1) $1"; }
within() {
	local end=$((SECONDS + $1))
	shift
	while ! "$@" >/dev/null 2>&1; do
		((SECONDS < end && $(left) > 0)) || return 1
		sleep 0.1
	done
}
cgpu() { timeout -k 2 "${most:-30}" "$CGPU_BIN/cgpu" "$@"; }
bare() { setpriv --reuid=$uid --regid=$uid --clear-groups -- env -i HOME="$dir/home" PATH="$PATH" LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}" "$@"; }
# run DOMAIN-FLAGS… -- COMMAND…: in a run on a slice
run() {
	local flags=()
	while [[ $1 != -- ]]; do flags+=("$1") && shift; done
	shift
	cgpu run --gpu 0 --user $uid:$uid "${flags[@]}" -- env HOME="$dir/home" PATH="$PATH" LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}" "$@"
}
pipes() { echo CUDA_MPS_PIPE_DIRECTORY="$dir/$1" CUDA_MPS_LOG_DIRECTORY="$dir/$1"; }
ctl() { # ctl DOMAIN COMMAND
	# shellcheck disable=SC2046,SC2016 # words, and the inner shell expands
	timeout 8 setpriv --reuid=$uid --regid=$uid --clear-groups -- env $(pipes "$1") sh -c 'echo "$0" | nvidia-cuda-mps-control' "$2"
}
folder() { mkdir -p "$dir/$1" && chmod 711 "$dir/$1" && chown $uid:$uid "$dir/$1"; }
# serve DOMAIN: its server, ready
serve() {
	folder "$1"
	# shellcheck disable=SC2046
	most=$BUDGET run --domain-server "$1" --memory 512MiB --no-limiter -- $(pipes "$1") nvidia-cuda-mps-control -f >"$dir/$1.daemon" 2>&1 &
	within 15 test -S "$dir/$1/control" || { show "server of $1" "$dir/$1.daemon"; return 1; }
	ctl "$1" "start_server -uid $uid" >/dev/null 2>&1
	within 15 sh -c "echo get_server_list | CUDA_MPS_PIPE_DIRECTORY=$dir/$1 nvidia-cuda-mps-control | grep -q [0-9]"
}
member() { # member DOMAIN MEMORY COMMAND…
	# shellcheck disable=SC2046
	run --domain "$1" --memory "$2" -- $(pipes "$1") "${@:3}"
}
stop_all() {
	local p
	for p in /proc/[0-9]*; do
		[[ $(stat -c %u "$p" 2>/dev/null) == "$uid" ]] && kill -KILL "${p#/proc/}" 2>/dev/null
	done
	return 0
}
finish() {
	stop_all
	sleep 1
	dmesg 2>/dev/null | grep -E 'NVRM|Xid' | tail -n 60 >"$dir/kernel.log"
	cp -r "$dir/run/log" "$dir/guards" 2>/dev/null
	show 'what guards said' <(cat "$dir"/guards/*.log 2>/dev/null | grep -oE 'msg="?(denied|refused|cannot|the ).*' | sort | uniq -c | sort -rn) 40
	tar -C "$dir" --exclude=./run --exclude=./mps --exclude=./home -czf "$OUT/logs.tar.gz" .
	say "at the end: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader | head -n 1); $SECONDS s in all"
	rm -rf "$dir"
}
trap finish EXIT
trap 'exit 130' INT TERM
{ sleep $((BUDGET + 10)) && kill "$$"; } >/dev/null 2>&1 &

say "$(date -u '+%F %T') $(nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader | head -n 1) $("$CGPU_BIN/cgpu" --version 2>/dev/null)"
nvcc -O2 -arch=sm_90 -cudart static -o "$dir/mps" "$here/workloads/mps.cu" || { say 'cannot build mps.cu'; exit 1; }
chmod 755 "$dir/mps"
cp "$here"/workloads/{models,closedloop}.py "$dir/"
printf 'driver = "nvidia"\ndomains = true\n' >"$dir/cgpu.toml"
export CGPU_RUN_DIR=$dir/run CGPU_CONFIG=$dir/cgpu.toml

member nobody 2GiB "$dir/mps" context >"$dir/none" 2>&1
show 'a member before there is a server: refused' "$dir/none" 3
card 'before a server'
serve a || exit 1
card 'with a server'
member a 4GiB "$dir/mps" context limit malloc:64 fill:256 fill:2 managed:64 host:64 launch:100 free >"$dir/a1" 2>&1
show 'a member of 4 GiB, with the limiter' "$dir/a1"
sleep 0.5
card 'when its first member has ended'
cgpu smi >"$dir/smi" 2>&1
show 'cgpu smi then' "$dir/smi" 6
member a 2GiB "$dir/mps" context loop:6 >"$dir/a2" 2>&1 &
sleep 2.5
card 'with one member'
member a 3GiB "$dir/mps" context loop:4 >"$dir/a3" 2>&1 &
run --memory 4GiB -- "$dir/mps" context fill:2 loop:4 >"$dir/s1" 2>&1 &
sleep 2.5
card 'with two members and a stranger'
cgpu smi >"$dir/smi" 2>&1
show 'cgpu smi meanwhile' "$dir/smi" 12
sleep 1.2
cgpu smi >"$dir/smi" 2>&1
show 'and a second later' "$dir/smi" 5
nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv,noheader >"$dir/apps" 2>&1
show 'nvidia-smi' "$dir/apps"
sleep 3
show 'member of 2 GiB' "$dir/a2"
show 'member of 3 GiB' "$dir/a3"
show 'a stranger beside them' "$dir/s1"

# Who is not of the domain has its pipes, and gets nothing.
# shellcheck disable=SC2046
run --memory 4GiB -- $(pipes a) "$dir/mps" context >"$dir/x1" 2>&1
show 'a stranger with the pipes of a' "$dir/x1"
serve b
# shellcheck disable=SC2046
run --domain b --memory 2GiB -- $(pipes a) "$dir/mps" context >"$dir/x2" 2>&1
show 'a member of b with the pipes of a' "$dir/x2"
member b 2GiB "$dir/mps" context launch:10 >"$dir/b1" 2>&1
show 'and with its own' "$dir/b1"

# Ends, beside a neighbour of the same domain, one of another, and a stranger.
beside() { # beside NAME
	member a 2GiB "$dir/mps" context loop:6 >"$dir/$1.a" 2>&1 &
	member b 2GiB "$dir/mps" context loop:6 >"$dir/$1.b" 2>&1 &
	run --memory 2GiB -- "$dir/mps" context loop:6 >"$dir/$1.s" 2>&1 &
	member a 2GiB "$dir/mps" context long:20 >"$dir/$1.x" 2>&1 &
	within 10 grep -q launched "$dir/$1.x"
	within 10 grep -q right "$dir/$1.a"
}
after() {
	sleep 6
	show "$1: who ended" "$dir/$2.x" 4
	show 'the neighbour' "$dir/$2.a" 4
	show 'one of another domain' "$dir/$2.b" 3
	show 'a stranger' "$dir/$2.s" 3
	member a 2GiB "$dir/mps" context launch:10 >"$dir/$2.n" 2>&1
	show 'the next of the domain' "$dir/$2.n" 3
}
beside term
ctl a "terminate_client $(ctl a get_server_list | head -n 1) $(awk '$1 == "pid" {print $2; exit}' "$dir/term.x")" >"$dir/term" 2>&1
show 'terminate_client in the middle of a kernel' "$dir/term" 3
after terminate_client term
beside kill
kill -KILL "$(awk '$1 == "pid" {print $2; exit}' "$dir/kill.x")"
after SIGKILL kill
stop_all
sleep 2

# Two decoders: bare MPS, a domain, time sharing.
# decoders NAME COMMAND…: COMMAND N runs as the Nth
decoders() {
	local name=$1 at i
	shift
	at=$(($(date +%s) + 9))
	for i in 1 2; do
		most=30 "$@" python3 "$dir/models.py" --model decoder --graph --start-at $at --seconds 4 >"$dir/$name.$i" 2>&1 &
	done
	sleep 14
	say "$name: $(cat "$dir/$name".[12] | grep -o '"count": [0-9.]*' | awk '{s += $2} END {printf "%.0f tokens/s, %d of 2", s / 4, NR}')"
}
in_time() { run --memory 8GiB -- "$@"; }
in_domain() { member c 8GiB "$@"; }
in_bare() {
	# shellcheck disable=SC2046
	timeout 30 setpriv --reuid=$uid --regid=$uid --clear-groups -- env HOME="$dir/home" $(pipes bare) "$@"
}
bare python3 -c 'import torch' >/dev/null 2>&1 # from the disk once
if (($(left) > 20)); then decoders 'time sharing' in_time; fi
if (($(left) > 20)); then serve c && decoders 'a domain' in_domain; fi
stop_all
if (($(left) > 20)); then
	folder bare
	# shellcheck disable=SC2046
	setpriv --reuid=$uid --regid=$uid --clear-groups -- env $(pipes bare) nvidia-cuda-mps-control -d
	decoders 'bare MPS' in_bare
fi
