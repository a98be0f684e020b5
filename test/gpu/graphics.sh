#!/usr/bin/env bash
# Vulkan, EGL, OpenCL, NVDEC and NVJPEG (workloads/*.c, packed by pack.sh with their loaders), each bare and then on a vGPU of 6 GiB of a node
# with graphics = true: the result, the limit, the share of the time, what a neighbour sees beside long draws. What works bare must work
# there. Run by run.sh on a private node; 120 s. Of what fails the
# guard's refusals and the calls that the driver answered otherwise than bare (workloads/rmtrace.c) are printed; all calls are in
# $OUT/graphics-*.calls. The last line is "gpu: N passed, M failed".
#   ONLY=REGEX   the checks whose names match
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
log=${OUT:?set OUT to a folder for the logs}/graphics.log
rm -f "$OUT"/graphics-*.calls
: >"$log"
programs=/opt/cgpu-graphics # run.sh has unpacked graphics.tar.xz there
began=$(mktemp)

# Bare, where no driver files are mounted, programs have to be told which libraries are the driver's.
icd() { printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}\n' "$1"; }
icd libGLX_nvidia.so.0 >"$programs/vulkan.json"
icd libEGL_nvidia.so.0 >"$programs/vulkan-egl.json"
icd libEGL_nvidia.so.0 >"$programs/egl.json"
mkdir -p "$programs/vendors" # a folder: Khronos' loader, which CUDA brings, takes no file
echo libnvidia-opencl.so.1 >"$programs/vendors/nvidia.icd"
vulkan=${VK_DRIVER_FILES:-$programs/vulkan.json}
told=(
	-e VK_DRIVER_FILES="$vulkan" -e VK_ICD_FILENAMES="$vulkan"
	-e __EGL_VENDOR_LIBRARY_FILENAMES="${__EGL_VENDOR_LIBRARY_FILENAMES:-$programs/egl.json}"
	-e OCL_ICD_VENDORS="${OCL_ICD_VENDORS:-$programs/vendors}"
)

# refusals prints what guards have refused since the file of that name was made.
refusals() { find "$CGPU_RUN_DIR/log" -type f -newer "$1" -exec grep -hE 'denied|refused|cannot' {} + 2>/dev/null | sort | uniq -c | head -n 20; }

