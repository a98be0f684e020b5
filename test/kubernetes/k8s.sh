#!/usr/bin/env bash
# A real Kubernetes on one machine, for tests: etcd, apiserver and scheduler, and with `node` also controller-manager,
# containerd, kubelet and cgpu. Nothing of the machine's own Kubernetes, containerd or cgpu is touched.
#
#   k8s.sh up control-plane     no root needed; nodes are objects that the test makes
#   k8s.sh up node              a node of this machine, in a pid and mount namespace of its own (root)
#   k8s.sh stop NAME [SIGNAL]   end a component (SIGKILL, else SIGNAL): etcd, kube-…, containerd or crio, kubelet
#   k8s.sh start NAME           and start it again, with configuration written anew from the variables below
#   k8s.sh check                the node is up and ready, or why not
#   k8s.sh reboot               as if the node's power failed: all its processes and all of its /run gone, then up again
#   k8s.sh exec COMMAND…        in the node's namespaces: ctr, cgpu, …
#   k8s.sh kubectl ARGUMENTS…   or: eval "$(k8s.sh env)"
#   k8s.sh down                 stop everything, remove everything but logs
#
# Variables, remembered from `up` on:
#   CGPU_K8S_DIR       work folder (default /tmp/cgpu-k8s). Short: unix sockets lie in it. bin/ in it by build.sh, images/ by images.sh
#   PORT_BASE          16440; eight ports from here on
#   NODE_NAME NODE_IP  node1; an address of this machine, or one that is made if it has none
#   GPUS GPU_MEMORY    4, 15GiB: of the simulated driver
#   CGPU_TEST_DRIVER   sim (default) or nvidia
#   CGPU_TOML          lines for the node's cgpu.toml
#   CGPU_PODS          allocated (default) or gpushare: cgpu install --pods
#   CGPU_BIN           cgpu's programs (default: bin/ of this checkout); on the node they are in CGPU_NODE_BIN (/opt/cgpu/bin)
#   CGPU_TEST_CRI      containerd (default) or crio: what is below the kubelet
#   CONTAINERD_BIN RUNC_BIN CNI_BIN   others than build.sh's (runc: than the machine's)
#   CRIO_BIN           CRI-O, with its pinns beside it (hack/engines.sh); podman and conmon must be in PATH
#   SCHED_EXTRA        file with lines for the KubeSchedulerConfiguration (extenders: …)
#   FEATURE_GATES RUNTIME_CONFIG      of every component; of the apiserver
#   KEEP_CONFIGURATION not remembered: start containerd with the configuration that is there
#   EMULATED_VERSION   such as 1.34: the control plane behaves as that version's, by Kubernetes' own emulation; the kubelet does not
set -euo pipefail
self=$(readlink -f "${BASH_SOURCE[0]}")
top=$(cd "${self%/*}/../.." && pwd)
dir=${CGPU_K8S_DIR:-${TMPDIR:-/tmp}/cgpu-k8s}
bin=$dir/bin run=$dir/run log=$dir/log pki=$dir/pki ns=$dir/run/ns

die() { echo "k8s: $*" >&2; exit 1; }

# ------------------------------------------------------------------------------------------------------------ settings
settings=(PORT_BASE NODE_NAME NODE_IP GPUS GPU_MEMORY CGPU_TEST_DRIVER CGPU_TOML CGPU_PODS CGPU_BIN CGPU_NODE_BIN CGPU_TEST_CRI
	CONTAINERD_BIN CRIO_BIN RUNC_BIN CNI_BIN SCHED_EXTRA FEATURE_GATES RUNTIME_CONFIG EMULATED_VERSION)
# What the caller sets beats what `up` was given.
if [[ -r $run/settings && ${1:-} != up ]]; then
	declare -A remembered
	# shellcheck source=/dev/null
	source "$run/settings"
	for name in "${settings[@]}"; do
		[[ -n ${!name+set} ]] || declare "$name=${remembered[$name]:-}"
	done
