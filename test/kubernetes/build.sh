#!/usr/bin/env bash
# Builds a real Kubernetes from the Go module proxy alone, once: no registry, no git clone, no release.
#
#   build.sh control-plane   etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kubelet, kubectl (bins/)
#   build.sh node            these, and containerd, its shim, ctr and the CNI plugins ptp, host-local, loopback
#   build.sh extender FOLDER gpushare's scheduler extender from a checkout of its own repository, as it is there
#
# Six minutes on two cores with nothing cached; nothing at all while bins/ and the versions below stay as they are: the
# programs lie below the user's cache folder under a name made from those. $CGPU_K8S_DIR/bin (default /tmp/cgpu-k8s) leads there.
#
# K8S_VERSION=v1.X.Y builds another Kubernetes than the one that bins/go.mod names; which there are: go list -m -versions k8s.io/kubernetes.
# CONTAINERD_VERSION=v1.7.X or v2.X.Y: another containerd. Give each a $CGPU_K8S_DIR of its own, and the tests the same.
#
# To move to another Kubernetes: K8S_VERSION=v1.X.Y build.sh control-plane, then take go.mod and go.sum from $CGPU_K8S_DIR/bin/module.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
containerd=${CONTAINERD_VERSION:-v2.4.2} cni=v1.9.1
case ${1:-} in control-plane | node | extender) ;; *) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac

dir=${CGPU_K8S_DIR:-${TMPDIR:-/tmp}/cgpu-k8s}
# Without a home there is no cache but the work folder.
cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
cache=${cache:-$dir/cache}/cgpu-k8s
key=$( (cd "$here" && cat bins/* && echo "$containerd $cni${K8S_VERSION:+ $K8S_VERSION}") | sha256sum | cut -c1-16)-$(go env GOARCH)
bin=$cache/$key
mkdir -p "$bin/cni" "$dir"
# The lock is for two who build at once.
exec 9>"$bin/.lock"
flock 9
ln -sfn "$bin" "$dir/bin"

export CGO_ENABLED=0
# have NAME…: whether all of them were built.
have() {
	local name
	for name in "$@"; do [[ -x $bin/$name ]] || return 1; done
}
# install FOLDER MODULE/{PACKAGE,…}@VERSION…; go install cannot be interrupted half-way: it renames what it has linked.
install() { GOBIN=$1 go install -trimpath -ldflags '-s -w' "${@:2}"; }

# other_version VERSION FOLDER: bins/ for another Kubernetes. Its go.mod names the staging modules that it has, and its etcd's version.
other_version() {
	local version=$1 folder=$2
	mkdir -p "$folder"
	cp "$here/bins/main.go" "$folder/"
	go mod download -json "k8s.io/kubernetes@$version" | jq -r .GoMod | xargs cat >"$folder/kubernetes.mod"
	{
		echo "module github.com/opencgpu/cgpu/test/kubernetes/bins"
		grep -E '^go ' "$folder/kubernetes.mod"
		echo "require k8s.io/kubernetes $version"
		echo "require $(grep -o 'go.etcd.io/etcd/client/v3 v[^ ]*' "$folder/kubernetes.mod" | sed s/client/server/)"
		sed -n "s|^.*\(k8s.io/[^ ]*\) => ./staging/.*|replace \1 => \1 v0${version#v1}|p" "$folder/kubernetes.mod"
	} >"$folder/go.mod"
	(cd "$folder" && go mod tidy)
}

components() {
	have k8s && return
	cd "$here/bins"
	if [[ ${K8S_VERSION:-} ]]; then
		other_version "$K8S_VERSION" "$bin/module"
		cd "$bin/module"
	fi
	local version major minor stamp=k8s.io/component-base/version
	version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
	IFS=. read -r major minor _ <<<"${version#v}"
	# kubectl cannot parse the version that an unstamped build has.
	go build -mod=readonly -trimpath -o "$bin/.k8s" -ldflags \
		"-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor -X $stamp.gitTreeState=clean" .
	local name
	for name in etcd kube-apiserver kube-scheduler kube-controller-manager kubelet kubectl; do ln -sfn k8s "$bin/$name"; done
	mv "$bin/.k8s" "$bin/k8s"
}

components
case $1 in
node)
	have containerd containerd-shim-runc-v2 ctr || install "$bin" github.com/containerd/containerd/v2/cmd/{containerd,containerd-shim-runc-v2,ctr}@"$containerd"
	have cni/ptp cni/loopback cni/host-local || install "$bin/cni" github.com/containernetworking/plugins/plugins/{main/ptp,main/loopback,ipam/host-local}@"$cni"
	;;
extender)
	(cd "${2:?build.sh extender FOLDER}" && go build -trimpath -ldflags '-s -w' -o "$bin/gpushare-extender" ./cmd)
	;;
esac
