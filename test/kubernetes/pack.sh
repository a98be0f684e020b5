#!/usr/bin/env bash
# Packs what a machine without network, registry and Go needs for k8s.sh up node into FILE: bin/ (build.sh node), images/
# (images.sh) and, with ctr and containerd of their own, nothing else. There: tar -xJf FILE -C $CGPU_K8S_DIR.
#   pack.sh FILE.tar.xz
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
file=${1:?pack.sh FILE.tar.xz}
dir=${CGPU_K8S_DIR:-${TMPDIR:-/tmp}/cgpu-k8s}
"$here/build.sh" node
"$here/images.sh"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/images"
cp -rL --no-dereference --preserve=links "$(readlink -f "$dir/bin")" "$tmp/bin"
rm -rf "$tmp/bin/.lock" "$tmp/bin/gpushare-extender"
for image in pause probe agent; do cp "$dir/images/$image.tar" "$tmp/images/"; done
# A pass over x86 jumps before the dictionary saves a tenth.
tar -C "$tmp" --sort=name --owner=0 --group=0 -c bin images | xz -T1 --x86 --lzma2=preset=6,dict=128MiB >"$file"
du -h "$file"
