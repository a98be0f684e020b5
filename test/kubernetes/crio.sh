#!/usr/bin/env bash
# Runs the suite with CRI-O below the kubelet in place of containerd. build.sh node, images.sh and `make build` must have run; what tests
# need of the device plugin is skipped, as CRI-O's nodes serve claims alone.
#   crio.sh [ARGUMENTS of go test…]       such as -v -run TestRestarts
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
CRIO_BIN=$(hack/engines.sh)/crio
export CRIO_BIN CGPU_TEST_CRI=crio CGPU_BIN=${CGPU_BIN:-$PWD/bin}
exec go test -tags kubernetes -count 1 -timeout 40m "$@" ./test/kubernetes
