#!/usr/bin/env bash
# Makes all that a release consists of in a folder: packages, the agent's image, kubectl-cgpu for other machines, an SBOM and checksums.
# usage: release.sh NFPM OUT VERSION     (make release calls it)
# The checkout must be clean and at the tag VERSION; RELEASE_DRY_RUN=1 makes the same of any commit. ARCHES as for packaging/build.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
nfpm=$1 out=$2 version=$3
[[ $out && ! -e $out/go.mod ]] || { echo "release: \"$out\" is emptied: want a folder for the release alone" >&2; exit 1; }
[[ $out == /* ]] || out=$PWD/$out
[[ $PWD/ != "${out%/}/"* ]] || { echo "release: the checkout is in $out, which is emptied" >&2; exit 1; }
export LC_ALL=C TZ=UTC
umask 022

die() { echo "release: $*" >&2; exit 1; }

if [[ ${RELEASE_DRY_RUN:-} != 1 ]]; then
	[[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[A-Za-z][A-Za-z0-9.]*)?$ ]] || die "\"$version\": want a tag such as v1.2.3: git tag -s v1.2.3"
	[[ -z $(git status --porcelain) ]] || die "the checkout has changes: commit them, or take them away"
	[[ $(git describe --tags --exact-match 2>/dev/null) == "$version" ]] || die "HEAD is not the tag $version"
	awk -v want="## ${version#v}" '$0 == want || index($0, want " ") == 1 { found = 1 } END { exit !found }' CHANGELOG.md || die "CHANGELOG.md has no section \"## ${version#v}\""
fi
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

rm -rf "$out"
packaging/build.sh "$nfpm" "$out" "$version" >/dev/null

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
build() { # GOOS GOARCH COMMAND OUT
	GOOS=$1 GOARCH=$2 CGO_ENABLED=0 go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$version" -o "$4" "./cmd/$3"
}
for arch in ${ARCHES:-amd64 arm64}; do
	mkdir -p "$work/agent-$arch"
	build linux "$arch" cgpu-agent "$work/agent-$arch/cgpu-agent"
	IMAGE_ARCH=$arch test/kubernetes/mkimage.sh "cgpu-agent:${version#v}" "$work/agent-$arch" "$out/cgpu-agent-${version#v}-$arch.tar" /cgpu-agent
done
for target in linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64; do
	dir=$work/kubectl-${target/\//-}
	mkdir "$dir"
	exe=; [ "${target%/*}" != windows ] || exe=.exe
	build "${target%/*}" "${target#*/}" kubectl-cgpu "$dir/kubectl-cgpu$exe"
	install -m 0755 packaging/kubectl_complete-cgpu LICENSE -t "$dir"
	tar -C "$dir" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -c . | gzip -9n >"$out/kubectl-cgpu-${version#v}-${target/\//-}.tar.gz"
done
# The modules of every program, with versions and sums; each package has that of its own programs, too.
go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}{{end}}{{end}}' ./cmd/... | sort -u >"$out/sbom.txt"
(cd "$out" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" . && cat SHA256SUMS)
