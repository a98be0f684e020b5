#!/usr/bin/env bash
# Cost of single CUDA calls, bare in Docker against a vGPU, interleaved; prints medians and their ratio. Run by run.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
rounds=${ROUNDS:-7}
out=${OUT:?set OUT to a folder for the logs}/micro.txt
compile
make_host_image
: >"$out"
for ((round = 0; round < rounds; round++)); do
	bare --rm -- "$built/micro" | sed "s/^/bare /" >>"$out"
	vgpu 6GiB --rm -- "$built/micro" | sed "s/^/cgpu /" >>"$out"
done
"$python" - "$out" <<'END'
import statistics, sys
values = {}
for line in open(sys.argv[1]):
    side, name, value = line.split()
    values.setdefault(name, {}).setdefault(side, []).append(float(value))
print("%-18s %10s %10s %7s" % ("median of %d" % max(len(v["bare"]) for v in values.values()), "bare", "cgpu", "ratio"))
for name, sides in values.items():
    bare, cgpu = statistics.median(sides["bare"]), statistics.median(sides["cgpu"])
    print("%-18s %10.3f %10.3f %7.3f" % (name, bare, cgpu, cgpu / bare))
END