fi
node=${NODE_NAME:-node1}
cri=${CGPU_TEST_CRI:-containerd}
[[ $cri == containerd || $cri == crio ]] || die "CGPU_TEST_CRI=$cri: want containerd or crio"
port=${PORT_BASE:-16440}
etcd_port=$port peer_port=$((port + 1)) api_port=$((port + 3)) scheduler_port=$((port + 4)) manager_port=$((port + 5))
kubelet_port=$((port + 6)) healthz_port=$((port + 7))
node_bin=${CGPU_NODE_BIN:-/opt/cgpu/bin}
export KUBECONFIG=$run/admin.kubeconfig
PATH=$bin:$PATH:/usr/sbin:/sbin
# Processes of this cluster, and no others, have it in their environment.
export CGPU_K8S_RUN=$run

remember() {
	local name
	{
		echo 'remembered=('
		for name in "${settings[@]}"; do printf '[%s]=%q\n' "$name" "${!name:-}"; done
		echo ')'
	} >"$run/settings"
}

crio_bin() { echo "${CRIO_BIN:-$(command -v crio || echo none)}"; }
containerd_bin() { echo "${CONTAINERD_BIN:-$(command -v containerd || echo none)}"; }
containerd_major() { "$(containerd_bin)" --version | sed -E 's/^[^ ]+ [^ ]+ v?([0-9]+)\..*/\1/'; }
# Each version has a store of its own: an older one cannot read a newer one's.
containerd_root() { echo "$dir/run/containerd-$(containerd_major)"; }

# late WHAT: ends with the last complaints and lines of the node's logs.
late() {
	local name
	for name in init install "$cri" kubelet; do
		[[ -s $log/$name.log ]] || continue
		{
			echo "--- $name.log"
			grep -E '^[EF][0-9]{4} |level=(error|fatal)|^panic' "$log/$name.log" | tail -n 8
			echo ...
			tail -n 3 "$log/$name.log"
		} | cut -c1-300 >&2
	done
	die "$1: not ready in time; logs: $log"
}

# wait_for SECONDS WHAT COMMAND…
wait_for() {
	local deadline=$((SECONDS + $1)) what=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		((SECONDS < deadline)) || late "$what"
		sleep 0.2
	done
}

# ------------------------------------------------------------------------------------------------------- configuration
# user NAME TOKENS-FILE-LINE: a kubeconfig with a token of its own.
user() {
	local token
	token=$(openssl rand -hex 16)
	cat >"$run/$1.kubeconfig" <<-END
		apiVersion: v1
		kind: Config
		current-context: c
		contexts: [{name: c, context: {cluster: k, user: u}}]
		clusters: [{name: k, cluster: {server: "https://127.0.0.1:$api_port", certificate-authority: "$pki/apiserver.crt"}}]
		users: [{name: u, user: {token: "$token"}}]
	END
	echo "$token,$2" >>"$run/tokens.csv"
}

configure() {
	rm -rf "$run" "$log"
	mkdir -p "$run/pid" "$log" "$pki"
	(umask 077 && : >"$run/tokens.csv")
	[[ -s $pki/sa.key ]] || (umask 077 && openssl genrsa -out "$pki/sa.key" 2048 2>/dev/null)
	[[ -s $pki/kubelet-client.crt ]] || (umask 077 && openssl req -x509 -newkey rsa:2048 -nodes -days 3650 \
		-subj /O=system:masters/CN=apiserver -keyout "$pki/kubelet-client.key" -out "$pki/kubelet-client.crt" 2>/dev/null)
	user admin 'admin,admin,system:masters'
	user scheduler 'system:kube-scheduler,scheduler'
	user manager 'system:kube-controller-manager,manager,system:masters'
	user kubelet "system:node:$node,kubelet,system:nodes"
}

scheduler_configuration() {
	cat <<-END
		apiVersion: kubescheduler.config.k8s.io/v1
		kind: KubeSchedulerConfiguration
		clientConnection: {kubeconfig: "$run/scheduler.kubeconfig", qps: 500, burst: 1000}
		leaderElection: {leaderElect: false}
	END
	[[ -z ${SCHED_EXTRA:-} ]] || cat "$SCHED_EXTRA"
}

