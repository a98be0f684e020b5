#!/usr/bin/env bash
# Boots a Linux kernel in QEMU, emulated, with cgpu and the simulated driver, and tries there what a guard needs of a kernel: what `cgpu
# doctor` says of it, that a program under `cgpu run` gets its memory and no more, that its work is timed, and cgpu-probe's hostile cases (without
# those that count on a machine's speed). The caller brings the kernel (a package's vmlinuz), a static busybox, cgpu's programs, and, for
# cgpu-refresh, the C library they are linked with (a folder, put into /lib); all of the architecture that is tried.
#   test/kernel.sh [-a x86_64|aarch64] VMLINUZ BUSYBOX PROGRAMS LIBC
# Prints what it saw; the last line is "kernel: N passed, M failed". Ten minutes on 2 cores.
set -euo pipefail
arch=x86_64
if [[ ${1:-} == -a ]]; then
	arch=$2
	shift 2
fi
[[ $# -eq 4 ]] || { echo "usage: kernel.sh [-a ARCH] VMLINUZ BUSYBOX PROGRAMS LIBC" >&2; exit 2; }
kernel=$1 busybox=$2 programs=$3 libc=$4
case $arch in
x86_64) machine=() console=ttyS0 ;;
aarch64) machine=(-M virt) console=ttyAMA0 ;;
*) echo "kernel: architecture \"$arch\": want x86_64 or aarch64" >&2; exit 2 ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,dev,etc/cgpu,lib,lib64,proc,root,run,sys,tmp,usr/bin,var}
cp "$busybox" "$root/bin/busybox"
cp "$programs"/cgpu{,-guard,-hook,-probe,-refresh,-runtime,-sim} "$programs"/libcgpu.so "$root/usr/bin/"
cp -L "$libc"/{ld-linux*,libc.so.6} "$root/lib/" 2>/dev/null || true
cp -L "$libc"/{ld-linux*,libc.so.6} "$root/lib64/" 2>/dev/null || true
cat >"$root/init" <<'END'
#!/bin/busybox sh
export PATH=/usr/bin:/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t cgroup2 cg /sys/fs/cgroup
ip link set lo up
printf 'driver = "sim"\n' >/etc/cgpu/cgpu.toml
passed=0 failed=0
try() { # try NAME COMMAND…
	local name=$1
	shift
	if "$@" >/tmp/said 2>&1; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAIL  $name"
		tail -n 3 /tmp/said
	fi
}
exact() { cgpu run --memory 1GiB -- cgpu-probe oom | grep -qx total_mib=1024; }
echo "kernel: $(uname -srm)"
cgpu doctor -v 2>&1 | grep -E ' (kernel|seccomp-notify|pidfd-getfd|wait-killable|sync-wake-up|thread-pidfd|cgroup) '
try 'memory to the MiB' exact
try 'work' timeout 60 cgpu run --memory 1GiB -- cgpu-probe work --for 2s
for name in $(cgpu-probe hostile list | cut -d ' ' -f 1); do
	case $name in version | toctou* | busy* | bomb* | *threads | announce-race | xfer | map-dma) continue ;; esac # by so many calls
	try "$name" timeout 60 cgpu run --memory 1GiB -- cgpu-probe hostile "$name"
done
echo "kernel: $passed passed, $failed failed"
poweroff -f
END
chmod 755 "$root/init"
(cd "$root" && find . | "$(command -v busybox)" cpio -o -H newc 2>/dev/null | gzip -1) >"$work/initrd"
timeout 1200 "qemu-system-$arch" "${machine[@]}" -accel tcg,thread=multi -cpu max -smp 2 -m 1500 -nographic -no-reboot -nic none \
	-kernel "$kernel" -initrd "$work/initrd" -append "console=$console quiet panic=-1" | tr -d '\r' | sed -n '/kernel: Linux/,$p' | tee "$work/said"
grep -q 'kernel: [0-9]* passed, 0 failed' "$work/said"
