#!/usr/bin/env bash
# Builds the packages (deb and rpm, amd64 and arm64) into a folder. The same source makes the same bytes: paths, times, the
# builder's name and whether git is there do not get in.
# usage: build.sh NFPM OUT VERSION     (NFPM is module/path@version; make package calls it)
# SOURCE_DATE_EPOCH: the time of all files; that of the commit by default. ARCHES: amd64 and arm64 by default.
set -euo pipefail
cd "$(dirname "$0")/.."
nfpm=$1 out=$2 version=$3
[[ $out == /* ]] || out=$PWD/$out
export LC_ALL=C TZ=UTC
umask 022

die() { echo "package: $*" >&2; exit 1; }

export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || true)}
[[ $SOURCE_DATE_EPOCH =~ ^[0-9]+$ ]] ||
	die "SOURCE_DATE_EPOCH=\"$SOURCE_DATE_EPOCH\": want seconds since 1970: this is no git checkout, so set it"

# The C compiler for an architecture, where there is one that can link: cgpu-refresh and what is in limiter/ need it.
compiler() {
	local arch=$1 cc
	case $arch in
	"$(go env GOHOSTARCH)") cc=${CC:-cc} ;;
	amd64) cc=x86_64-linux-gnu-gcc ;;
	arm64) cc=aarch64-linux-gnu-gcc ;;
	*) die "ARCHES: \"$arch\": want amd64 or arm64" ;;
	esac
	echo 'int main(void) { return 0; }' | "$cc" -x c -o /dev/null - 2>/dev/null && echo "$cc"
}

# Files as they lie on the target.
stage() {
	local arch=$1 cc=$2 stage=$3 all=$3/all command file name doc node=()
	mkdir -p "$all"/usr/{bin,lib/cgpu,share/doc/cgpu/docs} "$stage"/{deb,rpm,{agent,kubectl}/usr/bin}
	export GOOS=linux GOARCH=$arch
	for command in cmd/*; do
		command=${command#cmd/}
		local cgo=0 bin=$all/usr/bin
		# These two link client-go, which makes each larger than all others together: packages of their own.
		case $command in
		cgpu-refresh) cgo=1 ;;
		cgpu-agent) bin=$stage/agent/usr/bin ;;
		kubectl-cgpu) bin=$stage/kubectl/usr/bin ;;
		esac
		[[ $bin != "$all"/* ]] || node+=("./cmd/$command")
		CC=$cc CGO_ENABLED=$cgo CGO_CFLAGS="-O2 -Wno-deprecated-declarations" \
			go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$version" -o "$bin/$command" "./cmd/$command"
	done
	make -s -C limiter CC="$cc" OUT="$stage/limiter" >/dev/null
	install -m 0644 "$stage/limiter/libcgpu.so" "$all/usr/lib/cgpu/"
	install -m 0755 "$stage/limiter/cgpu-load" "$all/usr/lib/cgpu/"
	install -m 0644 configs/cgpu.toml "$stage/"

	# systemd's, with the packages' path where they name that of `make install`.
	unit() {
		local to=$all/$2
		[[ $1 == cgpu-agent.service ]] && to=$stage/agent/$2
		mkdir -p "$to"
		sed 's|/usr/local/bin/|/usr/bin/|g' "configs/$1" >"$to/$1"
	}
	for file in configs/*.service; do
		unit "${file#configs/}" usr/lib/systemd/system
	done
	unit 71-cgpu.rules usr/lib/udev/rules.d
	unit cgpu.conf usr/lib/tmpfiles.d

	# Man pages and completion tell of the commands, not of the machine: the builder's own cgpu writes them.
	mkdir -p "$all"/usr/share/{man/man1,bash-completion/completions,fish/vendor_completions.d} \
		"$stage"/{deb/usr/share/zsh/vendor-completions,rpm/usr/share/zsh/site-functions}
	"$tool" man "$all/usr/share/man/man1"
	gzip -9n "$all"/usr/share/man/man1/*.1
	"$tool" completion bash >"$all/usr/share/bash-completion/completions/cgpu"
	"$tool" completion fish >"$all/usr/share/fish/vendor_completions.d/cgpu.fish"
	"$tool" completion zsh >"$stage/deb/usr/share/zsh/vendor-completions/_cgpu"
	"$tool" completion zsh >"$stage/rpm/usr/share/zsh/site-functions/_cgpu"

	doc=$all/usr/share/doc/cgpu
	cp README*.md CHANGELOG.md SECURITY.md "$doc/"
	find docs -type f \( -name '*.md' -o -name '*.svg' \) -print0 | tar -c --null -T - | tar -x --no-same-owner -C "$doc"
	mkdir -p "$doc"/{configs,examples}
	install -m 0644 examples/*.yaml examples/README.md "$doc/examples/"
	install -m 0644 configs/* "$doc/configs/"
	sed -i 's|/usr/local/bin/|/usr/bin/|g' "$doc"/configs/*
	install -D -m 0644 LICENSE "$stage/deb/usr/share/doc/cgpu/copyright"
	install -D -m 0644 LICENSE "$stage/rpm/usr/share/licenses/cgpu/LICENSE"
	(cd "$all/usr/bin" && go version -m -- *) >"$doc/sbom.txt"
	licences "${node[@]}" >"$doc/third-party-licences.txt"
	for name in agent:cgpu-agent kubectl:kubectl-cgpu; do
		doc=$stage/${name%:*}/usr/share/doc/${name#*:}
		mkdir -p "$doc"
		install -m 0644 LICENSE "$doc/copyright"
		(cd "$stage/${name%:*}/usr/bin" && go version -m -- "${name#*:}") >"$doc/sbom.txt"
		licences "./cmd/${name#*:}" >"$doc/third-party-licences.txt"
	done
	install -m 0755 packaging/kubectl_complete-cgpu -t "$stage/kubectl/usr/bin"
	mkdir -p "$stage/kubectl/usr/share/man/man1"
	gzip -9nc packaging/kubectl-cgpu.1 >"$stage/kubectl/usr/share/man/man1/kubectl-cgpu.1.gz"
	install -m 0644 docs/kubectl.md -t "$stage/kubectl/usr/share/doc/kubectl-cgpu"

	# What is in a package has the commit's time and modes that do not depend on the checkout's.
	find "$stage" -type d -exec chmod 755 {} +
	find "$stage" -type f -not -path '*/usr/bin/*' -not -name cgpu-load -exec chmod 644 {} +
	find "$stage" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
}

# licences PACKAGES: of the modules that are linked into programs; most ask to be passed on with them.
licences() {
	local module dir file
	go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}}@{{.Version}} {{.Dir}}{{end}}{{end}}' "$@" | sort -u |
		while read -r module dir; do
			for file in "$dir"/{LICEN[CS]E,COPYING,NOTICE,License}*; do
				[[ -f $file ]] || continue
				printf '==== %s: %s ====\n\n' "$module" "${file##*/}"
				cat "$file"
				echo
			done
		done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PACKAGE_VERSION=$(packaging/version.sh "$version")
export PACKAGE_VERSION
tool=$work/cgpu
CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-X main.version=$version" -o "$tool" ./cmd/cgpu
mkdir -p "$out"
rm -f "$out"/*.deb "$out"/*.rpm
# nfpm is built for this machine, whatever it packs.
GOBIN=$work go install "$nfpm"
made=()
for arch in ${ARCHES:-amd64 arm64}; do
	if ! cc=$(compiler "$arch"); then
		echo "package: $arch: left out: no C compiler for it, which cgpu-refresh and libcgpu.so need (Debian: apt-get install crossbuild-essential-$arch)" >&2
		continue
	fi
	(stage "$arch" "$cc" "$work/$arch")
	GLIBC=$(readelf -V "$work/$arch/all/usr/bin/cgpu-refresh" "$work/$arch/all/usr/lib/cgpu/cgpu-load" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
	export ARCH=$arch STAGE=$work/$arch GLIBC=${GLIBC#GLIBC_}
	for kind in deb rpm; do
		for name in nfpm nfpm-agent nfpm-kubectl; do
			"$work/nfpm" package -f "packaging/$name.yaml" -p "$kind" -t "$out/" >/dev/null
		done
	done
	made+=("$arch")
done
[[ ${#made[@]} -gt 0 ]] || die "nothing was built"
export STAGE=$work/flag
install -D -m 0755 packaging/nvidia-container-runtime-hook -t "$STAGE/usr/bin"
install -D -m 0644 LICENSE "$STAGE/usr/share/doc/cgpu-gpus-flag/copyright"
find "$STAGE" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
for kind in deb rpm; do
	"$work/nfpm" package -f packaging/nfpm-gpus-flag.yaml -p "$kind" -t "$out/" >/dev/null
done
(cd "$out" && sha256sum -- *.deb *.rpm)
