#!/usr/bin/env bash
# Runs every fuzz target of the module, one after another, each for FUZZTIME.
# usage: fuzz.sh FUZZTIME
set -euo pipefail
cd "$(dirname "$0")/.."
fuzztime=${1:?usage: fuzz.sh FUZZTIME}
count=0
while IFS=: read -r file target; do
	echo "fuzz: ${file%/*} $target for $fuzztime"
	go test -run '^$' -fuzz "^${target}\$" -fuzztime "$fuzztime" "./${file%/*}"
	count=$((count + 1))
done < <(git grep --untracked -oP '^func \KFuzz\w+(?=\(f \*testing\.F\))' -- '*_test.go')
echo "fuzz: $count targets ran for $fuzztime each"
[[ $count -gt 0 ]]
