#!/usr/bin/env bash
# Runs the tests of a module of its own, which is one because nothing else needs what it needs. Where that cannot be had (no module proxy),
# this says so, and is no fault of the code; CI must have it.
# usage: module.sh FOLDER MODULE
set -euo pipefail
cd "$(dirname "$0")/../$1"
if ! go mod download "$2" >/dev/null 2>&1; then
	echo "$1: $2 cannot be had here: skipped" >&2
	[[ -z ${CI:-} ]]
	exit
fi
go vet ./...
go test ./...
