#!/usr/bin/env bash
# Runs a command beside an apiserver, a scheduler and etcd of its own (k8s.sh up control-plane; build.sh must have run): kubectl is in its
# PATH, KUBECONFIG and CGPU_TEST_KUBECONFIG name the administrator's file. No root.
#   with-control-plane.sh COMMAND…
# CGPU_K8S_DIR: the folder whose bin/ to use. PORT_BASE: its ports (16800).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$(readlink -f "${CGPU_K8S_DIR:-${TMPDIR:-/tmp}/cgpu-k8s}/bin")
dir=$(mktemp -d /tmp/k8s.XXXX)
ln -s "$bin" "$dir/bin"
export CGPU_K8S_DIR=$dir PORT_BASE=${PORT_BASE:-16800}
trap '"$here/k8s.sh" down; rm -rf "$dir"' EXIT
"$here/k8s.sh" up control-plane || { tail -n 4 "$dir"/log/*.log >&2; exit 1; }
eval "$("$here/k8s.sh" env)"
export CGPU_TEST_KUBECONFIG=$KUBECONFIG
"$@"
