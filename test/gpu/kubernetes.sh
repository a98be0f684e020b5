#!/usr/bin/env bash
# cgpu on a real Kubernetes node with a real GPU: real PyTorch in pods that share it, by claims and by aliyun.com/gpu-mem, with the
# limits and shares of Docker's containers. As root, with what test/kubernetes/build.sh and images.sh made; takes about four minutes.
# Every check runs, whatever failed before; the last line is "gpu: N passed, M failed".
#   CGPU_K8S_DIR=FOLDER CGPU_BIN=FOLDER OUT=FOLDER test/gpu/kubernetes.sh         (ONLY=REGEX: the checks whose names match)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
export CGPU_TEST_DRIVER=nvidia CGPU_K8S_DIR=${CGPU_K8S_DIR:?set it to the folder of the Kubernetes binaries}
export PATH=$CGPU_K8S_DIR/bin:$PATH KUBECONFIG=$CGPU_K8S_DIR/run/admin.kubeconfig
log=${OUT:?set OUT to a folder for the logs}/kubernetes.log
: >"$log"
k8s() { "$top/test/kubernetes/k8s.sh" "$@"; }
# shellcheck source=test/gpu/host.sh
source "$here/host.sh" # compile, check, near, number

# An image with the machine's own userland, whose folders are mounted into the pods.
host_image() {
	local root name
	root=$(mktemp -d)
	mkdir -p "$root"/{dev,proc,sys,tmp,run,usr,opt,root,var/tmp,mnt}
	chmod 755 "$root"
	chmod 1777 "$root/tmp"
	cp -a /etc "$root/etc"
	for name in bin sbin lib lib32 lib64; do
		if [[ -L /$name ]]; then cp -a "/$name" "$root/$name"; else mkdir -p "$root/$name"; fi
	done
	"$top/test/kubernetes/mkimage.sh" localhost/host:cgpu "$root" "$CGPU_K8S_DIR/images/host.tar" || return 1
	rm -rf "$root"
}

# pod NAME RESOURCES COMMAND…: runs to its end; RESOURCES are YAML (flow style) of the container, CLAIM of the pod.
pod() {
	local name=$1 resources=$2 words=() word claims=''
	shift 2
	[[ -z ${CLAIM:-} ]] || claims="resourceClaims: [{name: gpu, resourceClaimName: $CLAIM}]"
	for word in "$@"; do words+=("$(jq -Rn --arg w "$word" '$w')"); done
	local command
	command=$(IFS=,; echo "${words[*]}")
	kubectl apply -f - >/dev/null <<-END
		apiVersion: v1
		kind: Pod
		metadata: {name: $name, annotations: {${ANNOTATIONS:-}}}
		spec:
		  ${CLASS-runtimeClassName: cgpu}
		  restartPolicy: Never
		  terminationGracePeriodSeconds: 0
		  automountServiceAccountToken: false
		  containers:
		  - name: c
		    image: localhost/host:cgpu
		    imagePullPolicy: Never
		    command: [$command]
		    env: [{name: PATH, value: "$(dirname "$python"):/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"}${VARIABLES:+, $VARIABLES}]
		    resources: $resources
		    volumeMounts: [{name: usr, mountPath: /usr}, {name: opt, mountPath: /opt}]
		  volumes: [{name: usr, hostPath: {path: /usr}}, {name: opt, hostPath: {path: /opt}}]
		  $claims
	END
}
# claimed NAME REQUESTS PARAMETERS COMMAND…: a pod with a claim of its own; REQUESTS are capacities, PARAMETERS those of a
# VGPUConfig, both YAML and both may be empty.
claimed() {
	local name=$1 config='' capacity=''
	[[ -z $2 ]] || capacity=", capacity: {requests: {$2}}"
	[[ -z $3 ]] || config="config: [{opaque: {driver: gpu.cgpu.io, parameters: {apiVersion: cgpu.io/v1alpha1, kind: VGPUConfig, $3}}}]"
	kubectl apply -f - >/dev/null <<-END || return 1
		apiVersion: resource.k8s.io/v1
		kind: ResourceClaim
		metadata: {name: $name}
		spec:
		  devices:
		    requests: [{name: gpu, exactly: {deviceClassName: ${DEVICE_CLASS:-vgpu.cgpu.io}$capacity}}]
		    $config
	END
	CLAIM=$name pod "$name" '{claims: [{name: gpu}]}' "${@:4}"
}
ends() { # ends NAME: its output, when it is done
	kubectl wait --for=jsonpath='{.status.phase}'=Succeeded "pod/$1" --timeout="${2:-90}s" >/dev/null || {
		kubectl describe pod "$1" | tail -n 25
		kubectl logs "$1"
		return 1
	}
	kubectl logs "$1"
}
forget() { kubectl delete pod,resourceclaim --all --wait=true --timeout=60s >/dev/null; }
ledger_empty() { # what a pod held is given back within seconds of its end
	local i
	for ((i = 0; i < 50; i++)); do
		[[ $(k8s exec cgpu ps -q 2>/dev/null | wc -l) == 0 ]] && return
		sleep 0.2
	done
	k8s exec cgpu ps
	return 1
}

