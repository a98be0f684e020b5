#!/usr/bin/env bash
# On the GPU machine, in the repository's root, as root: unpacks DIR (test/gpu/pack.sh), makes a private node on the real
# driver, runs checks.sh and, if asked, memory.sh, faults.sh, ends.sh, walk.sh, upgrade.sh, keeper.sh, peers.sh, bare.sh, the conformance
# suite, the benchmark (start: what a start costs alone, and where that goes), the measurements of micro.sh, calls.sh and shares.sh (real: those of real programs and of two
# GPUs; account: GPU seconds against CUDA's events), exporter.py, soak.sh, graphics.sh, mps-trace.sh, domains.sh, churn.sh, and foreign.sh on the suites in DIR/foreign.tar.xz,
# which the caller has put there. Logs go to $OUT; where that would be more than 8 files, all but the tables (*.txt) are in one, logs.tar.gz.
#   test/gpu/run.sh [--dir DIR] [checks] [memory] [faults] [ends] [walk] [upgrade] [keeper] [peers] [bare] [conformance] [bench] [start] [micro] [calls] [shares]
#   [real] [account] [exporter] [soak] [graphics] [mps-trace] [domains] [churn] [foreign]
#   (default: checks)
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=.gpu
if [[ ${1:-} == --dir ]]; then
	dir=$2
	shift 2
fi
[[ $# -gt 0 ]] || set -- checks
export OUT=${OUT:-/tmp/cgpu-gpu}
mkdir -p "$OUT"

engines=/opt/cgpu-engines
cgpu=/opt/cgpu
mkdir -p "$engines" "$cgpu"
tar -xJf "$dir/engines.tar.xz" -C "$engines"
tar -xJf "$dir/cgpu.tar.xz" -C "$cgpu"
# lacking DIR: of the libraries there those that the machine has not; its own stay
lacking() {
	local lib
	for lib in "$1"/*; do
		[[ -e /usr/lib/x86_64-linux-gnu/${lib##*/} ]] || cp "$lib" /usr/lib/x86_64-linux-gnu/
	done
	flock /etc/ld.so.conf ldconfig # several streams of parallel.sh do this at once
}
lacking "$engines/lib"
export PATH=$engines:$PATH CGPU_BIN=$cgpu CGPU_TEST_DRIVER=nvidia

# table SECONDS COMMAND…: on a private node, for so long at most; what it prints goes to $OUT, too
table() { timeout -k 30 "$1" hack/with-node.sh --keep-logs /tmp/cgpu-logs -- "${@:2}" | tee "$OUT/$part.txt"; }

status=0
for part in "$@"; do
	case $part in
	checks | memory | faults | ends | walk | peers | micro | calls | shares) hack/with-node.sh --keep-logs /tmp/cgpu-logs -- "test/gpu/$part.sh" ;;
	account) ONLY='^account$' FIGURES=account table 300 test/gpu/shares.sh ;;
	exporter) table 420 test/gpu/exporter.py ;;
	start) table 240 "$cgpu/bench" -only starts,traces -o "$OUT/start.json" ;;
	soak) table $((${SOAK:-510} + 80)) test/gpu/soak.sh ;;
	upgrade) table 150 test/gpu/upgrade.sh ;;
	keeper) table 150 test/gpu/keeper.sh ;;
	real) ONLY='^(real|two gpus) ' hack/with-node.sh --keep-logs /tmp/cgpu-logs -- test/gpu/shares.sh ;;
	conformance) (
		cd test/integration # where `go test` runs it
		../../hack/with-node.sh --keep-logs /tmp/cgpu-logs -- "$cgpu/integration.test" -test.v -test.timeout 9m
	) >"$OUT/conformance.log" 2>&1 ;;
	bare) test/gpu/bare.sh ;;
	churn) test/gpu/churn.sh | tee "$OUT/churn.txt" ;;
	mps-trace) test/gpu/mps-trace.sh ;;
	domains) test/gpu/domains.sh ;;
	graphics)
		mkdir -p /opt/cgpu-graphics
		tar -xJf "$dir/graphics.tar.xz" -C /opt/cgpu-graphics
		lacking /opt/cgpu-graphics/lib
		hack/with-node.sh --keep-logs /tmp/cgpu-logs -- test/gpu/graphics.sh
		;;
	foreign)
		mkdir -p /opt/foreign
		[[ ! -f $dir/foreign.tar.xz ]] || tar -xJf "$dir/foreign.tar.xz" -C /opt/foreign
		OUT=/tmp/cgpu-foreign hack/with-node.sh --keep-logs /tmp/cgpu-logs -- test/gpu/foreign.sh /opt/foreign
		;;
	bench) hack/with-node.sh -- "$cgpu/bench" -o "$OUT/bench.json" | tee "$OUT/bench.log" ;;
	*)
		echo "run: unknown part $part" >&2
		exit 2
		;;
	esac || { status=1; echo "run: $part failed"; }
	[[ $part != conformance ]] || grep -E '^ *--- (FAIL|SKIP)|^(ok|FAIL|PASS)' "$OUT/conformance.log" || true
done
[[ ! -d /tmp/cgpu-foreign ]] || tar -C /tmp/cgpu-foreign -czf "$OUT/foreign-logs.tar.gz" . || true
[[ ! -d /tmp/cgpu-logs ]] || tar -C /tmp/cgpu-logs -czf "$OUT/node-logs.tar.gz" . || true
if (($(find "$OUT" -type f | wc -l) > 8)); then
	find "$OUT" -type f ! -name '*.txt' -printf '%P\0' >/tmp/cgpu-gpu-files
	tar -C "$OUT" --null -T /tmp/cgpu-gpu-files --remove-files -czf /tmp/cgpu-gpu-logs.tar.gz
	mv /tmp/cgpu-gpu-logs.tar.gz "$OUT/logs.tar.gz"
fi
exit "$status"
