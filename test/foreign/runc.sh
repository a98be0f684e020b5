#!/usr/bin/env bash
# Runs runc's own tests (bats) three times: with runc, with cgpu-runtime before it, and with a limit in every container besides. What
# differs from the first is printed; a difference that is in order has a line in runc-known.txt with its reason.
# usage: hack/with-node.sh -- test/foreign/runc.sh CHECKOUT [FILE.bats…]
# CHECKOUT is a work tree of github.com/opencontainers/runc of the installed runc's version. Needs bats, jq, gawk, busybox-static.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
checkout=$(readlink -f "$1")
shift
work=$(mktemp -d)
# OUT: a folder that keeps what bats said.
# shellcheck disable=SC2317 # trap calls it
finish() {
	[[ ! ${OUT:-} ]] || { mkdir -p "$OUT" && cp "$work"/*.tap "$OUT"/; }
	rm -rf "$work"
}
trap finish EXIT

mkdir -p "$work/tests" "$work/contrib/cmd/recvtty"
cp -r "$checkout/tests/integration" "$work/tests/"
(cd "$checkout" && CGO_ENABLED=0 go build -mod=vendor -o "$work/contrib/cmd/recvtty/recvtty" ./contrib/cmd/recvtty)

# The image: without a network there is only the machine's busybox.
image=$work/rootfs
mkdir -p "$image"/{bin,dev,proc,sys,tmp,root,etc,home,lib,var/lib}
cp /bin/busybox "$image/bin/"
busybox --list | grep -vx busybox | while read -r name; do ln -sf busybox "$image/bin/$name"; done
printf 'root:x:0:0:root:/root:/bin/sh\n' >"$image/etc/passwd"
printf 'root:x:0:\n' >"$image/etc/group"
tar -C "$image" -cf "$work/busybox.tar" .
printf '#!/bin/sh\necho "BUSYBOX_IMAGE=%s DEBIAN_IMAGE=%s HELLO_IMAGE=%s"\n' "$work/busybox.tar"{,,} >"$work/tests/integration/get-images.sh"

tests=$work/tests/integration
cp "$tests/helpers.bash" "$work/helpers.bash"
# shellcheck disable=SC2016 # for the shell of the tests
limited='
eval "plain_$(declare -f runc_spec)"
runc_spec() { plain_runc_spec && update_config ".process.env += [\"ALIYUN_COM_GPU_MEM_CONTAINER=64MiB\"]"; }
'

# pass NAME RUNTIME: the tests' outcomes, one a line, sorted.
pass() {
	local file
	for file in "${files[@]}"; do
		# Some want a terminal.
		RUNC=$2 timeout 300 script -q -e -c "bats --formatter tap $tests/$file" /dev/null </dev/null | tr -d '\r' >"$work/$1.$file.tap" || true
		sed -n "s/^\(ok\|not ok\) [0-9]* \(.*\)/$file \2: \1/p" "$work/$1.$file.tap" | sed 's/ # skip.*: ok$/: skip/'
	done | sort >"$work/$1"
	echo "$1: $(grep -c ': ok$' "$work/$1" || true) ok, $(grep -c ': not ok$' "$work/$1" || true) not ok, $(grep -c ': skip$' "$work/$1" || true) skipped"
}

files=("$@")
[[ ${#files[@]} -gt 0 ]] || files=(create.bats cwd.bats delete.bats exec.bats hooks.bats kill.bats list.bats mask.bats mounts.bats pause.bats ps.bats
	root.bats run.bats spec.bats start.bats start_detached.bats start_hello.bats state.bats tty.bats umask.bats)
runc=$(jq -r '.config.runtimes[0] // "runc"' "$CGPU_RUN_DIR/node.json" 2>/dev/null || echo runc)
runc=$(command -v "$runc")
runtime=$CGPU_BIN/cgpu-runtime
pass runc "$runc"
pass plain "$runtime"
echo "$limited" >>"$tests/helpers.bash"
pass limit "$runtime"

bad=0
for mode in plain limit; do
	while IFS= read -r line; do
		test=${line%: *}
		known=
		while read -r in pattern reason; do
			# shellcheck disable=SC2053 # it is a pattern
			[[ $in == "$mode" && $test == $pattern ]] && known=$reason
		done < <(grep -v '^#' "$here/runc-known.txt")
		echo "$mode: $test: $(sed -n "s|^$(printf %s "$test" | sed 's/[].[*^$|]/\\&/g'): ||p" "$work/runc") with runc, ${line##*: } now${known:+ (known: $known)}"
		if [[ -z $known ]]; then
			bad=1
			sed -n "/^not ok [0-9]* .*${test#* }/,/^\(ok\|not ok\) /p" "$work/$mode.${test%% *}.tap" 2>/dev/null | sed '1d;$d' | head -"${LINES_SHOWN:-12}"
		fi
	done < <(comm -13 "$work/runc" "$work/$mode")
done
exit $bad
