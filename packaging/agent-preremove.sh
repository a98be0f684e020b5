#!/bin/sh
# Called by dpkg as `remove` or `upgrade VERSION`, by rpm with the number of versions that stay.
set -e
case $1 in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
	systemctl disable --now cgpu-agent.service || true
fi
