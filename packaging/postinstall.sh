#!/bin/sh
# Called by dpkg as `configure [OLD VERSION]`, by rpm with the number of versions installed. It starts nothing new and leaves
# the engines' configuration alone: that is for `cgpu install`, which the administrator calls.
set -e
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true
fi
# Where the administrator says so, containers that run go on with the new guard. One that cannot is told, and stays as it was.
if [ -e /etc/cgpu/upgrade-guards ]; then
	/usr/bin/cgpu upgrade --all || true
fi
if [ "$1" = 1 ] || { [ "$1" = configure ] && [ -z "$2" ]; }; then
	echo "cgpu: installed, and nothing uses it yet: cgpu install --help tells how engines come to, cgpu doctor what works here"
fi
