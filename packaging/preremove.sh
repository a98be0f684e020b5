#!/bin/sh
# Called by dpkg as `remove` or `upgrade VERSION`, by rpm with the number of versions that stay.
set -e
case $1 in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
	for unit in /usr/lib/systemd/system/cgpu-*.service; do
		if [ -e "$unit" ]; then
			systemctl disable --now "${unit##*/}" || true
		fi
	done
fi
echo "cgpu: an engine whose configuration still names cgpu-runtime starts no container with it any more (cgpu uninstall, before the package)"
