#!/usr/bin/env bash
# Makes the images of the cluster, all named localhost/NAME:cgpu, in $CGPU_K8S_DIR/images, from where k8s.sh imports them:
#   pause     the pod sandbox
#   probe     busybox and cgpu-probe
#   liar      the same, and its variables claim 15 GiB
#   agent     cgpu-agent (bin/ of this checkout, or CGPU_BIN)
#   installer what deploy/image/installer.Containerfile says, of the same
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../.." && pwd)
bin=${CGPU_BIN:-$top/bin}
images=${CGPU_K8S_DIR:-${TMPDIR:-/tmp}/cgpu-k8s}/images
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

mkdir -p "$tmp/pause" "$tmp/agent" "$tmp"/probe/{bin,tmp,etc,root,var/tmp,usr/bin}
(cd "$top" && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$tmp/pause/pause" ./test/kubernetes/pause)
"$here/mkimage.sh" localhost/pause:cgpu "$tmp/pause" "$images/pause.tar" /pause

cp "$(command -v busybox)" "$tmp/probe/bin/busybox"
for applet in $("$tmp/probe/bin/busybox" --list); do
	[[ $applet == busybox ]] || ln -s busybox "$tmp/probe/bin/$applet"
done
cp "$bin/cgpu-probe" "$tmp/probe/bin/cgpu-probe"
printf 'root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n' >"$tmp/probe/etc/passwd"
"$here/mkimage.sh" localhost/probe:cgpu "$tmp/probe" "$images/probe.tar"
IMAGE_ENV='NVIDIA_VISIBLE_DEVICES=all
ALIYUN_COM_GPU_MEM_CONTAINER=15
ALIYUN_COM_GPU_MEM_DEV=15
ALIYUN_COM_GPU_MEM_POD=15
ALIYUN_COM_GPU_SCHD_WEIGHT=64
CGPU_MEM_LIMIT=15GiB
CGPU_DISABLE=true' "$here/mkimage.sh" localhost/liar:cgpu "$tmp/probe" "$images/liar.tar"

if [[ -x $bin/cgpu-agent ]]; then
	cp "$bin/cgpu-agent" "$tmp/agent/"
	"$here/mkimage.sh" localhost/cgpu-agent:cgpu "$tmp/agent" "$images/agent.tar" /cgpu-agent
fi

mkdir -p "$tmp"/installer/cgpu/{bin,lib/cgpu}
cp "$bin"/cgpu{,-guard,-hook,-podresources,-probe,-refresh,-runtime,-sim} "$tmp/installer/cgpu/bin/"
cp "$bin"/{libcgpu.so,cgpu-load} "$tmp/installer/cgpu/lib/cgpu/"
"$here/mkimage.sh" localhost/cgpu-installer:cgpu "$tmp/installer" "$images/installer.tar" /cgpu/bin/cgpu
