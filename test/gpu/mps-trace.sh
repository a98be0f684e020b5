#!/usr/bin/env bash
# What an MPS server and its clients ask of the driver, and what they cannot under the guard (docs/internals/mps.md has the questions that
# this answers). As root, on a machine with a GPU and the driver's own nvidia-cuda-mps-control; no engine. All of MPS runs as an unprivileged
# user. Takes four minutes at most, never changes the compute mode, and leaves five files in $OUT: summary.txt, traces of each part, logs.
#   CGPU_BIN=FOLDER OUT=FOLDER test/gpu/mps-trace.sh [bare] [together] [apart]      (default: all)
#   bare       MPS without cgpu: memory of server and clients, what crosses between processes, limits, ends, who may command
#   together   server and client in one `cgpu run`, so under one guard
#   apart      the server in one, a client in another
# BUDGET=SECONDS   for all parts (190). Every step is bounded, and one that fails ends nothing.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:?set OUT to a folder for the logs}
BUDGET=${BUDGET:-190}
[[ $# -gt 0 ]] || set -- bare together apart
uid=64123 other=64124 # nobody's
dir=$(mktemp -d /tmp/cgpu-mps.XXXXXX)
chmod 755 "$dir"
mkdir -p "$OUT" "$dir/run"
summary=$OUT/summary.txt
: >"$summary"
part='' pipes='' traces='' deadline=$BUDGET most=60 become=''

say() { printf '%s\n' "$*" | tee -a "$summary"; }
left() { echo $((deadline - SECONDS)); }
# bounded COMMAND…: for $most seconds, and not past the part's time. In a background process it takes that one's place.
bounded() {
	local n
	n=$(left)
	((n < most)) || n=$most
	((n > 0)) || n=1
	$become timeout -k 2 "$n" "$@"
}
# step NAME SECONDS COMMAND…: the end of its output is in the summary, all of it in the log. What a function runs is bounded by itself. To a
# file, because a daemon that keeps a pipe open would be waited for.
step() {
	local name=$1 most=$2 status begin=$SECONDS
	shift 2
	(($(left) > 0)) || { say "--      $name: no time left"; return 1; }
	if declare -F "$1" >/dev/null; then "$@"; else bounded "$@"; fi >"$dir/out" 2>&1 </dev/null
	status=$?
	{ printf '=== %s: exit %d, %d s\n' "$name" "$status" $((SECONDS - begin)) && cat "$dir/out"; } >>"$dir/$part.log"
	say "exit $status  $name ($((SECONDS - begin)) s)"
	tail -n 12 "$dir/out" | cut -c 1-200 | sed 's/^/        /' | tee -a "$summary"
	return "$status"
}
# within SECONDS COMMAND…: until it succeeds
within() {
	local end=$((SECONDS + $1))
	shift
	while ! "$@" >/dev/null 2>&1; do
		((SECONDS < end && $(left) > 0)) || return 1
		sleep 0.1
	done
}
started=()
background() { # background LOG COMMAND…: its pid is in $last, and ends it
	(
		become='exec'
		"${@:2}"
	) >"$1" 2>&1 &
	last=$!
	started+=("$last")
}

# Of a part: a folder for the pipes, one for the traces, and the environment of MPS's programs.
begin_part() { # begin_part NAME SECONDS
	part=$1 deadline=$((SECONDS + $2))
	traces=$dir/$part.traces pipes=$dir/$part.pipes
	mkdir "$traces"
	chmod 1777 "$traces"
	new_pipes
	mps_environment=(CUDA_MPS_PIPE_DIRECTORY="$pipes" CUDA_MPS_LOG_DIRECTORY="$pipes" HOME="$pipes" PATH="$PATH"
		LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}")
	say "##### $part: $2 s"
}
new_pipes() {
	rm -rf "${pipes:?}"
	mkdir "$pipes"
	chmod 711 "$pipes"
	chown "$uid:$uid" "$pipes"
}
keep_logs() { mkdir -p "$dir/$part.mps" && cp "$pipes"/*.log "$dir/$part.mps/" 2>/dev/null; }
end_part() {
	keep_logs
	timeout 30 python3 "$here/rmtrace.py" "$traces" | tee "$dir/$part.txt" >>"$summary"
	tar -C "$traces" -czf "$OUT/$part-traces.tar.gz" .
}

as_user() { bounded setpriv --reuid="$1" --regid="$1" --clear-groups -- env -i "${mps_environment[@]}" "${@:2}"; }
traced() { as_user "$uid" LD_PRELOAD="$dir/rmtrace.so" RMTRACE="$traces" "$@"; }
client() { traced "$dir/mps" "$@"; }
pid_in() { awk '$1 == "pid" {print $2; exit}' "$1"; }
# shellcheck disable=SC2016 # the inner shell expands
ctl_as() { as_user "$1" timeout 8 sh -c 'echo "$0" | nvidia-cuda-mps-control' "$2"; }
ctl() { ctl_as "$uid" "$1"; }
server_pid() { ctl get_server_list 2>/dev/null | grep -xE '[0-9]+' | head -n 1; }
active() { ctl "get_server_status $(server_pid)" | grep -qi active; }
serve() { # a server that is ready; its pid is in $server
	within 15 active || { ctl "start_server -uid $uid" >/dev/null 2>&1 && within 15 active; }
	server=$(server_pid)
}
memory() {
	bounded nvidia-smi --query-gpu=memory.used,compute_mode --format=csv,noheader
	bounded nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv,noheader
}
# The daemons and servers that this script has started: nobody else is these users.
ours() {
	local p
	for p in /proc/[0-9]*; do
		[[ $(stat -c %u "$p" 2>/dev/null) == "$uid" && $(readlink "$p/exe") == */nvidia-cuda-mps-* ]] && echo "${p#/proc/}"
	done
}
none() { [[ ! $(ours) ]]; }
stop_mps() {
	local p
	none || ctl quit
	within 6 none || for p in $(ours); do kill -KILL "$p"; done
}
finish() {
	local p
	deadline=$((SECONDS + 20))
	for p in "${started[@]}" "$watchdog"; do kill "$p" 2>/dev/null; done
	stop_mps >/dev/null 2>&1
	dmesg 2>/dev/null | grep -E 'NVRM|Xid' | tail -n 200 >"$dir/kernel.log"
	cp -r "${CGPU_RUN_DIR:-$dir/run}/log" "$dir/guards" 2>/dev/null
	tar -C "$dir" --exclude='*.traces' --exclude='*.pipes' --exclude=./run --exclude='*.so' --exclude=./mps -czf "$OUT/logs.tar.gz" .
	say "at the end: $(memory | head -n 1); $SECONDS s in all"
	rm -rf "$dir"
}
trap finish EXIT
trap 'exit 130' INT TERM
{ sleep $((BUDGET + 10)) && kill "$$"; } >/dev/null 2>&1 & # whatever happens
watchdog=$!

