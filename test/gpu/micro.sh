#!/usr/bin/env bash
# Cost of single CUDA calls, bare in Docker against a vGPU without and with the preload library, interleaved; prints medians and
# ratios: of a vGPU to bare, and of the library to none. Run by run.sh.
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
	{
		bare --rm -- "$built/micro" | sed "s/^/bare /"
		vgpu 6GiB --rm -e CGPU_LIMITER=off -- "$built/micro" | sed "s/^/guard /"
		vgpu 6GiB --rm -- "$built/micro" | sed "s/^/limiter /"
	} >>"$out"
done
"$python" - "$out" <<'END'
import statistics, sys
values = {}
for line in open(sys.argv[1]):
    side, name, value = line.split()
    values.setdefault(name, {}).setdefault(side, []).append(float(value))
print("%-18s %10s %10s %10s %10s %13s" % ("median of %d" % max(len(v["bare"]) for v in values.values()), "bare", "guard", "+limiter", "cgpu/bare", "limiter/guard"))
for name, sides in values.items():
    bare, guard, limiter = (statistics.median(sides[s]) for s in ("bare", "guard", "limiter"))
    print("%-18s %10.3f %10.3f %10.3f %10.3f %13.3f" % (name, bare, guard, limiter, limiter / bare, limiter / guard))
END