kubelet_configuration() {
	cat <<-END
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		address: "$NODE_IP"
		port: $kubelet_port
		healthzPort: $healthz_port
		readOnlyPort: 0
		authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: "$pki/kubelet-client.crt"}}
		authorization: {mode: Webhook}
		containerRuntimeEndpoint: unix:///run/$cri/$cri.sock
		cgroupDriver: cgroupfs
		failCgroupV1: false            # since 1.35 the kubelet does not start on cgroup v1 otherwise
		failSwapOn: false
		staticPodPath: "$run/manifests"
		resolvConf: ""
		clusterDNS: [10.214.0.10]      # where nobody answers
		enforceNodeAllocatable: [pods]
		maxPods: 150
		# What the apiserver's node authorizer does not know yet on a busy machine is forbidden, and tried again only then.
		syncFrequency: 5s
		serializeImagePulls: false
		imageGCHighThresholdPercent: 100
		imageGCLowThresholdPercent: 99
		evictionHard: {memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}
		shutdownGracePeriod: 0s
	END
}

# containerd_configuration RUNC: what an administrator's file has before `cgpu install containerd --kubernetes`.
containerd_configuration() {
	local runc=$1 cni=${CNI_BIN:-$bin/cni} cri
	[[ -x $cni/ptp ]] || die "CNI_BIN=$cni: the plugins ptp, host-local and loopback are not there: run build.sh node"
	if [[ $(containerd_major) == 1 ]]; then
		cri='io.containerd.grpc.v1.cri'
		cat <<-END
			version = 2
			[plugins."$cri"]
			  sandbox_image = "localhost/pause:cgpu"
		END
	else
		cri='io.containerd.cri.v1.runtime'
		cat <<-END
			version = 3
			[plugins."io.containerd.cri.v1.images".pinned_images]
			  sandbox = "localhost/pause:cgpu"
			[plugins."$cri"]
		END
	fi
	# Without CAP_SYS_RESOURCE runc may not lower oom_score_adj as the kubelet asks, and dies.
	echo '  restrict_oom_score_adj = true'
	echo "[plugins.\"$cri\".cni]"
	echo "  conf_dir = \"$run/cni\""
	if [[ $(containerd_major) == 1 ]]; then echo "  bin_dir = \"$cni\""; else echo "  bin_dirs = [\"$cni\"]"; fi
	cat <<-END
		[plugins."$cri".containerd.runtimes.runc]
		  runtime_type = "io.containerd.runc.v2"
		[plugins."$cri".containerd.runtimes.runc.options]
		  BinaryName = "$runc"
		  SystemdCgroup = false
	END
}

# What an administrator of CRI-O has before `cgpu install crio --kubernetes`. conmon, and with it the runtime, gets no other environment.
crio_configuration() {
	cat <<-END
		[crio]
		storage_driver = "overlay"
		[crio.api]
		listen = "/run/crio/crio.sock"
		[crio.runtime]
		cgroup_manager = "cgroupfs"
		conmon_cgroup = "pod"
		namespaces_dir = "/run/crio"
		pinns_path = "$(dirname "$(crio_bin)")/pinns"
		default_runtime = "lab"
		[crio.runtime.runtimes.lab]
		runtime_path = "$1"
		runtime_root = "/run/crio/lab"
		monitor_env = ["PATH=$PATH"]
		[crio.image]
		pause_image = "localhost/pause:cgpu"
		[crio.network]
		network_dir = "$run/cni"
		plugin_dirs = ["${CNI_BIN:-$bin/cni}"]
		[crio.nri]
		enable_nri = false
	END
}

cgpu_configuration() {
	local i
	cat <<-END
		driver = "${CGPU_TEST_DRIVER:-sim}"
		runtimes = ["$run/runc"]
	END
	[[ -z ${CGPU_TOML:-} ]] || echo "$CGPU_TOML"
	[[ ${CGPU_TEST_DRIVER:-sim} == sim ]] || return 0
	printf '[sim]\ndriver_version = "580.159.04"\n'
	for ((i = 0; i < ${GPUS:-4}; i++)); do
		printf '[[sim.gpus]]\nname = "Tesla T4"\nmemory = "%s"\n' "${GPU_MEMORY:-15GiB}"
	done
}

# An address that is not loopback, which the kubelet refuses; on a machine without network, one is made.
node_address() {
	NODE_IP=${NODE_IP:-$(hostname -I 2>/dev/null | cut -d' ' -f1)}
	[[ -z $NODE_IP ]] || return 0
	NODE_IP=10.215.0.1
	ip link show cgpu-k8s >/dev/null 2>&1 || ip link add cgpu-k8s type dummy
	ip addr replace "$NODE_IP/32" dev cgpu-k8s
	ip link set cgpu-k8s up
}