# on_vgpu DOCKER_OPTIONS… -- COMMAND…
on_vgpu() {
	local out total
	touch "$began"
	out=$(vgpu 6GiB --rm "$@" 2>&1) || { echo "$out"; refusals "$began"; return 1; }
	echo "$out"
	total=$(number total_MiB <<<"$out")
	# Graphics libraries keep some for themselves.
	[[ -z $total ]] || ((total <= 6144 && total > 5000)) || { echo "total_MiB $total: want the limit, 6144"; return 1; }
}
# full COMMAND…: the program has been refused memory, at the limit and with no more than some of it left
full() {
	local out got
	out=$(on_vgpu "${told[@]}" -- "$@") || { echo "$out"; return 1; }
	echo "$out"
	got=$(grep -oE '(allocated|exported)_MiB [0-9]+' <<<"$out" | awk '{print $2}')
	grep -q 'refused 1' <<<"$out" && ((got <= 6144 && got > 4500))
}
# calls NAME WAY COMMAND…: the program's calls, bare or on a vGPU, in a file of that name
calls() {
	local folder=$programs/calls way=$2
	local start=(bare)
	[[ $way == bare ]] || start=(vgpu 6GiB -e CGPU_LIMITER=off) # which is asked before the tracer
	rm -rf "$folder" && mkdir -m 1777 "$folder"
	"${start[@]}" --rm "${told[@]}" -e RMTRACE="$folder" -e LD_PRELOAD="$programs/rmtrace.so" -- "${@:3}" >/dev/null 2>&1
	"$python" "$here/rmtrace.py" "$folder" --answers >"$OUT/graphics-$1-$way.calls"
}
# try NAME COMMAND…: what works bare must work on a vGPU
try() {
	local name=$1 before=$failed out
	shift
	[[ -z ${ONLY:-} || $name =~ $ONLY ]] || return 0
	if ! out=$(bare --rm "${told[@]}" -- "$@" 2>&1); then
		printf '=== %s, bare: failed\n%s\n' "$name" "$out" >>"$log"
		printf 'none  %s: bare it fails too: %s\n' "$name" "$(tail -n 1 <<<"$out" | cut -c 1-140)"
		calls "$name" bare "$@"
		return 1
	fi
	printf '=== %s, bare\n%s\n' "$name" "$out" >>"$log"
	check "$name" on_vgpu "${told[@]}" -- "$@"
	((failed > before)) || return 0
	calls "$name" bare "$@"
	calls "$name" vgpu "$@"
	echo "      calls that bare had another answer, or none of:"
	grep -Fvxf "$OUT/graphics-$name-bare.calls" "$OUT/graphics-$name-vgpu.calls" | sort | uniq -c | head -n 20 | sed 's/^/      /'
	return 1
}
# variants of what fails: which part of cgpu is it?
variant() { # variant NAME DOCKER_OPTIONS… -- COMMAND…
	local out name=$1
	shift
	out=$(vgpu 6GiB --rm "$@" 2>&1) && printf '      %s: works\n' "$name" || printf '      %s: exit %d, %s\n' "$name" $? "$(tail -n 1 <<<"$out")"
}
# Where all is asked for, the driver's other nodes are not there: the guard does not see what is done with them.
nodes() {
	local out
	out=$(vgpu 6GiB --rm -e NVIDIA_DRIVER_CAPABILITIES=all -- sh -c 'ls -d /dev/nvidia* /dev/dri/* 2>/dev/null') || true
	echo "$out"
	! grep -qE 'modeset|dri|caps|uvm-tools' <<<"$out" && grep -q nvidiactl <<<"$out"
}
# The driver's files by themselves, as in an image that has the loaders: what cgpu refresh found is mounted.
own_files() {
	jq -e '[.mounts[].container | select(endswith("/icd.d/nvidia_icd.json"))] | length > 0' "$CGPU_RUN_DIR/node.json" >/dev/null ||
		{ echo "the machine has no nvidia_icd.json"; return 0; }
	on_vgpu -- "$programs/vulkan"
}
shared() { # weights 1 and 3 side by side
	local one three rounds status=1
	rounds=$(bare --rm "${told[@]}" -- "$programs/vulkan" spin 0.1 | number rounds) &&
		vgpu 6GiB -d --name one "${told[@]}" -e ALIYUN_COM_GPU_SCHD_WEIGHT=1 -- "$programs/vulkan" spin 12 "$rounds" >/dev/null &&
		vgpu 6GiB -d --name three "${told[@]}" -e ALIYUN_COM_GPU_SCHD_WEIGHT=3 -- "$programs/vulkan" spin 12 "$rounds" >/dev/null &&
		timeout 40 docker wait one three >/dev/null && {
		one=$(docker logs one 2>&1 | number work)
		three=$(docker logs three 2>&1 | number work)
		echo "work $one beside $three"
		[[ $one && $three ]] && ((three > one * 2 && three < one * 4))
		status=$?
	}
	remove one three
	return "$status"
}

capped() { # refused where it begins with a hard cap; one of 30 % that comes later holds
	local rounds whole part
	touch "$began"
	! vgpu 6GiB --rm "${told[@]}" -e CGPU_PERCENT=30 -- "$programs/vulkan" >/dev/null 2>&1 &&
		refusals "$began" | grep -m 1 'start the container without a percentage' &&
		rounds=$(bare --rm "${told[@]}" -- "$programs/vulkan" spin 0.1 | number rounds) &&
		whole=$(vgpu 6GiB --rm "${told[@]}" -- "$programs/vulkan" spin 3 "$rounds" | number work) &&
		vgpu 6GiB -d --name capped "${told[@]}" -- "$programs/vulkan" spin 9 "$rounds" >/dev/null && sleep 3 &&
		cgpu set capped --percent 30 && timeout 20 docker wait capped >/dev/null && part=$(docker logs capped | number work)
	remove capped
	echo "work ${part:-} in 9 s, 3 s of which without a cap and 6 at most with 30 %; $whole in 3 s without"
	((${part:-0} > whole && ${part:-0} < whole * 2))
}