# deploy OVERLAY: as a user would adapt it to a cluster without registry, DNS and kube-proxy.
deploy() {
	local dir
	dir=$(mktemp -d "$top/test/gpu/deploy.XXXXXX")
	cat >"$dir/kustomization.yaml" <<-END
		apiVersion: kustomize.config.k8s.io/v1beta1
		kind: Kustomization
		resources: [../../../deploy/overlays/$1]
		images: [{name: cgpu-agent, newName: localhost/cgpu-agent, newTag: cgpu}]
		patches:
		- target: {kind: DaemonSet, name: cgpu-agent}
		  patch: |
		    - {op: add, path: /spec/template/spec/hostNetwork, value: true}
		    - {op: add, path: /spec/template/spec/containers/0/env/-, value: {name: KUBERNETES_SERVICE_HOST, value: 127.0.0.1}}
		    - {op: add, path: /spec/template/spec/containers/0/env/-, value: {name: KUBERNETES_SERVICE_PORT, value: "16443"}}
		    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --hook=/opt/cgpu/bin/cgpu-hook}
	END
	kubectl apply -k "$dir" >>"$log" 2>&1
	local status=$?
	rm -rf "$dir"
	[[ $status == 0 ]] || return 1
	kubectl -n cgpu-system rollout status daemonset/cgpu-agent --timeout=90s || {
		kubectl -n cgpu-system logs daemonset/cgpu-agent --tail=20
		return 1
	}
}

