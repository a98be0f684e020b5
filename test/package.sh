#!/usr/bin/env bash
# Tests the packages that `make package` has put into OUT: built again elsewhere they are the same bytes; the deb installs,
# upgrades, runs and leaves nothing behind; arm64's programs are arm64's.
#
# The deb is installed in a chroot: one that debootstrap makes, where that is installed and reaches its mirror, else a folder
# with nothing but busybox. Nothing is installed on this machine.
# usage: package.sh NFPM OUT VERSION     (make package-test calls it; root)
# DEMO=1: run the checks of make demo with the package's programs, too. SUITE, MIRROR: debootstrap's.
set -euo pipefail
cd "$(dirname "$0")/.."
nfpm=$1 out=$2 version=$3
[[ $out == /* ]] || out=$PWD/$out
[[ $(id -u) -eq 0 ]] || { echo "package-test: chroot needs root: run as root" >&2; exit 1; }

work=$(mktemp -d)
finish() {
	# debootstrap, when it is interrupted, leaves /proc mounted.
	awk -v d="$work/" 'index($5, d) == 1 {print $5}' /proc/self/mountinfo | sort -r | xargs -r -n 1 umount
	rm -rf --one-file-system "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

passed=0
ok() { passed=$((passed + 1)); echo "  ok    $*"; }
fail() { echo "package-test: $*" >&2; exit 1; }
skip() { echo "  skip  $*"; }
one() { [[ $# -eq 1 && -e $1 ]] || fail "want one such file: $*"; echo "$1"; }

# Versions, by pairs that must be in this order for dpkg.
SOURCE_DATE_EPOCH=1700000000
export SOURCE_DATE_EPOCH
sorted=(1a2b3c4 v0.9.0-rc1 v0.9.0-rc1-3-gabcdef0 v0.9.0 v0.9.0-dirty v0.9.0-4-gabcdef0 v0.9.0-4-gabcdef0-dirty v0.9.0-12-gabcdef0 v0.10.0 v1.2.3)
before=
for described in "${sorted[@]}"; do
	now=$(packaging/version.sh "$described")
	[[ $now =~ ^[0-9][A-Za-z0-9.+~]*$ ]] || fail "$described: \"$now\" is no version for both deb and rpm"
	[[ -z $before ]] || dpkg --compare-versions "$before" lt "$now" || fail "$described: $now does not come after $before"
	before=$now
done
! packaging/version.sh 'v1 2' 2>/dev/null || fail "version.sh takes \"v1 2\""
unset SOURCE_DATE_EPOCH
ok "${#sorted[@]} versions in order"

# Again, from a copy at another path that git knows nothing of.
if epoch=$(git log -1 --format=%ct 2>/dev/null); then
	mkdir "$work/elsewhere"
	git ls-files -z --cached --others --exclude-standard | xargs -0 -r stat --printf '%n\0' 2>/dev/null |
		tar -c --null -T - | tar -x -C "$work/elsewhere"
	SOURCE_DATE_EPOCH=$epoch "$work/elsewhere/packaging/build.sh" "$nfpm" "$work/again" "$version" >/dev/null
	for file in "$out"/*.deb "$out"/*.rpm; do
		cmp "$file" "$work/again/${file##*/}" || fail "${file##*/}: not the same when it is built again"
	done
	[[ $(cd "$out" && ls -- *.deb *.rpm) == $(cd "$work/again" && ls) ]] || fail "not the same packages when they are built again"
	ok "the same bytes when they are built elsewhere"
	rm -rf "$work/elsewhere" "$work/again"
else
	skip "no git checkout: not built again"
fi

deb=$(one "$out"/cgpu_*_"$(dpkg --print-architecture)".deb)
flag=$(one "$out"/cgpu-gpus-flag_*_all.deb)

# A root to install in.
root=$work/root
mkdir "$root"
if command -v debootstrap >/dev/null && debootstrap --variant=minbase "${SUITE:-stable}" "$root" ${MIRROR:+"$MIRROR"} >"$work/log" 2>&1; then
	cp "$deb" "$flag" "$root/tmp/"
	in_root() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"; }
	dpkg_() { in_root dpkg "$@"; }
	deb=/tmp/${deb##*/} flag=/tmp/${flag##*/} how="a Debian chroot"
	full=1
else
	[[ ! -s $work/log ]] || { echo "debootstrap:" && tail -n 3 "$work/log"; } >&2
	skip "debootstrap is not installed or does not get through: a folder with busybox instead of a Debian"
	rm -rf --one-file-system "$root"
	mkdir -p "$root"/{bin,usr/bin,usr/lib,usr/share/doc,etc,tmp,var/lib/dpkg/{updates,info}}
	touch "$root/var/lib/dpkg/status"
	# dpkg takes away every folder that has become empty; a Debian's are not.
	touch "$root"/{etc,usr/bin,usr/lib,usr/share,usr/share/doc}/others
	cp "$(command -v busybox)" "$root/bin/busybox"
	for applet in sh cat env; do ln -s busybox "$root/bin/$applet"; done
	in_root() { chroot "$root" /bin/env -i PATH=/usr/bin:/bin HOME=/ "$@"; }
	# Its dependencies are nobody's there. The scripts of a package run inside.
	dpkg_() { dpkg --root="$root" --force-depends "$@" 2>>"$work/log"; }
	how="a folder with busybox"
	full=
fi

files() { (cd "$root" && find . -xdev \( -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache -o -path ./tmp \) -prune -o -print | sort); }
files >"$work/before"

dpkg_ -i "$deb" >"$work/said" || fail "dpkg -i: $(cat "$work/said" "$work/log")"
grep -q 'cgpu install --help' "$work/said" || fail "after installing it does not say what to do next: $(cat "$work/said")"
in_root cgpu version | grep -F "cgpu $version (" >/dev/null || fail "cgpu version: $(in_root cgpu version), want $version"
for command in spec km; do
	in_root cgpu "$command" --help | grep '^NAME' >/dev/null || fail "cgpu $command --help"
done
for program in cgpu cgpu-guard cgpu-hook cgpu-podresources cgpu-probe cgpu-refresh cgpu-runtime cgpu-sim; do
	[[ -x $root/usr/bin/$program ]] || fail "/usr/bin/$program is not there"
	[[ $program == cgpu-refresh ]] || ! readelf -l "$root/usr/bin/$program" | grep INTERP >/dev/null || fail "$program is not static"
	grep -q "^$program: go" "$root/usr/share/doc/cgpu/sbom.txt" || fail "$program is not in sbom.txt"
done
[[ -x $root/usr/lib/cgpu/cgpu-load ]] || fail "/usr/lib/cgpu/cgpu-load is not there, or not a program"
for file in lib/cgpu/libcgpu.so lib/systemd/system/cgpu-{refresh,km}.service lib/udev/rules.d/71-cgpu.rules lib/tmpfiles.d/cgpu.conf \
	share/bash-completion/completions/cgpu share/fish/vendor_completions.d/cgpu.fish share/zsh/vendor-completions/_cgpu; do
	[[ -s $root/usr/$file ]] || fail "/usr/$file is not there"
done
grep -q 'MIT License\|Permission is hereby granted' "$root/usr/share/doc/cgpu/third-party-licences.txt" || fail "third-party-licences.txt has no licences"
if grep -rqF /usr/local/bin "$root"/usr/lib/systemd/system/cgpu-* "$root/usr/share/doc/cgpu/configs"; then fail "a unit or an example names /usr/local/bin"; fi
if [[ $full ]]; then
	# Linked against this machine's C library; it must not want a newer one than the package says.
	status=0
	in_root cgpu-refresh -h >"$work/said" 2>&1 || status=$?
	grep -q -- -force "$work/said" || fail "cgpu-refresh -h: exit $status: $(cat "$work/said")"
fi
ok "installs and runs in $how"

# What links Kubernetes' client has packages of its own.
for program in cgpu-agent kubectl-cgpu; do
	[[ ! -e $root/usr/bin/$program ]] || fail "cgpu has $program, which has a package of its own"
	one "$out/${program}"_*_"$(dpkg --print-architecture)".deb >/dev/null
	for file in "$out/${program}"_*.deb; do
		mkdir "$work/own" && dpkg-deb -x "$file" "$work/own"
		[[ -x $work/own/usr/bin/$program ]] || fail "${file##*/}: lacks the program"
		! readelf -l "$work/own/usr/bin/$program" | grep INTERP >/dev/null || fail "${file##*/}: is not static"
		grep -q 'k8s.io/client-go' "$work/own/usr/share/doc/$program/sbom.txt" || fail "${file##*/}: sbom.txt has no Kubernetes"
		grep -q '==== k8s.io/client-go' "$work/own/usr/share/doc/$program/third-party-licences.txt" || fail "${file##*/}: lacks licences"
		case $program in
		cgpu-agent) want=(/usr/lib/systemd/system/cgpu-agent.service) ;;
		kubectl-cgpu) want=(/usr/bin/kubectl_complete-cgpu /usr/share/man/man1/kubectl-cgpu.1.gz) ;;
		esac
		for name in "${want[@]}"; do
			[[ -s $work/own$name ]] || fail "${file##*/}: without $name"
		done
		[[ $program != kubectl-cgpu || $(dpkg-deb -f "$file" Depends) == "" ]] || fail "${file##*/}: depends on $(dpkg-deb -f "$file" Depends), which a person's machine lacks"
		if [[ $program == kubectl-cgpu && $file == *_"$(dpkg --print-architecture)".deb ]]; then
			words=$(PATH=$work/own/usr/bin:/usr/bin:/bin "$work/own/usr/bin/kubectl_complete-cgpu" '')
			grep -qx inspect <<<"$words" || fail "kubectl_complete-cgpu: $words"
			"$work/own/usr/bin/kubectl-cgpu" version | grep -qxF "kubectl-cgpu $version" || fail "kubectl-cgpu version: $("$work/own/usr/bin/kubectl-cgpu" version)"
		fi
		rm -rf "$work/own"
	done
done
! grep -q 'k8s.io/client-go' "$root"/usr/share/doc/cgpu/{sbom,third-party-licences}.txt || fail "a program of cgpu links Kubernetes' client"
ok "cgpu-agent and kubectl-cgpu have packages of their own"

echo '# mine' >>"$root/etc/cgpu/cgpu.toml"
dpkg_ -i "$deb" >"$work/said" || fail "dpkg -i again: $(cat "$work/said" "$work/log")"
grep -q '^# mine' "$root/etc/cgpu/cgpu.toml" || fail "an upgrade has overwritten cgpu.toml"
! grep -q 'cgpu install' "$work/said" || fail "an upgrade tells what a first installation does"
dpkg_ -i "$flag" >"$work/said" || fail "dpkg -i ${flag##*/}: $(cat "$work/said" "$work/log")"
in_root nvidia-container-runtime-hook prestart || fail "nvidia-container-runtime-hook prestart: exit $?"
! in_root nvidia-container-runtime-hook 2>/dev/null || fail "nvidia-container-runtime-hook without arguments says nothing"
ok "upgrades, keeps cgpu.toml; cgpu-gpus-flag beside it"

dpkg_ -r cgpu-gpus-flag cgpu >"$work/said" || fail "dpkg -r: $(cat "$work/said" "$work/log")"
grep -q 'cgpu uninstall' "$work/said" || fail "removing it does not warn of engines: $(cat "$work/said")"
[[ -f $root/etc/cgpu/cgpu.toml ]] || fail "dpkg -r has taken cgpu.toml away"
dpkg_ -P cgpu >/dev/null || fail "dpkg -P: $(cat "$work/log")"
files >"$work/after"
diff "$work/before" "$work/after" || fail "it leaves files behind"
ok "removed and purged, nothing is left"

# The demo's containers with the package's programs, by a private dockerd on the simulated driver.
if [[ ${DEMO:-} ]]; then
	dpkg-deb -x "$out"/cgpu_*_"$(dpkg --print-architecture)".deb "$work/demo"
	CGPU_TEST_DRIVER=sim CGPU_BIN=$work/demo/usr/bin hack/demo.sh >"$work/said" 2>&1 || fail "demo: $(tail -n 20 "$work/said")"
	ok "the package's programs: $(tail -n 1 "$work/said")"
fi

# The other architecture, as far as it goes without such a machine.
if [[ -e $(echo "$out"/cgpu_*_arm64.deb) ]]; then
	# A folder in which dpkg installs it; only programs of this machine's architecture can be chroot'ed to, so the scripts have its busybox.
	bare=$work/arm64
	mkdir -p "$bare"/{bin,etc,tmp,usr/bin,usr/lib,var/lib/dpkg/{updates,info}}
	touch "$bare/var/lib/dpkg/status" "$bare"/{etc,usr/bin,usr/lib}/others
	cp "$(command -v busybox)" "$bare/bin/busybox"
	for applet in sh cat env; do ln -s busybox "$bare/bin/$applet"; done
	arm64_dpkg() { dpkg --root="$bare" --force-depends --force-architecture "$@" >"$work/said" 2>&1 || fail "arm64: dpkg $*: $(cat "$work/said")"; }
	arm64_dpkg -i "$out"/cgpu_*_arm64.deb
	programs=$(find "$bare/usr/bin" "$bare/usr/lib/cgpu" -type f ! -name others)
	for file in $programs; do
		readelf -h "$file" | grep AArch64 >/dev/null || fail "arm64: ${file##*/} is another architecture's"
	done
	if command -v qemu-aarch64-static >/dev/null; then
		qemu-aarch64-static "$bare/usr/bin/cgpu" version | grep 'linux/arm64' >/dev/null || fail "arm64: cgpu version"
		for program in cgpu-guard cgpu-hook cgpu-probe cgpu-runtime cgpu-sim; do # static; cgpu-refresh wants an arm64 C library
			said=$(qemu-aarch64-static "$bare/usr/bin/$program" --version 2>&1 </dev/null) || true
			[[ $said && ! $said =~ (panic:|qemu:) ]] || fail "arm64: $program --version: $said"
		done
		started=", and start (qemu)"
	fi
	arm64_dpkg -P cgpu
	for file in $programs; do [[ ! -e $file ]] || fail "arm64: $file is left"; done
	ok "arm64: installs and is removed; programs are arm64's${started:-}"
else
	skip "arm64: no package"
fi

if command -v rpm >/dev/null; then
	for file in "$out"/cgpu-[0-9]*.rpm; do
		list=$(rpm --dbpath "$work/rpmdb" -qpl "$file")
		for want in /etc/cgpu/cgpu.toml /usr/bin/cgpu-runtime /usr/lib/cgpu/libcgpu.so /usr/share/licenses/cgpu/LICENSE; do
			grep -qxF "$want" <<<"$list" || fail "${file##*/}: without $want"
		done
		[[ $(rpm --dbpath "$work/rpmdb" -qpc "$file") == /etc/cgpu/cgpu.toml ]] || fail "${file##*/}: cgpu.toml is no configuration file"
	done
	ok "rpm reads the rpm packages"
else
	skip "rpm is not installed: the rpm packages are not read"
fi
echo "package-test: $passed checks passed"
