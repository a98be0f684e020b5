#!/usr/bin/env bash
# What the guard does for a call: its CPU time, how often its threads give way, and by strace its system calls, the driver's among
# them, for a context, cudaMemGetInfo and a pair of cudaMalloc and cudaFree of 2 MiB; beside a call of the kernel's and one that the
# guard only waves through, by which machines can be compared. Run by run.sh on a private node; takes less than a minute.
#   calls.sh vgpu|bare …   host.sh's functions, for calls.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
case ${1:-} in
vgpu | bare)
	"$@"
	exit
	;;
esac
compile calls
make_host_image
exec "$python" -u "$here/calls.py" "$built/calls" "${OUT:?set OUT to a folder for the logs}"
