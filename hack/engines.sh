#!/usr/bin/env bash
# Builds today's container engines from the Go module proxy alone, once, and prints their folder: containerd, its shim and ctr,
# dockerd, and CRI-O with its pinns. Distributions have those of years ago, which the tests use as well, or none.
#
# Two to three minutes on two cores with nothing cached, and two more for CRI-O. They lie below the user's cache folder, under their versions.
set -euo pipefail
containerd=v2.4.2
moby=v2.0.0-beta.24 # the number that Docker after 28 has as a Go module
crio=v1.34.0

cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
bin=${cache:-${TMPDIR:-/tmp}}/cgpu-engines/containerd-$containerd-moby-$moby-crio-$crio-$(go env GOARCH)
mkdir -p "$bin"
# The lock is for two who build at once.
exec 9>"$bin/.lock"
flock 9

export CGO_ENABLED=0 GOBIN=$bin GOTOOLCHAIN=local
# go install renames what it has linked: a program that is there is whole.
for program in containerd containerd-shim-runc-v2 ctr; do
	[[ -x $bin/$program ]] || go install -trimpath -ldflags "-s -w" \
		"github.com/containerd/containerd/v2/cmd/$program@$containerd" >&2
done
[[ -x $bin/dockerd ]] || go install -trimpath -ldflags "-s -w -X github.com/moby/moby/v2/dockerversion.Version=${moby#v}" \
	"github.com/moby/moby/v2/cmd/dockerd@$moby" >&2
# In its own folder, as go install wants the list of a module's versions, which not every proxy has. Without C it has no seccomp.
build_crio() {
	local source
	source=$(go mod download -json "github.com/cri-o/cri-o@$crio" | jq -r .Dir) &&
		(cd "$source" && go build -trimpath -ldflags "-s -w" -tags "containers_image_openpgp exclude_graphdriver_btrfs" -o "$bin/crio.new" ./cmd/crio) >&2 &&
		gcc -std=c99 -Os -static -o "$bin/pinns.new" "$source"/pinns/src/*.c >&2 &&
		mv "$bin/pinns.new" "$bin/pinns" && mv "$bin/crio.new" "$bin/crio"
}
[[ -x $bin/crio && -x $bin/pinns ]] || build_crio || echo "engines: CRI-O was not built, so its tests are skipped" >&2
echo "$bin"
