#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the licence's identifier (SPDX) at the top of each Go file that has none. With --check it names them, and fails.
# usage: license.sh [--check]
set -euo pipefail
cd "$(dirname "$0")/.."
line='// SPDX-License-Identifier: Apache-2.0'
bare=$(git ls-files -z --cached --others --exclude-standard '*.go' | { xargs -0 -r grep -L "^$line\$" || true; })
[[ $bare ]] || exit 0
if [[ ${1-} == --check ]]; then
	printf 'lint: no "%s" (hack/license.sh puts it there):\n%s\n' "$line" "$bare" >&2
	exit 1
fi
while read -r file; do
	text=$(mktemp)
	{ printf '%s\n\n' "$line" && cat "$file"; } >"$text"
	cat "$text" >"$file" # its mode stays
	rm "$text"
done <<<"$bare"
