#!/usr/bin/env bash
# Builds a real Prometheus from the Go module proxy, once, and prints its path: no registry, no release. It takes 10 to 20 minutes on two
# cores, so tests use it where somebody has built it; without it they parse what it would. Its pages are left out.
set -euo pipefail
version=v0.313.5 # of the module: Prometheus 3.13.5
cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
dir=${cache:-${TMPDIR:-/tmp}}/cgpu-prometheus/$version-$(go env GOARCH)
mkdir -p "$dir"
exec 9>"$dir/.lock"
flock 9
if [[ ! -x $dir/prometheus ]]; then
	cd "$dir"
	[[ -f go.mod ]] || go mod init prometheus.invalid >&2
	go get -tool "github.com/prometheus/prometheus/cmd/prometheus@$version" >&2
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o prometheus.new github.com/prometheus/prometheus/cmd/prometheus >&2
	mv prometheus.new prometheus
fi
echo "$dir/prometheus"
