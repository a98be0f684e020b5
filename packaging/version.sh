#!/usr/bin/env bash
# Prints a package's version: what git describe says, in a form that deb and rpm both sort rightly. A candidate is before its
# release, work after a release behind it, and before the first release it goes by the commit's time (SOURCE_DATE_EPOCH).
# usage: version.sh DESCRIBED
set -euo pipefail
v=${1#v}
dirty=
[[ $v == *-dirty ]] && v=${v%-dirty} dirty=dirty
if [[ $v =~ ^([0-9]+\.[0-9]+\.[0-9]+)(-([A-Za-z][A-Za-z0-9.]*))?(-([0-9]+)-(g[0-9a-f]+))?$ ]]; then
	release=${BASH_REMATCH[1]} candidate=${BASH_REMATCH[3]} after=${BASH_REMATCH[5]} commit=${BASH_REMATCH[6]}
	echo "$release${candidate:+"~$candidate"}${after:+"+$after.$commit"}${dirty:+"$([[ $after ]] && echo . || echo +0.)$dirty"}"
elif [[ $v =~ ^[A-Za-z0-9.]+$ ]]; then
	echo "0.0.0~$(TZ=UTC date -d "@$SOURCE_DATE_EPOCH" +%Y%m%d.%H%M%S).$v${dirty:+.$dirty}"
else
	echo "package: version \"$1\": want what git describe says, such as v1.2.3 or v1.2.3-4-gabcdef0" >&2
	exit 1
fi