bare() {
	local server a b
	step 'memory before' 10 memory
	step 'control daemon, unprivileged' 10 traced nvidia-cuda-mps-control -d || return
	step 'its folder' 5 ls -la "$pipes"
	step 'start_server' 10 ctl "start_server -uid $uid"
	serve
	step "server $server" 5 ctl "get_server_status $server"
	step 'memory with a server and no client' 10 memory

	# One client, with all that it can have; and the server while that stands still.
	background "$dir/bare.a" client context limit malloc:64 malloc:1024 managed:64 host:64 launch:100 touch:"$pipes/a1" wait:"$pipes/a2" \
		free sleep:0.2
	a=$last
	within 20 test -e "$pipes/a1"
	step 'memory with one client' 10 memory
	step 'clients, as the server lists them' 10 ctl ps
	step 'what the server has open' 5 ls -l "/proc/$server/fd"
	step 'and mapped' 5 grep -E 'nvidia|mps|shm|memfd' "/proc/$server/maps"
	touch "$pipes/a2"
	wait "$a"
	step 'that client' 5 cat "$dir/bare.a"
	step 'memory after it' 10 memory

	# Two that compute at once, one with a part of the threads, and CUDA IPC between them.
	background "$dir/bare.a" client context malloc:64 share:"$pipes/handle" touch:"$pipes/a3" loop:3 wait:"$pipes/b1" free
	a=$last
	within 20 test -e "$pipes/a3"
	background "$dir/bare.b" traced CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30 "$dir/mps" context limit borrow:"$pipes/handle" loop:2 touch:"$pipes/b1"
	b=$last
	wait "$a" "$b"
	step 'two at once: the first' 5 cat "$dir/bare.a"
	step 'the second, 30 %' 5 cat "$dir/bare.b"
	step 'a limit of 1 GiB' 20 traced CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G "$dir/mps" context malloc:64 fill:64 managed:64

	# What a container would need to have in common with the server: only the pipes?
	# shellcheck disable=SC2016 # the inner shell expands
	step 'a client with namespaces of its own: pid, ipc, net, uts, an empty /dev/shm' 20 unshare --pid --fork --ipc --net --uts --mount sh -c \
		'mount -t tmpfs none /dev/shm && mount -t proc proc /proc && exec "$@"' sh \
		setpriv --reuid="$uid" --regid="$uid" --clear-groups -- env "${mps_environment[@]}" LD_PRELOAD="$dir/rmtrace.so" RMTRACE="$traces" \
		"$dir/mps" context launch:10
	# Who may command? The pipe that a client needs is the one that commands come through.
	step 'a query by another user' 10 ctl_as "$other" get_server_list
	step 'a query by root' 10 ctl_as 0 get_server_list
	step 'a change by another user' 10 ctl_as "$other" 'set_default_active_thread_percentage 90'
	step 'was it made?' 10 ctl get_default_active_thread_percentage

	# Ends, each beside a neighbour that checks its results.
	serve
	background "$dir/bare.n" client context loop:40
	b=$last
	background "$dir/bare.a" client context long:30
	a=$last
	within 15 grep -q launched "$dir/bare.a"
	step 'terminate_client in the middle of a kernel' 15 ctl "terminate_client $server $(pid_in "$dir/bare.a")"
	within 5 grep -q '^long' "$dir/bare.a"
	step 'what that client saw' 5 cat "$dir/bare.a"
	kill "$a" 2>/dev/null
	step 'the neighbour' 5 tail -n 2 "$dir/bare.n"
	background "$dir/bare.a" client context long:3
	within 15 grep -q launched "$dir/bare.a" && kill -KILL "$(pid_in "$dir/bare.a")"
	wait "$last" 2>/dev/null
	step 'SIGKILL in the middle of a kernel: status then' 10 ctl "get_server_status $server"
	step 'a new client' 15 client context launch:10
	step 'status' 10 ctl "get_server_status $server"
	step 'the neighbour' 5 tail -n 2 "$dir/bare.n"
	kill "$b" 2>/dev/null
	wait "$b"
	step 'a new client, alone' 15 client context launch:10
	step 'memory' 10 memory

	# The server goes while a client computes.
	background "$dir/bare.a" client context loop:6
	a=$last
	within 15 grep -q right "$dir/bare.a"
	server=$(server_pid)
	[[ ! $server ]] || kill -KILL "$server"
	wait "$a"
	step 'a client whose server was killed' 5 cat "$dir/bare.a"
	step 'the next client' 20 client context launch:10

	# Who is not the server's user: last, because the daemon may end the server for him.
	step 'a client of another user' 15 as_user "$other" "$dir/mps" context launch:10
	step 'a client who is root' 15 as_user 0 "$dir/mps" context launch:10
	step 'servers after those' 10 ctl get_server_list
	step 'quit' 15 stop_mps
	step 'memory after it' 10 memory
	own_user
}

