#!/usr/bin/env bash
# A private node in one folder: dockerd, containerd, cgpu's configuration and run dir, an image. Nothing of it touches
# the machine's own Docker, containerd or /run/cgpu, and `down` takes everything away again.
#
#   node.sh up DIR       make the node; then `source DIR/env`
#   node.sh stop DIR     stop dockerd as a service manager would (SIGTERM); live containers stay (live-restore)
#   node.sh kill DIR     the same with SIGKILL
#   node.sh start DIR    start dockerd again
#   node.sh down DIR     remove containers, stop every process, unmount, delete DIR
#
# CGPU_TEST_DRIVER: sim (default) or nvidia. CGPU_BIN: folder of cgpu's binaries (default: bin/ of this checkout).
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
verb=${1:-}
dir=${2:-}
[[ $verb && $dir ]] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
bin=${CGPU_BIN:-$top/bin}
driver=${CGPU_TEST_DRIVER:-sim}

die() { echo "node: $*" >&2; exit 1; }

# wait_for SECONDS COMMAND…
wait_for() {
	local deadline=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		((SECONDS < deadline)) || return 1
		sleep 0.1
	done
}

# Processes of this node name its run dir in their environment (dockerd, containerd, shims, cgpu-sim) or among their open files (guards).
node_pids() {
	local p
	for p in /proc/[0-9]*; do
		[[ ${p#/proc/} == "$$" || ${p#/proc/} == "$BASHPID" || ${p#/proc/} == "$PPID" ]] && continue
		if grep -zqxF "CGPU_RUN_DIR=$dir/run" "$p/environ" 2>/dev/null ||
			[[ $(find "$p/fd" -lname "$dir/run/*" -print -quit 2>/dev/null) ]]; then
			echo "${p#/proc/}"
		fi
	done
}

write_files() {
	mkdir -p "$dir"/{run,docker,containerd,lab,image}
	{
		echo "driver = \"$driver\""
		echo "runtimes = [\"$dir/lab/runc\"]"
		echo 'guard_start_timeout = "1m"' # for a busy machine
		[[ $driver == sim ]] && cat <<-END
			[sim]
			driver_version = "580.159.04"
			[[sim.gpus]]
			name = "Tesla T4"
			memory = "15109MiB"
			[[sim.gpus]]
			name = "NVIDIA A10"
			memory = "23028MiB"
		END
	} >"$dir/cgpu.toml"
	cat >"$dir/docker/daemon.json" <<-END
		{
		  "data-root": "$dir/docker/data", "exec-root": "$dir/docker/exec", "pidfile": "$dir/docker/pid",
		  "hosts": ["unix://$dir/docker/sock"], "storage-driver": "vfs", "iptables": false, "bridge": "none",
		  "live-restore": true, "max-concurrent-downloads": 1,
		  "runtimes": {"cgpu": {"path": "$bin/cgpu-runtime"}}, "default-runtime": "cgpu"
		}
	END
	cat >"$dir/containerd/config.toml" <<-END
		version = 2
		root = "$dir/containerd/root"
		state = "$dir/containerd/state"
		disabled_plugins = ["io.containerd.grpc.v1.cri"]
		[grpc]
		  address = "$dir/containerd/sock"
	END
	"$top/hack/lab-runc.sh" "$dir/lab/runc"
	# crun refuses cgroup v1 with controllers in a v2 mount beside it, as some labs have it; this crun does not see the latter.
	local unified=/sys/fs/cgroup/unified
	if [[ -n $(cat "$unified/cgroup.controllers" 2>/dev/null) ]]; then
		cat >"$dir/lab/crun" <<-END
			#!/bin/sh
			exec unshare --mount sh -c 'umount $unified; exec "\$@"' sh $(command -v crun) "\$@"
		END
		chmod 755 "$dir/lab/crun"
	else
		ln -sfn "$(command -v crun)" "$dir/lab/crun"
	fi
	cat >"$dir/env" <<-END
		export CGPU_NODE='$dir' CGPU_RUN_DIR='$dir/run' CGPU_CONFIG='$dir/cgpu.toml' CGPU_BIN='$bin' CGPU_TEST_DRIVER='$driver'
		export DOCKER_HOST='unix://$dir/docker/sock' CONTAINERD_ADDRESS='$dir/containerd/sock' CONTAINERD_SNAPSHOTTER=native
		export PATH='$bin':"\$PATH"
		unset DOCKER_CONTEXT DOCKER_TLS_VERIFY
	END
}

start_docker() {
	setsid dockerd --config-file "$dir/docker/daemon.json" >>"$dir/docker/dockerd.log" 2>&1 </dev/null &
	wait_for 120 docker info || { tail -n 20 "$dir/docker/dockerd.log" >&2; die "dockerd did not start within 120 s"; }
}

stop_docker() {
	local pid
	pid=$(cat "$dir/docker/pid" 2>/dev/null) || return 0
	kill -"$1" "$pid" 2>/dev/null || return 0
	wait_for 120 gone "$pid" || die "dockerd ($pid) does not end"
	# A killed dockerd leaves its file behind and its containerd's, whose numbers may by then be another's or, where
	# nobody reaps orphans, a zombie's, which dockerd takes for a living containerd.
	rm -f "$dir/docker/pid"
	pid=$(cat "$dir/docker/exec/containerd/containerd.pid" 2>/dev/null) || return 0
	wait_for 60 gone "$pid" && rm -f "$dir/docker/exec/containerd/containerd.pid"
}
gone() { [[ ! -e /proc/$1 || $(awk '{print $3}' "/proc/$1/stat" 2>/dev/null) == Z ]]; }

start_containerd() {
	setsid containerd --config "$dir/containerd/config.toml" >>"$dir/containerd/containerd.log" 2>&1 </dev/null &
	wait_for 120 ctr version || { tail -n 20 "$dir/containerd/containerd.log" >&2; die "containerd did not start within 120 s"; }
}

# An image of busybox and cgpu-probe, for docker and for ctr, and an unpacked copy for runc and crun.
make_image() {
	local root=$dir/image/rootfs applet
	mkdir -p "$root"/{bin,dev,etc,proc,sys,root,tmp,usr/bin,usr/lib,usr/lib64,lib,lib64,var/tmp}
	chmod 1777 "$root/tmp"
	cp "$(command -v busybox)" "$root/bin/busybox"
	for applet in sh cat ls env id sleep echo kill mknod stat true false grep mount ps; do ln -sfn busybox "$root/bin/$applet"; done
	printf 'root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n' >"$root/etc/passwd"
	printf 'root:x:0:\nuser:x:1000:\n' >"$root/etc/group"
	cp "$bin/cgpu-probe" "$root/bin/cgpu-probe"
	cp "$bin/cgpu-probe" "$root/bin/cgpu-probe-setuid"
	chmod 4755 "$root/bin/cgpu-probe-setuid"
	# The probe that is linked with the C library needs that library and its loader, from this machine.
	if [[ -x $bin/cgpu-probe-libc ]]; then
		local file
		cp "$bin/cgpu-probe-libc" "$root/bin/cgpu-probe-libc"
		for file in $(ldd "$bin/cgpu-probe-libc" | grep -o '/[^ ]*'); do
			mkdir -p "$root/${file%/*}"
			cp -L "$file" "$root/$file"
		done
	fi
	tar -C "$root" --numeric-owner -cf "$dir/image/rootfs.tar" .
	docker import --change 'ENV PATH=/bin:/usr/bin' --change 'CMD ["sh"]' "$dir/image/rootfs.tar" probe >/dev/null
	docker save probe | ctr images import - >/dev/null
}

up() {
	local program
	for program in dockerd docker containerd ctr runc crun busybox jq; do
		command -v "$program" >/dev/null || die "$program is not in PATH: run hack/setup.sh"
	done
	[[ $(id -u) -eq 0 ]] || die "dockerd and runc need root: run as root"
	[[ -x $bin/cgpu-runtime ]] || die "$bin/cgpu-runtime is missing: run make build"
	write_files
	# shellcheck source=/dev/null
	source "$dir/env"
	start_docker
	start_containerd
	make_image
}

down() {
	if [[ -f $dir/env ]]; then
		# shellcheck source=/dev/null
		source "$dir/env"
		if docker info >/dev/null 2>&1; then
			docker ps -aq | xargs -r docker rm -f >/dev/null 2>&1 || true
		fi
		local c
		for c in $(ctr containers ls -q 2>/dev/null); do
			ctr tasks kill -s KILL "$c" >/dev/null 2>&1 || true
			ctr tasks rm -f "$c" >/dev/null 2>&1 || true
			ctr containers rm "$c" >/dev/null 2>&1 || true
		done
	fi
	stop_docker TERM || true
	local signal pid pids m
	for signal in TERM KILL; do
		mapfile -t pids < <(node_pids)
		for pid in "${pids[@]}"; do kill -"$signal" "$pid" 2>/dev/null || true; done
		for pid in "${pids[@]}"; do wait_for 5 gone "$pid" || true; done
	done
	# Deepest first; a mount that is left would make the rm below delete another's files.
	while read -r m; do umount "$m" 2>/dev/null || umount -l "$m"; done < <(awk -v d="$dir/" 'index($5, d) == 1 {print $5}' /proc/self/mountinfo | sort -r)
	rm -rf --one-file-system "$dir"
}

export CGPU_RUN_DIR=$dir/run CGPU_CONFIG=$dir/cgpu.toml
if [[ -f $dir/env && $verb != down ]]; then
	# shellcheck source=/dev/null
	source "$dir/env"
fi
case $verb in
up) up ;;
start) start_docker ;;
stop) stop_docker TERM ;;
kill) stop_docker KILL ;;
down)
	unset CGPU_RUN_DIR
	down
	;;
*) die "unknown verb $verb" ;;
esac
