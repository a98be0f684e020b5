#!/usr/bin/env bash
# Prints what `cgpu smi` shows in a terminal of 110 columns beside three containers that work on a private node with the
# simulated driver: the text of docs/images/smi.txt.
#
#   make build && hack/with-node.sh -- hack/svg/smi.sh >docs/images/smi.txt && go test ./hack/svg -update
set -euo pipefail
[[ ${CGPU_NODE:-} ]] || { echo "smi.sh: CGPU_NODE is not set: run through hack/with-node.sh" >&2; exit 2; }

run() { docker run -d --runtime=cgpu --network none -e ALIYUN_COM_GPU_MEM_DEV=15 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0 "$@" >/dev/null; }
finish() { docker rm -f web train batch >/dev/null 2>&1 || true; }
trap finish EXIT
run --name web -e ALIYUN_COM_GPU_MEM_CONTAINER=4 -e ALIYUN_COM_GPU_HIGH_PRIO=1 probe cgpu-probe work --gap 8ms --for 60s
run --name train -e ALIYUN_COM_GPU_MEM_CONTAINER=6 -e ALIYUN_COM_GPU_SCHD_WEIGHT=3 -e CGPU_MEM_SPILL=4 probe cgpu-probe work --for 60s
run --name batch -e ALIYUN_COM_GPU_MEM_CONTAINER=3 probe cgpu-probe work --for 60s
docker exec -d web cgpu-probe hold 1536MiB
docker exec -d train cgpu-probe hold 5GiB
sleep 0.5 # the next one spills, because this one has the card's part
docker exec -d train cgpu-probe hold 2GiB
docker exec -d batch cgpu-probe hold 2GiB
sleep 2.5 # a second of shares after the second in which they settle

echo '$ cgpu smi'
script -qec 'stty cols 110; cgpu smi' /dev/null </dev/null | tr -d '\r'
