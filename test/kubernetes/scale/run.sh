#!/usr/bin/env bash
# What thousands of claims cost the real scheduler and apiserver, with nodes that are objects only. No root, no GPU.
#
#   test/kubernetes/scale/run.sh [FLAGS OF THE PROGRAM]     -help lists them
#   test/kubernetes/scale/run.sh -nodes 100 -kind shared    a small run: half a minute
#
# A control plane of its own is started (test/kubernetes/k8s.sh; build.sh control-plane must have run) and stopped.
#   CGPU_K8S_DIR   its folder, with bin/ (default /tmp/cgpu-k8s-scale, with the bin/ of /tmp/cgpu-k8s)
#   PORT_BASE      17400: nine ports from here on
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export CGPU_K8S_DIR=${CGPU_K8S_DIR:-/tmp/cgpu-k8s-scale} PORT_BASE=${PORT_BASE:-17400}
k8s=test/kubernetes/k8s.sh
mkdir -p "$CGPU_K8S_DIR"
[[ -e $CGPU_K8S_DIR/bin ]] || ln -s /tmp/cgpu-k8s/bin "$CGPU_K8S_DIR/bin"
program=$CGPU_K8S_DIR/scale
CGO_ENABLED=0 go build -o "$program" ./test/kubernetes/scale
trap '"$k8s" down' EXIT
"$k8s" up control-plane
"$k8s" stop kube-scheduler # the program starts one that it can ask
"$program" -port "$PORT_BASE" "$@"
