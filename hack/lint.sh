#!/usr/bin/env bash
# Runs every linter: gofmt, go vet, the TOOLs (module/path@version, such as staticcheck), shellcheck where it is present.
# usage: lint.sh TOOL...
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0

unformatted=$(git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0 -r gofmt -l)
if [[ $unformatted ]]; then
	printf 'lint: not gofmt-ed:\n%s\n' "$unformatted" >&2
	failed=1
fi

go vet -tags integration,kubernetes ./... || failed=1

# Not every machine can reach the module proxy; a tool's absence is said, not hidden, and is not a fault of the code.
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
for tool; do
	if GOBIN=$bin go install "$tool" 2>/dev/null; then
		name=${tool%@*}
		"$bin/${name##*/}" -tags integration,kubernetes ./... || failed=1
	else
		echo "lint: $tool cannot be had here: skipped" >&2
	fi
done

if command -v shellcheck >/dev/null; then
	{
		git ls-files -z --cached --others --exclude-standard '*.sh'
		printf '.ci/run\0'
	} | xargs -0 shellcheck -x -P SCRIPTDIR || failed=1
else
	echo "lint: shellcheck is not installed: skipped" >&2
fi

exit "$failed"
