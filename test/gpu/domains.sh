#!/usr/bin/env bash
# Trust domains on a GPU (docs/space.md): members in runs, whose MPS server starts and ends by itself, strangers beside. As root, with the driver's own
# nvidia-cuda-mps-control; no engine. Leaves summary.txt and logs.tar.gz in $OUT.
#   CGPU_BIN=FOLDER OUT=FOLDER test/gpu/domains.sh
#   BUDGET=SECONDS   for all (130). Every step is bounded, and one that fails ends nothing.
#   DECODERS=N       how many are compared in the end (5)
#   KILLS=SECONDS    for how long programs of a domain are killed in the middle of their kernels, eight at a time (0: not)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:?set OUT to a folder for the logs}
: "${CGPU_BIN:?set CGPU_BIN to the folder of the programs}"
BUDGET=${BUDGET:-130}
DECODERS=${DECODERS:-5}
KILLS=${KILLS:-0}
uid=64123 other=64124 # nobody's
dir=$(mktemp -d /tmp/cgpu-domains.XXXXXX)
chmod 755 "$dir"
mkdir -p "$OUT" "$dir/run" "$dir/home"
chmod 777 "$dir/home"
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
# run FLAGS… -- COMMAND…: on a slice
run() {
	local flags=()
	while [[ $1 != -- ]]; do flags+=("$1") && shift; done
	shift
	cgpu run --gpu 0 --user "${as:-$uid:$uid}" "${flags[@]}" -- env HOME="$dir/home" PATH="$PATH" LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}" "$@"
}
member() { run --domain "$1" --memory "$2" -- "${@:3}"; } # member DOMAIN MEMORY COMMAND…
records() { # records EXPRESSION: of each server's record r
	python3 -c 'import json, sys
for r in json.load(open(sys.argv[1]))["records"]:
    if r.get("domainServer"): print(eval(sys.argv[2]))' "$dir/run/ledger.json" "$1"
}
pipes() { echo CUDA_MPS_PIPE_DIRECTORY="$(echo "$dir"/run/mps/*/"$1"/seats/1)"; }
stop_all() { pkill -KILL -U $uid,$other; sleep 0.5; }
finish() {
	stop_all
	sleep 1
	dmesg 2>/dev/null | grep -E 'NVRM|Xid' | tail -n 60 >"$dir/kernel.log"
	cp -r "$dir/run/log" "$dir/guards" 2>/dev/null
	cp "$dir"/run/events.jsonl "$dir" 2>/dev/null
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
nvcc -O2 -arch=sm_90 -cudart static -o "$dir/contexts" "$here/workloads/contexts.cu" -lcuda || say 'cannot build contexts.cu'
chmod 755 "$dir/mps" "$dir/contexts"
cp "$here"/workloads/{models,closedloop,oom}.py "$dir/"
printf 'driver = "nvidia"\n' >"$dir/cgpu.toml"
export CGPU_RUN_DIR=$dir/run CGPU_CONFIG=$dir/cgpu.toml

member a 2GiB true >"$dir/none" 2>&1
show 'where domains are off: refused' "$dir/none" 3
printf 'driver = "nvidia"\ndomains = [{name = "a"}, {name = "b"}, {name = "c"}]\n' >"$dir/cgpu.toml"
cgpu refresh >/dev/null 2>&1
card 'before a server'
begin=$(date +%s%N)
member a 1GiB true >"$dir/first" 2>&1
say "the first member of a domain, its program true: $((($(date +%s%N) - begin) / 1000000)) ms"
show 'and what it said' "$dir/first" 3
begin=$(date +%s%N)
member a 1GiB true >"$dir/first" 2>&1
say "the second: $((($(date +%s%N) - begin) / 1000000)) ms"
card 'with a server'
as=0:0 member a 4GiB "$dir/mps" context limit malloc:64 fill:256 fill:2 managed:64 host:64 launch:100 free >"$dir/a1" 2>&1
show "root's member of 4 GiB" "$dir/a1"
sleep 0.5
card 'when its first member has ended'
member a 2GiB "$dir/mps" context loop:6 >"$dir/a2" 2>&1 &
as=$other:$other member a 3GiB "$dir/mps" context fill:2 loop:4 >"$dir/a3" 2>&1 &
run --memory 4GiB -- "$dir/mps" context fill:2 loop:4 >"$dir/s1" 2>&1 &
sleep 3.5
card 'with two members and a stranger'
cgpu smi >"$dir/smi" 2>&1
show 'cgpu smi meanwhile' "$dir/smi" 12
sleep 3
show 'member of 2 GiB' "$dir/a2"
show "another user's member of 3 GiB" "$dir/a3"
show 'a stranger beside them' "$dir/s1"
most=25 member a 3GiB python3 "$dir/oom.py" >"$dir/oom" 2>&1
show 'PyTorch in a member of 3 GiB' "$dir/oom" 6

# Memory beyond the limit, and memory of another process: of the container, and of another member.
run --domain a --memory 2GiB --spill 2GiB -- "$dir/mps" context fill:64 managed:3000 free >"$dir/spill" 2>&1
show 'a member of 2 GiB with a spill of 2 GiB' "$dir/spill" 5
member a 2GiB sh -c "'$dir/mps' context malloc:64 share:'$dir/home/ipc' sleep:4 >'$dir/home/ipc.said' & sleep 1; '$dir/mps' context borrow:'$dir/home/ipc' & sleep 2.5" \
	>"$dir/ipc1" 2>&1 &
sleep 1.5
member a 2GiB "$dir/mps" context borrow:"$dir/home/ipc" >"$dir/ipc2" 2>&1
wait $!
show 'CUDA IPC within a member' "$dir/ipc1" 2
show 'CUDA IPC from another member' "$dir/ipc2" 2
member a 4GiB "$dir/contexts" >"$dir/contexts.said" 2>&1
show "a member's contexts, one after the other" "$dir/contexts.said" 3
run --memory 2GiB -- "$dir/mps" context loop:6 >"$dir/latency" 2>&1 &
within 5 grep -q right "$dir/latency"
member a 4GiB "$dir/contexts" 4 2 >"$dir/contexts.long" 2>&1
wait $!
show "a long kernel in a member's last context" "$dir/contexts.long" 3
show 'a stranger beside it: no wait as long as the kernel' "$dir/latency" 8

# A part of the multiprocessors, changed while the member runs.
run --domain a --memory 2GiB --threads 30 --name parts -- sh -c "'$dir/mps' context limit; touch '$dir/home/parts'; sleep 1; '$dir/mps' context limit" \
	>"$dir/parts" 2>&1 &
within 10 test -e "$dir/home/parts"
cgpu set parts --threads 60 >>"$dir/parts" 2>&1
wait $!
show 'a member with 30 %, then 60 %' <(grep -E 'limit|threads' "$dir/parts") 6

# Who is not of the domain has its pipes, and gets nothing.
run --memory 4GiB -- "$(pipes a)" "$dir/mps" context >"$dir/x1" 2>&1
show 'a stranger with the pipes of a' "$dir/x1" 3
member b 2GiB "$(pipes a)" "$dir/mps" context >"$dir/x2" 2>&1
show 'a member of b with the pipes of a: refused a context of its own' "$dir/x2" 3
member b 2GiB env -u CUDA_MPS_PIPE_DIRECTORY "$dir/mps" context >"$dir/x3" 2>&1
show 'a member without the variable: the same' "$dir/x3" 3
member b 2GiB "$dir/mps" context launch:10 >"$dir/b1" 2>&1
show 'and with its own' "$dir/b1" 3
member a 2GiB sh -c 'echo quit | timeout 5 nvidia-cuda-mps-control; ls /run/cgpu/mps' >"$dir/quit" 2>&1
show 'a member says quit' "$dir/quit" 3

# Ends, beside a neighbour of the same domain, one of another, and a stranger.
beside() { # beside NAME
	member a 2GiB "$dir/mps" context loop:5 >"$dir/$1.a" 2>&1 &
	member b 2GiB "$dir/mps" context loop:5 >"$dir/$1.b" 2>&1 &
	run --memory 2GiB -- "$dir/mps" context loop:5 >"$dir/$1.s" 2>&1 &
}
after() { # after TITLE NAME
	begin=$(date +%s%N)
	member a 2GiB "$dir/mps" context launch:10 >"$dir/$2.n" 2>&1
	say "--- $1; the domain's next member had all done after $((($(date +%s%N) - begin) / 1000000)) ms"
	show 'the next' "$dir/$2.n" 2
	sleep 3.5
	show 'the neighbour' "$dir/$2.a" 3
	show 'one of another domain' "$dir/$2.b" 2
	show 'a stranger' "$dir/$2.s" 2
}
beside ended
run --domain a --memory 2GiB --name ended -- "$dir/mps" context long:20 sleep:20 >"$dir/ended.x" 2>&1 &
within 10 grep -q launched "$dir/ended.x"
within 10 grep -q right "$dir/ended.a"
cgpu domain-end ended >"$dir/ended.said" 2>&1 || show 'the server does not end it' "$dir/ended.said" 2
kill -KILL "$(awk '$1 == "pid" {print $2; exit}' "$dir/ended.x")"
after 'ended in the middle of a kernel by the server, then SIGKILL' ended
beside kill
member a 2GiB "$dir/mps" context long:20 >"$dir/kill.x" 2>&1 &
within 10 grep -q launched "$dir/kill.x"
within 10 grep -q right "$dir/kill.a"
kill -KILL "$(awk '$1 == "pid" {print $2; exit}' "$dir/kill.x")"
after 'SIGKILL in the middle of a kernel' kill
beside init
within 10 grep -q right "$dir/init.a"
kill -KILL "$(records 'r["initPid"] if r["domain"] == "a" else ""' | grep -m 1 .)"
after "SIGKILL of the server's first process" init
if (($(left) > 70)); then
	beside guard
	within 10 grep -q right "$dir/guard.a"
	kill -KILL "$(records 'r["guardPid"] if r["domain"] == "a" else ""' | grep -m 1 .)"
	after "SIGKILL of the server's guard" guard
fi
stop_all

# Many ends in the middle of kernels, beside another domain and a stranger that check their results.
killing() { # killing N: one program after the other, for KILLS seconds
	# shellcheck disable=SC2016 # the shell inside expands
	most=$((KILLS + 20)) member a 2GiB bash -c '
		end=$((SECONDS + $1)) out=$2 killed=0 all=0
		while ((SECONDS < end)); do
			"$3" context long:20 >"$out" 2>&1 &
			for ((i = 0; i < 250; i++)); do
				grep -q launched "$out" && killed=$((killed + 1)) && break
				kill -0 $! 2>/dev/null || break
				sleep 0.02
			done
			kill -KILL $! 2>/dev/null
			wait $! 2>/dev/null
			all=$((all + 1))
		done
		echo "killed $killed of $all"' killing "$KILLS" "$dir/home/killing.$1" "$dir/mps" >"$dir/killing.$1" 2>&1
}
if ((KILLS)); then
	most=$((KILLS + 20)) member b 2GiB "$dir/mps" context loop:"$KILLS" >"$dir/kills.b" 2>&1 &
	most=$((KILLS + 20)) run --memory 2GiB -- "$dir/mps" context loop:"$KILLS" >"$dir/kills.s" 2>&1 &
	others=($!)
	for i in {1..8}; do killing "$i" & others+=($!); done
	wait "${others[@]}"
	say "--- $KILLS s of kills: $(cat "$dir"/killing.[0-9]* | awk '/^killed/ {k += $2; n += $4} END {print k " in the middle of a kernel, of " n}')"
	tail -qn 1 "$dir"/killing.[0-9]* | sort | uniq -c | tail -n 4 | tee -a "$summary"
	member a 2GiB "$dir/mps" context launch:10 >"$dir/kills.n" 2>&1
	show 'the next of their domain' "$dir/kills.n" 2
	show 'another domain all the while' "$dir/kills.b" 2
	show 'a stranger all the while' "$dir/kills.s" 2
	cgpu smi >"$dir/smi" 2>&1
	show 'cgpu smi then' "$dir/smi" 12
fi

# Decoders: time sharing, a domain, bare MPS.
# decoders NAME COMMAND…: COMMAND N runs as the Nth
decoders() {
	local name=$1 at i
	shift
	at=$(($(date +%s) + 10))
	for ((i = 1; i <= DECODERS; i++)); do
		most=30 "$@" python3 "$dir/models.py" --model decoder --graph --start-at $at --seconds 4 >"$dir/$name.$i" 2>&1 &
	done
	within 20 test "$(date +%s)" -ge $((at + 5))
	while (($(date +%s) < at + 5)); do sleep 0.2; done
	say "$name: $(cat "$dir/$name".[0-9]* | grep -o '"count": [0-9.]*' | awk -v n="$DECODERS" '{s += $2} END {printf "%.0f tokens/s, %d of %d", s / 4, NR, n}')"
	cat "$dir/$name".[0-9]* | grep -vE '"count"' | tail -n 3 | cut -c 1-160 | sed 's/^/        /' | tee -a "$summary"
}
in_time() { run --memory 8GiB -- "$@"; }
in_domain() { member c 8GiB "$@"; }
in_bare() {
	timeout 30 setpriv --reuid=$uid --regid=$uid --clear-groups -- env HOME="$dir/home" CUDA_MPS_PIPE_DIRECTORY="$dir/bare" CUDA_MPS_LOG_DIRECTORY="$dir/bare" "$@"
}
if (($(left) > 16)); then decoders 'a domain' in_domain; fi
if (($(left) > 16)); then decoders 'time sharing' in_time; fi
if (($(left) > 16)); then
	mkdir "$dir/bare" && chown $uid:$uid "$dir/bare"
	in_bare nvidia-cuda-mps-control -d
	decoders 'bare MPS' in_bare
fi
stop_all
within 12 sh -c "! grep -q domainServer '$dir/run/ledger.json'"
say "servers left: $(grep -c domainServer "$dir/run/ledger.json")"
cgpu events >"$dir/events" 2>&1
show 'what events say of domains' <(grep -i 'domain' "$dir/events") 12
