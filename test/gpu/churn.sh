#!/usr/bin/env bash
# Containers that come and go, on the simulated driver: it wants many processors, and no GPU. TestChurn of test/faults (docs/internals/testing.md)
# without a Go toolchain; run.sh calls it. Its samples go to $OUT/churn.csv.
#   CGPU_CHURN=CONTAINERSxROUNDSxLANES (default 64x100x4)
#   CHURN_LIMIT=SECONDS   when it is over (default 540); two minutes before that no other round begins
set -euo pipefail
: "${CGPU_BIN:?set CGPU_BIN to the folder of the programs and faults.test}" "${OUT:?set OUT to a folder for the samples}"
export CGPU_CHURN=${CGPU_CHURN:-64x100x4} CGPU_CHURN_CSV=$OUT/churn.csv
status=0
echo "$(nproc) processors, Linux $(uname -r), $(stat -fc %T /sys/fs/cgroup), $(runc --version | head -n 1), load $(cat /proc/loadavg)"
"${FAULTS_TEST:-$CGPU_BIN/faults.test}" -test.v -test.run '^TestChurn$' -test.timeout "${CHURN_LIMIT:-540}s" || status=$?
echo "load $(cat /proc/loadavg)"
exit "$status"