configure_node() {
	mkdir -p "$run/cni" "$run/kubelet" "$run/manifests" "$ns/etc/cgpu" "$ns$node_bin"
	cat >"$run/cni/10-ptp.conflist" <<-END
		{"cniVersion": "1.0.0", "name": "ptp", "plugins": [{"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local",
		 "dataDir": "/run/cni-ipam", "ranges": [[{"subnet": "10.213.0.0/22"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
	END
	"$top/hack/lab-runc.sh" "$run/runc" "${RUNC_BIN:-$(command -v runc)}"
	kubelet_configuration >"$run/kubelet.yaml"
	copy_cgpu
}

# The administrator's part, by cgpu's own command.
install_cgpu() {
	rm -rf "${run:?}/$cri" && mkdir -p "$run/$cri/crio.conf.d"
	local file=$run/$cri/config.toml
	"${cri}_configuration" "$run/runc" >"$file"
	[[ $cri == containerd ]] || file=$run/crio/crio.conf.d/99-cgpu.conf
	cgpu_configuration >"$ns/etc/cgpu/cgpu.toml"
	in_node env PATH="$(dirname "$("${cri}_bin")"):$PATH" "$node_bin/cgpu" install "$cri" --kubernetes ${CGPU_PODS:+--pods "$CGPU_PODS"} \
		--config "$file" >>"$log/install.log" 2>&1 || die "cgpu install $cri --kubernetes: $(tail -n 1 "$log/install.log")"
	# At boot this is done by cgpu-refresh.service.
	in_node "$node_bin/cgpu" refresh >>"$log/install.log" 2>&1 || die "cgpu refresh: $(tail -n 1 "$log/install.log")"
}

# A copy: `make build` beside a running cluster must not change it. `k8s.sh start cgpu` copies anew, as an upgrade does.
copy_cgpu() {
	local from=${CGPU_BIN:-$top/bin} file
	[[ -x $from/cgpu-runtime ]] || die "CGPU_BIN=$from: cgpu-runtime is not there: run make build"
	for file in "$from"/*; do
		[[ $file != *.json ]] || continue
		cp "$file" "$ns$node_bin/.new" && mv "$ns$node_bin/.new" "$ns$node_bin/${file##*/}"
	done
}

# ---------------------------------------------------------------------------------------------------------- processes
in_node() { nsenter --target "$(<"$run/init.pid")" --mount --pid -- "$@"; }

# spawn NAME [in_node] COMMAND…: in a session of its own; its number, as its own pid namespace counts, in run/pid/NAME.
spawn() {
	local name=$1
	shift
	local enter=()
	if [[ $1 == in_node ]]; then
		enter=(nsenter --target "$(<"$run/init.pid")" --mount --pid --)
		shift
	fi
	rm -f "$run/pid/$name"
	# shellcheck disable=SC2016  # expanded by that shell
	setsid "${enter[@]}" bash -c 'echo $$ >"$1.new" && mv "$1.new" "$1" && shift && exec "$@"' spawn "$run/pid/$name" "$@" \
		>>"$log/$name.log" 2>&1 </dev/null &
	disown
	wait_for 60 "$name" test -s "$run/pid/$name"
}
node_component() { [[ $1 == "$cri" || $1 == kubelet ]]; }

# No pipe into grep -q: what writes into it may die of SIGPIPE, and with pipefail that reads as "is not there".
alive() {
	local pid enter=()
	pid=$(cat "$run/pid/$1" 2>/dev/null) || return 1
	! node_component "$1" || enter=(in_node)
	"${enter[@]}" grep -zqxF "CGPU_K8S_RUN=$run" "/proc/$pid/environ" 2>/dev/null
}

stop() {
	local name=$1 signal=${2:-KILL} pid
	if alive "$name"; then
		pid=$(<"$run/pid/$name")
		if node_component "$name"; then in_node kill -s "$signal" "$pid"; else kill -s "$signal" "$pid"; fi
		wait_for 180 "end of $name" not alive "$name"
	fi
	rm -f "$run/pid/$name"
}
not() { ! "$@"; }

start() {
	local name=$1 gates=${FEATURE_GATES:+--feature-gates=$FEATURE_GATES} extra=()
	local as=(${EMULATED_VERSION:+"--emulated-version=$EMULATED_VERSION"})
	! alive "$name" || die "start $name: it runs already"
	case $name in
	etcd)
		spawn etcd etcd --name e --data-dir "$run/etcd" --unsafe-no-fsync --log-level warn \
			--listen-client-urls "http://127.0.0.1:$etcd_port" --advertise-client-urls "http://127.0.0.1:$etcd_port" \
			--listen-peer-urls "http://127.0.0.1:$peer_port" --initial-advertise-peer-urls "http://127.0.0.1:$peer_port" \
			--initial-cluster "e=http://127.0.0.1:$peer_port"
		;;
	kube-apiserver)
		# Without a controller-manager there is no default ServiceAccount, and nobody takes the not-ready taint from the
		# nodes that a test makes.
		[[ -e $run/init.pid ]] || extra=('--disable-admission-plugins=ServiceAccount,TaintNodesByCondition')
		spawn kube-apiserver kube-apiserver --etcd-servers="http://127.0.0.1:$etcd_port" --cert-dir="$pki" \
			--bind-address=127.0.0.1 --secure-port="$api_port" --advertise-address=127.0.0.1 --endpoint-reconciler-type=none \
			--service-cluster-ip-range=10.214.0.0/24 --authorization-mode=Node,RBAC \
			--enable-admission-plugins=NodeRestriction "${extra[@]}" --token-auth-file="$run/tokens.csv" \
			--service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$pki/sa.key" \
			--service-account-signing-key-file="$pki/sa.key" --allow-privileged=true \
			--kubelet-client-certificate="$pki/kubelet-client.crt" --kubelet-client-key="$pki/kubelet-client.key" \
			--kubelet-preferred-address-types=InternalIP ${RUNTIME_CONFIG:+"--runtime-config=$RUNTIME_CONFIG"} \
			${gates:+"$gates"} "${as[@]}"
		wait_for 180 kube-apiserver kubectl get --raw /readyz
		;;
	kube-scheduler)
		scheduler_configuration >"$run/scheduler.yaml"
		spawn kube-scheduler kube-scheduler --config="$run/scheduler.yaml" --secure-port="$scheduler_port" --bind-address=127.0.0.1 \
			--cert-dir="$pki/scheduler" --authentication-tolerate-lookup-failure ${gates:+"$gates"} "${as[@]}"
		;;
	kube-controller-manager)
		spawn kube-controller-manager kube-controller-manager --kubeconfig="$run/manager.kubeconfig" --leader-elect=false \
			--bind-address=127.0.0.1 --secure-port="$manager_port" --cert-dir="$pki/manager" --root-ca-file="$pki/apiserver.crt" \
			--service-account-private-key-file="$pki/sa.key" --use-service-account-credentials ${gates:+"$gates"} "${as[@]}"
		;;
	containerd)
		[[ ${KEEP_CONFIGURATION:-} ]] || install_cgpu
		# Its shim must be the one of its version, and shims are found through PATH.
		spawn containerd in_node env PATH="$(dirname "$(containerd_bin)"):$PATH" "$(containerd_bin)" --config "$run/containerd/config.toml" \
			--root "$(containerd_root)"
		wait_for 180 containerd ctr version
		;;
	crio)
		install_cgpu
		spawn crio in_node "$(crio_bin)" --config "$run/crio/config.toml" --config-dir "$run/crio/crio.conf.d"
		wait_for 180 crio in_node curl -fs --unix-socket /run/crio/crio.sock http://localhost/info
		;;
	kubelet)
		spawn kubelet in_node kubelet --config="$run/kubelet.yaml" --kubeconfig="$run/kubelet.kubeconfig" \
			--hostname-override="$node" --node-ip="$NODE_IP" --cert-dir="$run/kubelet" --v=2 ${gates:+"$gates"}
		;;
	cgpu) copy_cgpu ;;
	*) die "start $name: want etcd, kube-apiserver, kube-scheduler, kube-controller-manager, $cri, kubelet or cgpu" ;;
	esac
}