# A server that is no user of the host's, for clients who are root's. In a user namespace the server's user is 0 and root is 1: there a
# daemon can be for all users (-multiuser-server, which wants a superuser) without any privilege outside.
own_user() {
	local holder
	keep_logs
	new_pipes
	# shellcheck disable=SC2016 # the inner shell expands
	background "$dir/bare.own" as_user "$uid" unshare --user sh -c 'echo pid $$; until [ -e "$0" ]; do sleep 0.1; done
		nvidia-cuda-mps-control -d -multiuser-server; sleep 25' "$dir/go"
	within 5 grep -q pid "$dir/bare.own"
	holder=$(pid_in "$dir/bare.own")
	[[ $holder ]] || return
	printf '0 %d 1\n1 0 1\n' "$uid" >"$dir/map"
	cat "$dir/map" >"/proc/$holder/uid_map" # in one write
	cat "$dir/map" >"/proc/$holder/gid_map"
	touch "$dir/go"
	within 5 test -s "$pipes/nvidia-cuda-mps-control.pid"
	step 'in a user namespace, for all users: a client who is root' 15 as_user 0 LD_PRELOAD="$dir/rmtrace.so" RMTRACE="$traces" "$dir/mps" context launch:10
	step 'a client of another user' 15 as_user "$other" "$dir/mps" context launch:10
	step 'the daemon' 5 cat "$dir/bare.own"
	step 'its processes' 5 ps -o pid,user,args -u "$uid"
	step 'its log' 5 tail -n 20 "$pipes/control.log"
	kill "$last" 2>/dev/null
	step 'quit' 15 stop_mps
}