# Where the node does not allow graphics nothing is made that draws, and the log says how to allow it.
refused() {
	touch "$began"
	! vgpu 6GiB --rm "${told[@]}" -- "$programs/vulkan" 2>&1 || return 1
	vgpu 6GiB --rm "${told[@]}" -- "$programs/egl" >/dev/null 2>&1 || true # it may draw in software
	refusals "$began" | grep -m 1 'graphics = true in cgpu.toml allows them'
}
# What 1 ms of CUDA's work takes beside draws and dispatches of a second, which begin while it runs: no longer than two of them (a timeslice
# that is set ends the turn that one has just got), and a container that waits for its turn gets it.
beside() { # beside COMMAND…
	local out worst
	vgpu 6GiB -d --name waits -v "$built:$built:ro" -- "$built/latency" --seconds 16 --think-ms 0 --work-us 1000 --iters-per-us "$rate" >/dev/null &&
		sleep 3 && vgpu 6GiB --rm "${told[@]}" -- timeout 20 "$@" 2>&1 | tail -n 2
	timeout 20 docker wait waits >/dev/null
	out=$(docker logs waits 2>&1 | tail -n 1 | jq -c '{count, p50, p99, max}')
	remove waits
	echo "$out"
	worst=$(jq '.max | floor' <<<"$out")
	((${worst:--1} >= 500000 && worst <= 2500000)) # they have met
}

[[ -x $programs/vulkan ]] || { echo "graphics: $programs has no programs; pack.sh packs them into graphics.tar.xz" >&2; exit 1; }
make_host_image || exit 1
compile latency share || exit 1
rate=$(bare --rm -v "$built:$built:ro" -- "$built/share" --calibrate | jq .iters_per_us) || exit 1
if command -v nvcc >/dev/null; then nvcc -O2 -arch=sm_90 -o "$programs/nvjpeg" "$workloads/nvjpeg.cu" -lnvjpeg; fi

check 'nodes' nodes
check 'vulkan and egl where the node does not allow it' refused
sed -i '1i graphics = true' "$CGPU_CONFIG" && cgpu refresh >/dev/null 2>&1 || exit 1
if try vulkan "$programs/vulkan"; then
	check 'vulkan: the driver files that cgpu mounts' own_files
	check 'vulkan: memory' full "$programs/vulkan" fill 64
	check 'vulkan: memory that only descriptors keep' full "$programs/vulkan" export 256 8192
	check 'vulkan: weights 1 and 3' shared
	check 'vulkan: hard cap of 30 %' capped
	check 'vulkan: beside dispatches of 1 s' beside "$programs/vulkan" long 1000 8
elif [[ -e $OUT/graphics-vulkan-vgpu.calls ]]; then
	variant 'without the limiter' "${told[@]}" -e CGPU_LIMITER=off -- "$programs/vulkan"
	variant 'by libEGL_nvidia' -e VK_DRIVER_FILES="$programs/vulkan-egl.json" -e VK_ICD_FILENAMES="$programs/vulkan-egl.json" -- "$programs/vulkan"
	variant 'without seccomp beside the guard' "${told[@]}" --security-opt seccomp=unconfined -- "$programs/vulkan"
fi
if try egl "$programs/egl"; then
	check 'egl: more textures than memory' on_vgpu "${told[@]}" -- "$programs/egl" fill 64 8192
	check 'egl: beside fragments of 1 s' beside "$programs/egl" long 1000 8 fragments
fi
if try opencl "$programs/opencl"; then check 'opencl: memory' full "$programs/opencl" fill 64 8192; fi
if try nvdec "$programs/nvdec"; then check 'nvdec: decoders until refused' on_vgpu "${told[@]}" -- "$programs/nvdec" fill 64; fi
if [[ -x $programs/nvjpeg ]]; then try nvjpeg "$programs/nvjpeg" || true; fi
rm -f "$began"
echo "gpu: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
