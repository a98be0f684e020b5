#!/usr/bin/env bash
# Makes an image of one layer from a folder: no registry, no daemon, no base image.
#   mkimage.sh NAME ROOTFS OUT.tar ENTRYPOINT [ARGUMENT…]
# What comes out is what `docker save` writes: `ctr images import` and `docker load` read it. ENTRYPOINT "" leaves it out.
set -euo pipefail
name=$1 rootfs=$2 out=$3
shift 3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
tar -C "$rootfs" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf "$tmp/layer.tar" .
layer=$(sha256sum "$tmp/layer.tar" | cut -d' ' -f1)
# IMAGE_ARCH: the architecture of what is in it; this machine's by default.
arch=${IMAGE_ARCH:-$(uname -m)}
case $arch in x86_64) arch=amd64 ;; aarch64) arch=arm64 ;; esac
entry=
[[ $# -eq 0 ]] || entry=$(printf ',"%s"' "$@")
# IMAGE_ENV: further variables of the image, as a hostile author would set them (NAME=VALUE, one on each line).
env='"PATH=/bin:/usr/bin"'
while read -r variable; do [[ -z $variable ]] || env+=",\"$variable\""; done <<<"${IMAGE_ENV:-}"
printf '{"architecture":"%s","os":"linux","config":{"Entrypoint":[%s],"Env":[%s]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
	"$arch" "${entry#,}" "$env" "$layer" >"$tmp/config.json"
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$name" >"$tmp/manifest.json"
mkdir -p "${out%/*}"
tar -C "$tmp" --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=0644 -cf "$out.new" manifest.json config.json layer.tar
mv "$out.new" "$out"