# run SIZE COMMAND…: on a slice, under a guard
run() {
	bounded "$CGPU_BIN/cgpu" run --gpu 0 --no-limiter --user "$uid:$uid" --memory "$1" -- env -i "${mps_environment[@]}" \
		LD_PRELOAD="$dir/rmtrace.so" RMTRACE="$traces" "${@:2}"
}
# said: what guards have refused until now
said() {
	grep -rhoE 'msg="?(denied|refused).*' "$CGPU_RUN_DIR/log" 2>/dev/null | sort | uniq -c | sort -rn | head -n 40
}
together() {
	cat >"$dir/inside.sh" <<-'INSIDE'
		nvidia-cuda-mps-control -d
		echo "start_server -uid $(id -u)" | timeout 10 nvidia-cuda-mps-control
		timeout 12 "$1/mps" context malloc:64 launch:10
		echo get_server_list | timeout 5 nvidia-cuda-mps-control
		tail -n 20 "$CUDA_MPS_LOG_DIRECTORY"/*.log
		echo quit | timeout 8 nvidia-cuda-mps-control
	INSIDE
	step 'server and client under one guard' 40 run 8GiB bash "$dir/inside.sh" "$dir"
	step 'what it refused' 5 said
	stop_mps >/dev/null 2>&1
}
apart() {
	local holder
	cat >"$dir/serve.sh" <<-'SERVE'
		nvidia-cuda-mps-control -d
		echo "start_server -uid $(id -u)" | timeout 10 nvidia-cuda-mps-control
		touch "$CUDA_MPS_PIPE_DIRECTORY/ready"
		for _ in $(seq 300); do
			[ ! -e "$CUDA_MPS_PIPE_DIRECTORY/over" ] || break
			sleep 0.1
		done
		tail -n 20 "$CUDA_MPS_LOG_DIRECTORY"/*.log
		echo quit | timeout 8 nvidia-cuda-mps-control
	SERVE
	background "$dir/apart.server" run 4GiB bash "$dir/serve.sh"
	holder=$last
	within 20 test -e "$pipes/ready"
	step 'a client under another guard' 20 run 8GiB "$dir/mps" context malloc:64 launch:10
	touch "$pipes/over"
	within 12 test ! -d "/proc/$holder" || kill "$holder"
	step 'the server' 5 cat "$dir/apart.server"
	step 'what the guards have refused' 5 said
	stop_mps >/dev/null 2>&1
}

say "$(date -u '+%F %T') $(timeout 20 nvidia-smi --query-gpu=name,driver_version,compute_mode --format=csv,noheader) $(uname -r)"
cc -O1 -shared -fPIC -o "$dir/rmtrace.so" "$here/workloads/rmtrace.c" -ldl || { say 'cannot build rmtrace.c'; exit 1; }
if [[ ${MPS_CLIENT:-} ]]; then # a program in its place, to try this script without a GPU
	cp "$MPS_CLIENT" "$dir/mps"
else
	nvcc -O2 -arch=sm_90 -cudart static -o "$dir/mps" "$here/workloads/mps.cu" || { say 'cannot build mps.cu'; exit 1; }
fi
chmod 755 "$dir/mps" "$dir/rmtrace.so"
if [[ -z ${CGPU_RUN_DIR:-} ]]; then
	echo 'driver = "nvidia"' >"$dir/cgpu.toml"
	export CGPU_RUN_DIR=$dir/run CGPU_CONFIG=$dir/cgpu.toml
fi
while [[ $# -gt 0 ]]; do
	seconds=$((BUDGET - SECONDS))
	case $1 in
	bare) (($# == 1)) || seconds=$((seconds * 6 / 10)) ;;
	together | apart)
		: "${CGPU_BIN:?set CGPU_BIN to the folder of the programs}"
		seconds=$((seconds / $#))
		;;
	*)
		say "mps-trace: unknown part $1"
		exit 2
		;;
	esac
	begin_part "$1" "$seconds"
	"$1"
	end_part
	shift
done