# ------------------------------------------------------------------------------------------------------------- checks
up() {
	k8s up node || return 1
	kubectl label node node1 node-restriction.kubernetes.io/cgpu=true gpushare=true >/dev/null
	kubectl get node node1 -o wide
}
slices() {
	local i
	for ((i = 0; i < 100; i++)); do
		kubectl get resourceslices -o json | jq -e '.items[].spec.devices[0]' >>"$log" 2>/dev/null && break
		sleep 0.3
	done
	kubectl get resourceslices -o json | jq -ce '.items[].spec.devices[] | {name, capacity: (.capacity | map_values(.value)), attributes: (.attributes | map_values(to_entries[0].value))}'
}
smi_in_pod() {
	claimed smi 'memory: 6Gi' '' nvidia-smi --query-gpu=memory.total,name --format=csv,noheader,nounits || return 1
	local out
	out=$(ends smi)
	forget
	echo "$out"
	[[ $out == 6144,* ]]
}
# Two pods fill their shares at the same time; each is refused at its own limit and goes on. PyTorch asks for 20 MiB at a time, so
# that what is left of 8 GiB may be less than that.
two_by_claims() {
	claimed a 'memory: 6Gi' '' "$python" "$built/oom.py" 2
	claimed b 'memory: 8Gi' '' "$python" "$built/oom.py" 2
	local a b
	if ! a=$(ends a) || ! b=$(ends b); then
		echo "$a ${b:-}"
		return 1
	fi
	forget
	printf '%s\n%s\n' "$a" "$b"
	near "$(number total_MiB <<<"$a")" 6144 0 && near "$(number used_MiB <<<"$a")" 6144 2 && grep -q 'goes on' <<<"$a" &&
		near "$(number total_MiB <<<"$b")" 8192 0 && near "$(number used_MiB <<<"$b")" 8192 20
}
# work NAME: the share of the GPU's time that a pod got, in percent
work() { kubectl logs "$1" | jq -s 'map(select(.final)) | map(.work_us / .seconds) | add / 10000 | round'; }
rate=
calibrate() {
	claimed rate 'memory: 4Gi' '' "$built/share" --calibrate || return 1
	rate=$(ends rate | jq -r .iters_per_us)
	forget
	echo "iters_per_us $rate"
	[[ $rate ]]
}
load() { echo "$built/share --iters-per-us $rate --seconds 5 --kernel-us 1000 --start-at $1"; }
weights() {
	local start=$(($(date +%s) + 12)) a b
	# shellcheck disable=SC2046  # words on purpose
	{
		claimed one 'memory: 4Gi' 'weight: 1' $(load "$start")
		claimed three 'memory: 4Gi' 'weight: 3' $(load "$start")
	}
	if ! ends one >/dev/null || ! ends three >/dev/null; then return 1; fi
	a=$(work one) b=$(work three)
	forget
	echo "weight 1: $a percent, weight 3: $b percent of the GPU"
	near "$a" 25 3 && near "$b" 75 3
}
cores() {
	local start=$(($(date +%s) + 12)) a
	# shellcheck disable=SC2046
	claimed capped 'memory: 4Gi, cores: 30' '' $(load "$start")
	ends capped >/dev/null || return 1
	a=$(work capped)
	forget
	echo "cores 30: $a percent of the GPU"
	near "$a" 30 3
}
whole() {
	DEVICE_CLASS=gpu.cgpu.io claimed whole '' '' nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits || return 1
	local out card
	out=$(ends whole)
	forget
	card=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
	echo "whole: $out of $card MiB"
	[[ $out == "$card" ]]
}
# One claim of two GPUs, whole and in shares, and NCCL between them. Only where there are two.
nccl() { # nccl CLASS CAPACITY TOTAL_MIB
	kubectl apply -f - >/dev/null <<-END || return 1
		apiVersion: resource.k8s.io/v1
		kind: ResourceClaim
		metadata: {name: two}
		spec:
		  devices:
		    requests:
		    - {name: one, exactly: {deviceClassName: $1$2}}
		    - {name: other, exactly: {deviceClassName: $1$2}}
		    constraints: [{requests: [one, other], distinctAttribute: gpu.cgpu.io/uuid}]
	END
	# Without multicast (NVLS), which virtual machines may lack, and without /dev/shm, which is small in a pod.
	VARIABLES='{name: NCCL_NVLS_ENABLE, value: "0"}, {name: NCCL_SHM_DISABLE, value: "1"}' CLAIM=two pod two '{claims: [{name: gpu}]}' "$python" "$built/nccl.py" || return 1
	local out
	out=$(ends two)
	forget
	echo "$out"
	echo "$out" | grep "gpus 2 total_MiB $3 sum_ok True"
}
liar() {
	VARIABLES='{name: ALIYUN_COM_GPU_MEM_CONTAINER, value: "60"}, {name: NVIDIA_VISIBLE_DEVICES, value: all}, {name: CGPU_DISABLE, value: "true"}' \
	ANNOTATIONS='cgpu.io/gpu-mem-container: "60"' \
		claimed liar 'memory: 3Gi' '' nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits
	local out
	out=$(ends liar)
	forget
	echo "$out"
	[[ $out == 3072 ]]
}
unallocated() {
	VARIABLES='{name: ALIYUN_COM_GPU_MEM_CONTAINER, value: "60"}' pod unallocated '{}' nvidia-smi
	local i out
	for ((i = 0; i < 60; i++)); do
		out=$(kubectl get events --field-selector involvedObject.name=unallocated -o jsonpath='{.items[*].message}')
		grep -q 'cgpu' <<<"$out" && grep -qi 'allocat' <<<"$out" && break
		sleep 0.5
	done
	forget
	echo "$out" | grep -o 'quota: .*\|admit: .*' | head -n 1 | cut -c 1-200 | grep .
}
plugin() {
	deploy device-plugin || return 1
	local i
	for ((i = 0; i < 100; i++)); do
		[[ $(kubectl get node node1 -o jsonpath='{.status.allocatable.aliyun\.com/gpu-mem}') -gt 0 ]] && break
		sleep 0.3
	done
	kubectl get node node1 -o json | jq -c '.status.allocatable | with_entries(select(.key | startswith("aliyun")))'
}
by_gpu_mem() {
	pod m6 '{limits: {aliyun.com/gpu-mem: 6}}' "$python" "$built/oom.py" 2
	pod m8 '{limits: {aliyun.com/gpu-mem: 8}}' "$python" "$built/oom.py" 2
	local a b
	if ! a=$(ends m6) || ! b=$(ends m8); then
		echo "$a ${b:-}"
		return 1
	fi
	forget
	printf '%s\n%s\n' "$a" "$b"
	near "$(number used_MiB <<<"$a")" "$(number total_MiB <<<"$a")" 2 && near "$(number used_MiB <<<"$b")" "$(number total_MiB <<<"$b")" 20 &&
		near "$(number total_MiB <<<"$a")" 6144 0 && near "$(number total_MiB <<<"$b")" 8192 0
}
core_percentage() {
	local start=$(($(date +%s) + 12)) a
	# shellcheck disable=SC2046
	pod p30 '{limits: {aliyun.com/gpu-mem: 6, aliyun.com/gpu-core.percentage: 30}}' $(load "$start")
	ends p30 >/dev/null || return 1
	a=$(work p30)
	forget
	echo "aliyun.com/gpu-core.percentage 30: $a percent of the GPU"
	near "$a" 30 3
}

