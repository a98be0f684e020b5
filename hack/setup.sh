#!/usr/bin/env bash
# Installs what `make demo` and `make test` need on Debian or Ubuntu and what is not there yet. Go itself must be there.
# Starts no service: the demo and the tests run their own private dockerd and containerd.
set -euo pipefail

command -v go >/dev/null || { echo "setup: go is not in PATH: install Go 1.26 or later (https://go.dev/dl)" >&2; exit 1; }

# command → package; the first that exists in the archive is taken (Debian 13 split docker.io).
missing=()
need() {
	local command=$1 package
	shift
	command -v "$command" >/dev/null && return
	missing+=("$command")
	for package in "$@"; do packages+=("$package"); done
}
packages=()
need dockerd docker.io
need docker docker.io docker-cli
need containerd containerd
need ctr containerd
need runc runc
need crun crun
need docker-init tini
need busybox busybox-static
need jq jq
need gcc gcc libc6-dev
need make make
need git git
need curl curl
need openssl openssl
need xz xz-utils
need ip iproute2
need pgrep procps
if [[ ${CI:-} ]]; then
	need shellcheck shellcheck
	# Without these, tests are skipped elsewhere and fail here: the preload library with musl and on arm64, completion in other shells, what reads traces of MPS.
	need musl-gcc musl-tools
	need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
	need qemu-aarch64-static qemu-user-static
	need zsh zsh
	need fish fish
	need python3 python3
	need groff groff-base
	need systemd-analyze systemd
	need script bsdutils
fi
# Without these the tests of podman and CRI-O, of Slurm, and of the page in a browser, are skipped (in CI: fail), and nothing else. podman's and Slurm's packages
# enable services of systemd, podman's a network for all CNI plugins, and chromium has 300 MB, which nobody has asked for on a machine of his own.
extras=()
if [[ ${CI:-} && $(id -u) -eq 0 ]]; then
	{ command -v podman && command -v conmon; } >/dev/null || extras+=(podman conmon)
	command -v chromium >/dev/null || extras+=(chromium)
	{ command -v slurmd && command -v slurmctld && command -v srun && [[ -e /usr/include/slurm/spank.h ]]; } >/dev/null ||
		extras+=(slurmd slurmctld slurm-client munge libslurm-dev)
fi
[[ ${#missing[@]} -eq 0 && ${#extras[@]} -eq 0 ]] && exit 0

[[ $(id -u) -eq 0 ]] || { echo "setup: ${missing[*]} missing: run as root, or install ${packages[*]}" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "setup: ${missing[*]} missing and there is no apt-get: install them by hand" >&2; exit 1; }

# Debian's packages start their daemons; a policy file is the documented way to ask them not to.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
	trap 'rm -f "$policy"' EXIT
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
echo "setup: installing for ${missing[*]} ${extras[*]}"
apt-get update -qq
available=()
for package in "${packages[@]}"; do
	apt-cache show "$package" >/dev/null 2>&1 && available+=("$package")
done
# A machine that has just booted may be busy with its own upgrades.
install() { apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends "$@" >/dev/null; }
[[ ${#available[@]} -eq 0 ]] || install "${available[@]}"
[[ ${#extras[@]} -eq 0 ]] || install "${extras[@]}" || echo "setup: ${extras[*]} could not be installed: their tests will fail" >&2
for command in "${missing[@]}"; do
	if [[ $command != docker-init ]] && ! command -v "$command" >/dev/null; then
		echo "setup: $command is still missing after apt-get install ${available[*]}" >&2
		exit 1
	fi
done
