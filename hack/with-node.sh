#!/usr/bin/env bash
# Runs a command with a private node (hack/node.sh) around it, and takes the node down whatever happens.
# usage: with-node.sh [--keep-logs DIR] -- COMMAND…
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
logs=
if [[ ${1:-} == --keep-logs ]]; then
	logs=$2
	shift 2
fi
[[ ${1:-} == -- ]] || { echo "usage: with-node.sh [--keep-logs DIR] -- COMMAND…" >&2; exit 2; }
shift

# Not TMPDIR: a unix socket's path ends at 107 bytes, and the longest of ours is 60 below this folder.
node=$(mktemp -d /tmp/cgpu-node.XXXXXX)
chmod 711 "$node" # hooks of a container with a user namespace go through it, as through /run
finish() {
	if [[ $logs ]]; then
		mkdir -p "$logs"
		cp -r "$node"/run/log "$node"/docker/dockerd.log "$node"/containerd/containerd.log "$logs"/ 2>/dev/null || true
	fi
	"$here/node.sh" down "$node"
}
trap finish EXIT
trap 'exit 130' INT TERM
"$here/node.sh" up "$node"
# shellcheck source=/dev/null
source "$node/env"
"$@"
