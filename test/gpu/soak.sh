#!/usr/bin/env bash
# Ten minutes of containers that come and go beside some that compute all the time (soak.py says more). Run by run.sh on a private node.
#   SOAK=SECONDS    how long, with the beginning and the end (default 510: a command there has 600, and what is before takes 60)
#   soak.sh vgpu …  host.sh's function, for soak.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
if [[ ${1:-} == vgpu ]]; then
	"$@"
	exit
fi
: "${OUT:?set OUT to a folder for the figures}"
compile share steady managed
make_host_image
cgpu refresh
cgpu policy 0 preempt --max-inst 64 >/dev/null
exec "$python" -u "$here/soak.py" "$built" "${SOAK:-510}"
