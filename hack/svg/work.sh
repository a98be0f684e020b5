# shellcheck shell=bash
# Four containers on two GPUs of a private node, for pictures.
run() { docker run -d --runtime=cgpu --network none -e CGPU_GPUS="$1" "${@:2}" >/dev/null; }
run 0 --name web -e CGPU_MEM=4 -e ALIYUN_COM_GPU_HIGH_PRIO=1 probe cgpu-probe work --gap 8ms --for 600s
run 0 --name train -e CGPU_MEM=6 -e CGPU_WEIGHT=3 probe cgpu-probe work --for 600s
run 0 --name batch -e CGPU_MEM=3 probe cgpu-probe work --for 600s
run 1 --name notebook -e CGPU_MEM=8 -e CGPU_PERCENT=40 probe cgpu-probe work --gap 20ms --for 600s
docker exec -d web cgpu-probe hold 1536MiB
docker exec -d train cgpu-probe hold 5GiB
docker exec -d batch cgpu-probe hold 2GiB
docker exec -d notebook cgpu-probe hold 7GiB
