#!/usr/bin/env bash
# Packs what a bare GPU machine without network needs for test/gpu/run.sh into DIR (default .gpu, which git ignores):
# the container engines with their libraries, cgpu's binaries, the conformance suite, the programs of graphics.sh with their loaders. Run it
# on Debian or Ubuntu, not newer than that machine's, with libvulkan-dev, libegl-dev, libgles-dev, ocl-icd-opencl-dev, opencl-headers and
# libffmpeg-nvenc-dev.
#   test/gpu/pack.sh [DIR] [graphics | figures]   graphics: those programs alone; figures: without them and without the conformance suite
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=${1:-.gpu}
mkdir -p "$dir"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
chmod 755 "$tmp"

# fetch PACKAGE…: their files into $tmp/root
fetch() {
	rm -rf "$tmp/debs" "$tmp/root"
	mkdir "$tmp/debs" "$tmp/root"
	apt-get update -qq
	# _apt downloads as its own user.
	chmod 777 "$tmp/debs"
	(cd "$tmp/debs" && apt-get download -qq "$@")
	for deb in "$tmp"/debs/*.deb; do dpkg -x "$deb" "$tmp/root"; done
}
# libraries DIR: those among the files, by the names that programs load them by
libraries() {
	mkdir -p "$1"
	find "$tmp/root" -type f -name '*.so.*' | while read -r lib; do
		soname=$(objdump -p "$lib" | awk '/SONAME/ {print $2}')
		cp "$lib" "$1/${soname:-${lib##*/}}"
	done
}

if [[ ${2:-} != figures && ! -s $dir/graphics.tar.xz || ${2:-} == graphics ]]; then
	# The loaders, and what the driver's libGLX links with.
	fetch libvulkan1 libegl1 libglvnd0 libopengl0 libgles2 ocl-icd-libopencl1 libx11-6 libxext6 libxcb1 libxau6 libxdmcp6 libbsd0 libmd0
	graphics=$tmp/graphics programs=test/gpu/workloads
	libraries "$graphics/lib"
	gcc -O2 -o "$graphics/vulkan" "$programs/vulkan.c" -lvulkan
	gcc -O2 -o "$graphics/egl" "$programs/egl.c" -lEGL -lGLESv2
	gcc -O2 -o "$graphics/opencl" "$programs/opencl.c" -lOpenCL
	gcc -O2 -o "$graphics/nvdec" "$programs/nvdec.c" -ldl
	gcc -O2 -shared -fPIC -o "$graphics/rmtrace.so" "$programs/rmtrace.c" -ldl
	strip "$graphics"/{vulkan,egl,opencl,nvdec} "$graphics"/lib/*
	tar -C "$graphics" -c . | xz --x86 --lzma2=preset=9 >"$dir/graphics.tar.xz"
fi
[[ ${2:-} != graphics ]] || { du -h "$dir/graphics.tar.xz"; exit; }

# The engines change rarely: pack them once.
if [[ ! -s $dir/engines.tar.xz ]]; then
	mkdir "$tmp/engines"
	fetch docker.io containerd runc crun busybox-static jq libjq1 libonig5 libyajl2 strace libunwind8 \
		libseccomp2 libdevmapper1.02.1 libsystemd0 libudev1 libselinux1 libpcre2-8-0 libcap2 libgcrypt20 libgpg-error0 \
		liblz4-1 liblzma5 libzstd1
	for program in dockerd docker docker-init containerd ctr containerd-shim-runc-v2 runc crun busybox jq strace; do
		found=$(find "$tmp/root" -type f -path '*bin/*' -name "$program" | head -n 1)
		[[ $found ]] || found=$(command -v "$program") || { echo "pack: $program is in no package and not in PATH" >&2; exit 1; }
		cp -L "$found" "$tmp/engines/$program"
	done
	libraries "$tmp/engines/lib"
	strip "$tmp"/engines/* 2>/dev/null || true
	tar -C "$tmp/engines" -c . | xz --x86 --lzma2=preset=9,dict=128MiB >"$dir/engines.tar.xz"
fi

make build
mkdir "$tmp/cgpu"
cp bin/* "$tmp/cgpu/"
rm -f "$tmp/cgpu"/{*.json,kubectl-cgpu,cgpu-agent} # large, and test/kubernetes/pack.sh has them
for suite in integration faults; do
	[[ ${2:-} == figures ]] || CGO_ENABLED=0 go test -c -trimpath -ldflags '-s -w' -tags integration -o "$tmp/cgpu/$suite.test" "./test/$suite"
done
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -tags integration -o "$tmp/cgpu/" ./test/bench ./test/gpu/records
tar -C "$tmp/cgpu" -c . | xz --x86 --lzma2=preset=6,dict=64MiB >"$dir/cgpu.tar.xz"
du -h "$dir"/*.tar.xz