# What a share adds to the start of a container in a pod: StartContainer of containerd, which has create and start of the runtime.
cost() {
	local i kind
	for ((i = 0; i < 15; i++)); do
		for kind in runc none claim; do
			case $kind in
			runc) CLASS='' pod "$kind-$i" '{}' sleep 1000 ;;
			none) pod "$kind-$i" '{}' sleep 1000 ;;
			claim) claimed "$kind-$i" 'memory: 1Gi' '' sleep 1000 ;;
			esac
			kubectl wait --for=jsonpath='{.status.phase}'=Running "pod/$kind-$i" --timeout=60s >/dev/null || return 1
			kubectl get pod "$kind-$i" -o jsonpath="{.status.containerStatuses[0].containerID} $kind{\"\n\"}" | sed 's,containerd://,,' >>"$OUT/cost.ids"
		done
	done
	forget
	k8s exec env PATH="$PATH" "$top/test/kubernetes/beside.sh" "$CGPU_K8S_DIR/images/host.tar" "$CGPU_K8S_DIR/run/runc" /opt/cgpu/bin/cgpu-runtime 15 \
		--mount type=bind,src=/usr,dst=/usr,options=rbind --mount type=bind,src=/opt,dst=/opt,options=rbind >"$OUT/cost.beside" || return 1
	"$python" - "$CGPU_K8S_DIR/log/containerd.log" "$OUT/cost.ids" "$OUT/cost.beside" <<-'END'
		import datetime, re, statistics, sys
		begun, took = {}, {}
		for at, id, done in re.findall(r'time="([^"]+)" level=info msg="StartContainer for \\"([0-9a-f]+)\\"( returns successfully)?', open(sys.argv[1]).read()):
		    at = datetime.datetime.fromisoformat(at[:26])
		    if done: took[id] = (at - begun[id]).total_seconds() * 1000
		    else: begun[id] = at
		kinds = {}
		for line in open(sys.argv[2]):
		    id, kind = line.split()
		    kinds.setdefault(kind, []).append(took[id])
		for line in open(sys.argv[3]):
		    kind, ms = line.split()
		    kinds.setdefault("without a pod, " + kind, []).append(float(ms))
		print("StartContainer, ms, median (least):", ", ".join(f"{k} {statistics.median(v):.1f} ({min(v):.1f})" for k, v in kinds.items()))
	END
}
agent_memory() {
	local pid
	pid=$(pgrep -x cgpu-agent | head -n 1)
	awk '/^Vm(HWM|RSS)|^RssAnon/ {printf "%s %d MiB ", $1, $2 / 1024}' "/proc/$pid/status"
}

trap 'k8s down' EXIT
compile || exit 1
host_image || exit 1
check 'a node' up
check 'the agent, by claims' deploy dra
check 'the GPU in a slice' slices
check 'nvidia-smi in a pod of 6Gi' smi_in_pod
check 'two pods of PyTorch by claims' two_by_claims
check 'what was held is given back' ledger_empty
calibrate || exit 1
check 'weights 1 and 3 by VGPUConfig' weights
check 'cores: 30' cores
check 'a whole GPU' whole
if [[ $(nvidia-smi -L | wc -l) -ge 2 ]]; then
	check 'NCCL on two whole GPUs' nccl gpu.cgpu.io '' 14....
	check 'NCCL on shares of two GPUs' nccl vgpu.cgpu.io ', capacity: {requests: {memory: 20Gi}}' 20480
fi
check 'a lying pod' liar
check 'a pod that names itself a GPU' unallocated
check 'the cost of a start' cost
check 'memory of cgpu-agent' agent_memory
check 'the agent, by the device plugin' plugin
check 'two pods of PyTorch by gpu-mem' by_gpu_mem
check 'gpu-core.percentage: 30' core_percentage
check 'nothing is left' ledger_empty
cp "$CGPU_K8S_DIR"/log/*.log "$OUT"/ 2>/dev/null
echo "gpu: $passed passed, $failed failed"
[[ $failed == 0 ]]
