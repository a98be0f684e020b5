#!/usr/bin/env bash
# Two containers, started by a private dockerd, share one GPU: the real one if there is one, else the simulated. Each
# sees its own size, one runs into its limit, `cgpu smi` shows both; two more share its time by weight. The last line is "demo: N checks passed".
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [[ -z ${CGPU_NODE:-} ]]; then
	if [[ -z ${CGPU_TEST_DRIVER:-} ]]; then
		CGPU_TEST_DRIVER=sim
		[[ -c /dev/nvidiactl ]] && CGPU_TEST_DRIVER=nvidia
	fi
	export CGPU_TEST_DRIVER
	exec "$here/with-node.sh" -- "$0"
fi

checks=0
check() { # check WHAT COMMAND…
	local what=$1
	shift
	if ! "$@"; then
		echo "demo: NOT SO: $what" >&2
		echo "demo: failed after $checks checks" >&2
		exit 1
	fi
	checks=$((checks + 1))
	echo "  ok: $what"
}
say() { printf '\n%s\n' "$*"; }
# Shows a command as a user would type it, then runs it.
show() {
	printf '\n$ %s\n' "$*"
	"$@"
}

# value KEY: the number behind "KEY=" in what cgpu-probe printed.
value() { sed -nE "s/^$1=([0-9]+)\r?$/\1/p"; }
mib() { echo $(($1 / 1048576)); }

say "cgpu demo on the $CGPU_TEST_DRIVER driver: one GPU, two containers that ask for 6/15 and 8/15 of it."

run=(docker run --runtime=cgpu --network none -e ALIYUN_COM_GPU_MEM_DEV=15 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0)
show "${run[@]}" -d --name six -e ALIYUN_COM_GPU_MEM_CONTAINER=6 probe cgpu-probe hold 1GiB
show "${run[@]}" -d --name eight -e ALIYUN_COM_GPU_MEM_CONTAINER=8 probe cgpu-probe hold 2GiB

ready() {
	local i
	for ((i = 0; i < 100; i++)); do
		[[ $(docker logs "$1" 2>/dev/null) == *ready=1* ]] && return
		sleep 0.1
	done
	docker logs "$1"
	return 1
}
check "the first container runs and holds 1 GiB" ready six
check "the second runs and holds 2 GiB" ready eight

card=$(jq '.gpus[0].memory' "$CGPU_RUN_DIR/node.json")
for share in six:6 eight:8; do
	name=${share%:*} part=${share#*:}
	out=$(show docker exec "$name" cgpu-probe meminfo)
	grep -vE '^fb_|^v1|^heap' <<<"$out"
	want=$((card * part / 15 / 1048576))
	check "$name sees a card of $want MiB, $part/15 of $(mib "$card")" test "$(value total_mib <<<"$out")" -eq "$want"
done

say "The first container asks for more than it has left:"
refused() {
	local out
	out=$(docker exec six cgpu-probe alloc 6GiB 2>&1) && return 1
	echo "$out"
	grep -qiE 'NO_MEMORY|out of memory|0x51' <<<"$out"
}
check "the allocation over its limit fails as an ordinary out-of-memory" refused
succeeds() { docker exec "$1" cgpu-probe alloc 1GiB >/dev/null; }
check "one within its limit succeeds" succeeds six
check "the second container is not disturbed" succeeds eight

show cgpu smi
smi() { cgpu smi | grep "$1" >/dev/null; } # not -q: cgpu would write to a closed pipe
check "cgpu smi shows the first container" smi "$(docker inspect -f '{{.Id}}' six | cut -c1-12)"
check "cgpu smi shows the second container" smi "$(docker inspect -f '{{.Id}}' eight | cut -c1-12)"

say "A third container that the card has no room for:"
no_room() {
	local out
	out=$("${run[@]}" --rm -e ALIYUN_COM_GPU_MEM_CONTAINER=6 probe true 2>&1) && return 1
	echo "$out"
	grep -q 'MiB' <<<"$out"
}
check "is refused, with the reason" no_room

show docker kill six
free_again() {
	local i
	for ((i = 0; i < 20; i++)); do
		"${run[@]}" --rm -e ALIYUN_COM_GPU_MEM_CONTAINER=6 probe true 2>/dev/null && return
		sleep 0.05
	done
	return 1
}
check "a killed container's share can be had again" free_again

# Only the simulated driver has kernels to offer without CUDA.
if [[ $CGPU_TEST_DRIVER == sim ]]; then
	say "Two containers that always have work, with weights 1 and 3:"
	work=(probe cgpu-probe work --kernel 1ms --for 6s --windows 1s)
	show "${run[@]}" -d --name one -e ALIYUN_COM_GPU_MEM_CONTAINER=2 -e ALIYUN_COM_GPU_SCHD_WEIGHT=1 "${work[@]}"
	show "${run[@]}" -d --name three -e ALIYUN_COM_GPU_MEM_CONTAINER=2 -e ALIYUN_COM_GPU_SCHD_WEIGHT=3 "${work[@]}"
	sleep 3
	show cgpu smi
	docker wait one three >/dev/null
	part() { docker logs "$1" | sed -nE 's/^window=4 .* share=([0-9]+)\..*/\1/p'; }
	shares() {
		echo "in the fourth second: $(part one) % and $(part three) % of the GPU"
		(($(part three) > 2 * $(part one) && $(part three) < 4 * $(part one)))
	}
	check "the second gets three times as much of the GPU's time" shares
fi

printf '\ndemo: %d checks passed\n' "$checks"