ctr() { in_node "$(dirname "$(containerd_bin)")/ctr" -a /run/containerd/containerd.sock "$@" 2>>"$log/ctr.log"; }

# The node's own places. Those of /run are lost when it is rebooted.
volatile=(/run/containerd /run/netns /run/cdi /run/cgpu /run/cni-ipam)
[[ $cri != crio ]] || volatile+=(/run/crio /run/containers)
places=(/var/lib/kubelet /var/log/pods /var/log/containers /var/lib/cni /etc/cgpu /etc/cgpu.cgpu-backup "$node_bin" "${volatile[@]}")
[[ $cri != crio ]] || places+=(/etc/containers /var/lib/containers /var/lib/crio)

# The node's first process: private copies of every place that the node's programs write to, then a reaper.
init() {
	mount --make-rshared /
	local place
	for place in "${places[@]}"; do
		mount --bind "$ns$place" "$place"
		mount --make-rshared "$place"
	done
	echo ready >"$run/init.ready"
	trap 'exit 0' TERM
	while :; do
		sleep 86400 &
		wait -n || true
	done
}

# On cgroup v2 the controllers must be on for the children of the root, and a container's root may not have processes of
# its own then.
delegate_cgroups() {
	local root=/sys/fs/cgroup want
	[[ -e $root/cgroup.controllers && ! -e $root/memory ]] || return 0
	want=$(sed -E 's/(^| )([a-z_]+)/\1+\2/g' "$root/cgroup.controllers")
	if ! echo "$want" 2>/dev/null >"$root/cgroup.subtree_control"; then
		mkdir -p "$root/init"
		local pid
		while read -r pid; do echo "$pid" 2>/dev/null >"$root/init/cgroup.procs" || true; done <"$root/cgroup.procs"
		echo "$want" >"$root/cgroup.subtree_control" || true
	fi
}

