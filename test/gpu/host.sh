# Sourced by checks.sh, memory.sh, micro.sh, calls.sh, shares.sh, soak.sh and upgrade.sh on a private node: an image `host` whose container
# has the machine's own userland (CUDA programs, PyTorch), and the compiled workloads. On the simulated driver, where scripts are tried
# without a GPU, one program stands in for all of these (workloads/standin.py).
#   vgpu SIZE [docker options] -- COMMAND…     a container on a vGPU of SIZE
#   bare [docker options] -- COMMAND…          the same with the whole card, started by runc
# shellcheck shell=bash

workloads=$(cd "$(dirname "${BASH_SOURCE[0]}")/workloads" && pwd)
built=/opt/cgpu-workloads
python=$(command -v python3)
if [[ ${CGPU_TEST_DRIVER:-} == sim ]]; then
	built=${CGPU_NODE:?run on a private node}/opt/workloads
	python=/usr/bin/python3 # containers have /usr
fi

# compile [NAME…]: those workloads; none named: all but graphics.sh's, which it builds with their libraries.
compile() {
	local name
	mkdir -p "$built"
	cp "$workloads"/*.py "$built"/
	if [[ ${CGPU_TEST_DRIVER:-} == sim ]]; then
		cp "$CGPU_BIN/cgpu-probe" "$built"/
		for name in share latency steady managed fill models.py; do cp "$workloads/standin.py" "$built/$name"; done
		return
	fi
	if [[ $# -eq 0 ]]; then
		# shellcheck disable=SC2046 # no name has a space
		set -- $(basename -s .cu "$workloads"/*.cu | grep -vx nvjpeg)
	fi
	for name in "$@"; do
		nvcc -O2 -arch=sm_90 -cudart static -L/usr/local/cuda/lib64/stubs -o "$built/$name" "$workloads/$name.cu" -lcuda &
	done
	wait
	for name in "$@"; do
		[[ -x $built/$name ]] || { echo "host: nvcc did not build $name.cu" >&2; return 1; }
	done
}

make_host_image() {
	local root name
	root=$(mktemp -d)
	mkdir -p "$root"/{dev,proc,sys,tmp,run,usr,opt,root,var/tmp,mnt}
	chmod 755 "$root" # mktemp made it for root alone
	chmod 1777 "$root/tmp"
	cp -a /etc "$root/etc"
	for name in bin sbin lib lib32 lib64; do
		if [[ -L /$name ]]; then cp -a "/$name" "$root/$name"; else mkdir -p "$root/$name"; fi
	done
	tar -C "$root" -c . | docker import --change "ENV PATH=$(dirname "$python"):/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin" - host >/dev/null
	rm -rf "$root"
}

# Read-write on purpose: mount points for driver files that the machine keeps elsewhere are made below /usr.
host_options=(--network none -v /usr:/usr -v /opt:/opt)
[[ $built == /opt/* ]] || host_options+=(-v "${built%/*}:${built%/*}")
for name in bin sbin lib lib32 lib64; do
	[[ -L /$name || ! -d /$name ]] || host_options+=(-v "/$name:/$name:ro")
done

# split at --: sets options and command
split() {
	options=()
	while [[ $# -gt 0 && $1 != -- ]]; do
		options+=("$1")
		shift
	done
	shift
	command=("$@")
}

vgpu() {
	local size=$1 options command
	shift
	[[ ${CGPU_TEST_DRIVER:-} != sim ]] || size=512MiB # of a card of 15 GiB
	split "$@"
	docker run --runtime cgpu "${host_options[@]}" -e ALIYUN_COM_GPU_MEM_CONTAINER="$size" -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 \
		"${options[@]}" host "${command[@]}"
}

bare() {
	local options command nodes=() node
	split "$@"
	for node in /dev/nvidia[0-9]* /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-uvm-tools; do
		[[ -c $node ]] && nodes+=(--device "$node")
	done
	docker run --runtime runc "${host_options[@]}" "${nodes[@]}" "${options[@]}" host "${command[@]}"
}

# mps: bare, with the driver's MPS server between mps_start and mps_stop. Compute mode stays as it is.
mps_folder=/tmp/cgpu-mps
mps() {
	local options command
	split "$@"
	bare --ipc host -v "$mps_folder:$mps_folder" -e CUDA_MPS_PIPE_DIRECTORY="$mps_folder" "${options[@]}" -- "${command[@]}"
}
mps_control() { CUDA_MPS_PIPE_DIRECTORY=$mps_folder CUDA_MPS_LOG_DIRECTORY=$mps_folder nvidia-cuda-mps-control "$@"; }
mps_start() {
	mkdir -p "$mps_folder"
	mps_control -d </dev/null >"$mps_folder/start.log" 2>&1 || { cat "$mps_folder/start.log"; return 1; }
}
mps_stop() { echo quit | mps_control >/dev/null; }

# Of checks.sh and memory.sh, which set log.
passed=0 failed=0
# check NAME COMMAND…: the command's output goes to the log and, when it fails, to the terminal.
check() {
	local name=$1 out status begin=$SECONDS
	shift
	[[ -z ${ONLY:-} || $name =~ $ONLY ]] || return 0
	out=$("$@" 2>&1)
	status=$?
	printf '=== %s: exit %d, %d s\n%s\n' "$name" "$status" $((SECONDS - begin)) "$out" >>"${log:?}"
	if [[ $status -eq 0 ]]; then
		passed=$((passed + 1))
		printf 'ok    %s: %s\n' "$name" "$(tail -n 1 <<<"$out" | cut -c 1-140)"
	else
		failed=$((failed + 1))
		printf 'FAIL  %s (exit %d)\n' "$name" "$status"
		tail -n 12 <<<"$out" | sed 's/^/      /'
	fi
}

# number KEY: the number behind KEY in standard input.
number() { grep -oE "\b$1 [0-9]+" | head -n 1 | awk '{print $2}'; }
# near VALUE WANT SLACK
near() {
	if [[ -z $1 ]] || (($1 > $2 + $3 || $1 < $2 - $3)); then
		echo "got '$1', want $2 ± $3"
		return 1
	fi
}
wait_log() { # wait_log CONTAINER TEXT
	local i
	for ((i = 0; i < 300; i++)); do
		docker logs "$1" 2>&1 | grep -q "$2" && return
		sleep 0.2
	done
	docker logs "$1"
	return 1
}
remove() { docker rm -f "$@" >/dev/null 2>&1; }
