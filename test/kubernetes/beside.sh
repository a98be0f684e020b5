#!/usr/bin/env bash
# What a share adds to the start of a container that no pod is around: containerd creates and starts it as it does for Docker. This is
# what the same in a pod is compared with. Runs in the node (k8s.sh exec); prints "KIND MILLISECONDS" of each start, the kinds by turns.
#   test/kubernetes/beside.sh IMAGE.tar RUNC CGPU-RUNTIME ROUNDS [options of ctr containers create]
set -euo pipefail
tar=$1 runc=$2 cgpu=$3 rounds=$4
shift 4
said=$(mktemp)
trap 'rm "$said"' EXIT
# Its warnings are told only if it fails.
ctr() { command ctr -a /run/containerd/containerd.sock -n beside "$@" 2>"$said" || { cat "$said" >&2; return 1; }; }
ctr images import "$tar" >/dev/null
image=$(ctr images ls -q)
for ((i = 0; i < rounds; i++)); do
	for kind in runc none share; do
		runtime=$cgpu options=()
		case $kind in
		runc) runtime=$runc ;;
		share) options=(--env ALIYUN_COM_GPU_MEM_CONTAINER=1GiB --env ALIYUN_COM_GPU_VISIBLE_DEVICES=0) ;;
		esac
		ctr containers create --runc-binary "$runtime" "${options[@]}" "$@" "$image" "$kind" sleep 1000
		begun=${EPOCHREALTIME/./}
		ctr tasks start -d "$kind"
		echo "$kind $(((${EPOCHREALTIME/./} - begun) / 100))" | sed 's/.$/.&/'
		ctr tasks rm -f "$kind" >/dev/null || true # it was killed
		ctr containers rm "$kind"
	done
done
