#!/usr/bin/env bash
# How cgpu shares a GPU's time, measured in real containers, beside what the driver does by itself (cases: shares.py). Run by
# run.sh on a private node. A table goes to standard output, all figures to $OUT/shares.json; exit status 1: a figure was
# not reached, or a case broke.
#   ONLY=REGEX   the cases whose names match, e.g. ONLY='weights 1:3|caps'; ONLY=list names them with their seconds
#   FIGURES=NAME  the file's name without its end (default shares)
#   BUDGET=S     begin no case that would not end within so many seconds (default 540: a command there has 600)
#   shares.sh vgpu|bare|mps|mps_start|mps_stop …   host.sh's functions, for shares.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
case ${1:-} in
vgpu | bare | mps | mps_start | mps_stop)
	"$@"
	exit
	;;
esac
out=${OUT:?set OUT to a folder for the figures}/${FIGURES:-shares}.json
if [[ ${ONLY:-} != list ]]; then
	compile
	make_host_image
	cgpu refresh # or there is no GPU to set a policy of, before the first container
	cgpu refresh >/dev/null
fi
exec "$python" -u "$here/shares.py" --out "$out" --programs "$built" --only "${ONLY:-}" --budget $((${BUDGET:-540} - SECONDS))
