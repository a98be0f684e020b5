#!/usr/bin/env bash
# Packs what a bare GPU machine without network needs for test/gpu/run.sh into DIR (default .gpu, which git ignores):
# the container engines with their libraries, cgpu's binaries, the conformance suite. Run it on Debian or Ubuntu.
#   test/gpu/pack.sh [DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=${1:-.gpu}
mkdir -p "$dir"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
chmod 755 "$tmp"

# The engines change rarely: pack them once.
if [[ ! -s $dir/engines.tar.xz ]]; then
	mkdir "$tmp/debs" "$tmp/root" "$tmp/engines"
	apt-get update -qq
	# _apt downloads as its own user.
	chmod 777 "$tmp/debs"
	(cd "$tmp/debs" && apt-get download -qq docker.io containerd runc crun busybox-static jq libjq1 libonig5 libyajl2 strace libunwind8 \
		libseccomp2 libdevmapper1.02.1 libsystemd0 libudev1 libselinux1 libpcre2-8-0 libcap2 libgcrypt20 libgpg-error0 \
		liblz4-1 liblzma5 libzstd1)
	for deb in "$tmp"/debs/*.deb; do dpkg -x "$deb" "$tmp/root"; done
	for program in dockerd docker docker-init containerd ctr containerd-shim-runc-v2 runc crun busybox jq strace; do
		found=$(find "$tmp/root" -type f -path '*bin/*' -name "$program" | head -n 1)
		[[ $found ]] || found=$(command -v "$program") || { echo "pack: $program is in no package and not in PATH" >&2; exit 1; }
		cp -L "$found" "$tmp/engines/$program"
	done
	mkdir "$tmp/engines/lib"
	find "$tmp/root" -type f -name '*.so.*' | while read -r lib; do
		soname=$(objdump -p "$lib" | awk '/SONAME/ {print $2}')
		cp "$lib" "$tmp/engines/lib/${soname:-${lib##*/}}"
	done
	strip "$tmp"/engines/* 2>/dev/null || true
	tar -C "$tmp/engines" -c . | xz --x86 --lzma2=preset=9,dict=128MiB >"$dir/engines.tar.xz"
fi

make build
mkdir "$tmp/cgpu"
cp bin/* "$tmp/cgpu/"
rm -f "$tmp/cgpu"/*.json
CGO_ENABLED=0 go test -c -trimpath -ldflags '-s -w' -tags integration -o "$tmp/cgpu/integration.test" ./test/integration
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -tags integration -o "$tmp/cgpu/bench" ./test/bench
tar -C "$tmp/cgpu" -c . | xz --x86 --lzma2=preset=6,dict=64MiB >"$dir/cgpu.tar.xz"
du -h "$dir"/*.tar.xz