power_on() {
	local place
	for place in "${places[@]}"; do
		# Mount points that the machine does not have are made, and remembered to be removed.
		if [[ ! -d $place ]]; then
			local made=$place
			while [[ ! -d ${made%/*} && ${made%/*} ]]; do made=${made%/*}; done
			mkdir -p "$place"
			while [[ $place != "${made%/*}" ]]; do echo "$place" && place=${place%/*}; done >>"$run/made"
		fi
	done
	for place in "${places[@]}"; do mkdir -p "$ns$place"; done
	delegate_cgroups
	rm -f "$run/init.ready"
	setsid unshare --pid --fork --kill-child --mount --mount-proc --propagation private -- "$self" _init >>"$log/init.log" 2>&1 </dev/null &
	echo $! >"$run/unshare.pid"
	disown
	wait_for 60 "the node's namespaces" test -s "$run/init.ready"
	pgrep -P "$(<"$run/unshare.pid")" | head -n 1 >"$run/init.pid"
}
power_off() {
	[[ -s $run/init.pid ]] || return 0
	# With its first process a pid namespace loses all others, and its mount namespace goes with the last.
	if grep -zqxF "CGPU_K8S_RUN=$run" "/proc/$(<"$run/init.pid")/environ" 2>/dev/null; then
		kill -KILL "$(<"$run/init.pid")" 2>/dev/null || true
		wait_for 180 'the end of the node' ended "$(<"$run/unshare.pid")"
	fi
	rm -f "$run/pid/$cri" "$run/pid/kubelet"
	local place
	for place in "${volatile[@]}"; do rm -rf "${ns:?}$place"; done
	find /sys/fs/cgroup -depth -type d -path '*/kubepods*' -exec rmdir {} + 2>/dev/null || true
}
gone() { [[ ! -e /proc/$1 || $(awk '{print $3}' "/proc/$1/stat" 2>/dev/null) == Z ]]; }
# A container that runc had just frozen would not die on cgroup v1: nobody is left to thaw it.
ended() {
	find /sys/fs/cgroup -path '*/kubepods/*' -name freezer.state -exec tee {} + <<<THAWED >/dev/null 2>&1 || true
	gone "$1"
}

# CRI-O takes no image from a file. podman has the same store, and a CRI-O that starts reads it.
load_images() {
	local image
	if [[ $cri == crio ]]; then
		[[ ! -e $ns/var/lib/containers/.images ]] || return 0
		echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$ns/etc/containers/policy.json"
		for image in "$dir"/images/*.tar; do
			in_node podman --storage-driver overlay --root /var/lib/containers/storage --runroot /run/containers/storage load -qi "$image" \
				>>"$log/images.log" 2>&1 || die "podman load: $(tail -n 1 "$log/images.log")"
		done
		touch "$ns/var/lib/containers/.images"
	elif [[ ! -e $(containerd_root)/.images ]]; then
		for image in "$dir"/images/*.tar; do ctr -n k8s.io images import "$image" >/dev/null; done
		touch "$(containerd_root)/.images"
	fi
}

node_up() {
	[[ $cri != crio ]] || load_images
	start "$cri"
	[[ $cri == crio ]] || load_images
	start kubelet
	wait_for 180 "node $node" kubectl get node "$node"
	kubelet_is_ready
}
# A condition that the last kubelet wrote says nothing, so its health is asked first.
kubelet_is_ready() {
	wait_for 180 kubelet curl -fs "http://127.0.0.1:$healthz_port/healthz"
	kubectl wait --for=condition=Ready "node/$node" --timeout=180s >/dev/null || late "node $node: $(kubectl get node "$node" \
		-o jsonpath='{range .status.conditions[*]}{.type}={.status} {.message}; {end}{.spec.taints}')"
}

# -------------------------------------------------------------------------------------------------------------- verbs
up() {
	local mode=${1:-control-plane}
	[[ $mode == node || $mode == control-plane ]] || die "up $mode: want control-plane or node"
	! alive etcd || die "up: this cluster is up already: k8s.sh down"
	[[ -x $bin/k8s ]] || die "$bin/k8s is not there: run build.sh $mode"
	if [[ $mode == node ]]; then
		[[ $(id -u) == 0 ]] || die "up node: containerd and kubelet need root: run as root"
		! ls -d /sys/fs/cgroup/kubepods /sys/fs/cgroup/*/kubepods >/dev/null 2>&1 || die "up node: another kubelet uses this machine's cgroups"
		[[ -e $dir/images/pause.tar ]] || die "$dir/images/pause.tar is not there: run images.sh"
		if [[ $cri == crio ]]; then
			[[ -x $(crio_bin) ]] || die "CRIO_BIN=$(crio_bin): is not there: run hack/engines.sh"
			{ command -v podman && command -v conmon; } >/dev/null ||
				die 'podman and conmon are not in PATH: apt-get install --no-install-recommends podman conmon'
		else
			[[ -x $(containerd_bin) ]] || die "CONTAINERD_BIN=$(containerd_bin): is not there: run build.sh node"
		fi
		node_address
	fi
	configure
	remember
	if [[ $mode == node ]]; then
		configure_node
		power_on
	fi
	start etcd
	start kube-apiserver
	start kube-scheduler
	[[ $mode != node ]] || start kube-controller-manager
	wait_for 180 'the default namespace' kubectl get namespace default
	wait_for 180 kube-scheduler curl -fsk "https://127.0.0.1:$scheduler_port/readyz"
	[[ $mode == node ]] || return 0
	node_up
	wait_for 180 'the default ServiceAccount' kubectl get serviceaccount default
}

down() {
	[[ -d $run ]] || return 0
	power_off
	local name place
	for name in kube-controller-manager kube-scheduler kube-apiserver etcd; do stop "$name"; done
	if [[ -s $run/made ]]; then
		# Deepest first, and only what is empty.
		sort -ru "$run/made" | while read -r place; do rmdir "$place" 2>/dev/null || true; done
	fi
	! ip link show cgpu-k8s >/dev/null 2>&1 || ip link del cgpu-k8s
	rm -rf --one-file-system "$run"
}

reboot() {
	power_off
	configure_node
	remember
	power_on
	node_up
}

case ${1:-} in
up) up "${2:-}" ;;
down) down ;;
stop) stop "${@:2}" ;;
start)
	remember
	# What it reads may have changed with the variables.
	! node_component "$2" || configure_node
	start "$2"
	[[ $2 != kubelet ]] || kubelet_is_ready
	;;
reboot) reboot ;;
check)
	for name in "$cri" kubelet; do alive "$name" || late "$name"; done
	kubelet_is_ready
	;;
exec) in_node env PATH="$node_bin:$PATH" "${@:2}" ;;
kubectl) exec "$@" ;;
env) echo "export KUBECONFIG=$KUBECONFIG PATH=$bin:\$PATH" ;;
_init) init ;;
*)
	sed -n '2,30s/^# \{0,1\}//p' "$self" >&2
	exit 2
	;;
esac
