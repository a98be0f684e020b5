#!/usr/bin/env bash
# Runs every linter: gofmt, the length of lines, tests that skip, licence headers, go vet, the TOOLs (module/path@version, such as staticcheck) and,
# where it is present, shellcheck.
# usage: lint.sh TOOL...
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0

unformatted=$(git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0 -r gofmt -l)
if [[ $unformatted ]]; then
	printf 'lint: not gofmt-ed:\n%s\n' "$unformatted" >&2
	failed=1
fi

# Lines end before column 140. In Chinese a break would be a space, and generated pages are as their sources.
git ls-files -z --cached --others --exclude-standard '*.go' '*.md' ':!*.zh-CN.md' \
	':!docs/cli.md' ':!docs/reference.md' ':!docs/json.md' ':!docs/support.md' ':!docs/drivers.md' |
	xargs -0 -r go run ./hack/lines || failed=1

hack/license.sh --check || failed=1

go test ./pkg/testenv >/dev/null || { go test ./pkg/testenv >&2; failed=1; } # no test skips by itself

export GOFLAGS="${GOFLAGS:-} -tags=integration,kubernetes" # not every linter has an option for tags
go vet ./... || failed=1

# Not every machine can reach the module proxy; a tool's absence is said, not hidden, and is not a fault of the code. CI must have
# all of them: hack/setup.sh installs shellcheck there, and `make integration` needs the proxy, too.
absent() {
	echo "lint: $1: skipped" >&2
	[[ -z ${CI:-} ]] || failed=1
}
# hack/lint-known.txt has what is in the code for longer than the tool that finds it; it may only shrink.
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
all=1
for tool; do
	if GOBIN=$bin go install "$tool" 2>/dev/null; then
		name=${tool%@*}
		"$bin/${name##*/}" ./... >"$bin/said" 2>&1 || [[ -s $bin/said ]] || failed=1
		! grep -vFf hack/lint-known.txt "$bin/said" >&2 || failed=1
		cat "$bin/said" >>"$bin/all"
	else
		absent "$tool cannot be had here"
		all=
	fi
done
while [[ $all ]] && read -r line; do
	grep -qF "$line" "$bin/all" && continue
	printf 'lint: no tool finds it any more, take it out of hack/lint-known.txt: %s\n' "$line" >&2
	failed=1
done <hack/lint-known.txt

if command -v shellcheck >/dev/null; then
	{
		git ls-files -z --cached --others --exclude-standard '*.sh'
		git grep -lz --untracked -E '^#!(/usr)?/bin/(env )?(ba|da)?sh' -- ':!*.sh' ':!*.go' ':!*.md' # scripts without that ending
		printf 'cmd/cgpu/completion/cgpu.bash\0'
	} | xargs -0 shellcheck -x -P SCRIPTDIR || failed=1
else
	absent "shellcheck is not installed"
fi

exit "$failed"
