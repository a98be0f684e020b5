#!/usr/bin/env bash
# Compares pkg/rm with gVisor's structures. pkg/rm/parity is a module of its own, and the only one that needs gVisor:
# where that cannot be had (no module proxy), this says so and is no fault of the code.
set -euo pipefail
cd "$(dirname "$0")/../pkg/rm/parity"
if ! go mod download gvisor.dev/gvisor >/dev/null 2>&1; then
	echo "parity: gVisor's module cannot be had here: skipped" >&2
	exit 0
fi
go vet ./...
go test ./...
