#!/usr/bin/env bash
# Makes FILE a runc for labs. A lab may lack a capability (CAP_SYS_RESOURCE, say) or a controller that containers ask for; runc
# then refuses them, with cgpu or without. This runc drops what the lab lacks; where nothing is lacking, FILE is a link to runc.
# usage: lab-runc.sh FILE [RUNC]
set -euo pipefail
file=$1
runc=${2:-$(command -v runc)}

names=(CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
	NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE
	SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE
	AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF
	CHECKPOINT_RESTORE)
have=$((16#$(awk '/^CapBnd/ {print $2}' /proc/self/status)))
missing=()
for i in "${!names[@]}"; do
	((have >> i & 1)) || missing+=("CAP_${names[i]}")
done
# What is looked for in a container's configuration, and what takes it out.
found=() edits=()
if [[ ${#missing[@]} -gt 0 ]]; then
	found+=("\"$(IFS='|'; echo "${missing[*]}")\"")
	# shellcheck disable=SC2016  # jq's
	edits+=('(.process.capabilities[]? |= . - $ARGS.positional)')
fi
# Without CAP_SYS_RESOURCE nobody makes itself less likely to be killed, as CRI-O and the kubelet ask for.
if [[ " ${missing[*]} " == *" CAP_SYS_RESOURCE "* ]]; then
	found+=('"oomScoreAdj": *-')
	edits+=('del(.process.oomScoreAdj | select(. < 0))')
fi
# On cgroup v1 a controller may be in a v2 mount beside it, where runc does not look.
if [[ -d /sys/fs/cgroup/memory && ! -d /sys/fs/cgroup/hugetlb ]]; then
	found+=('"hugepageLimits"')
	edits+=('del(.linux.resources.hugepageLimits)')
fi
if [[ ${#edits[@]} -eq 0 ]]; then
	ln -sfn "$runc" "$file"
	exit
fi
pattern=$(IFS='|'; echo "${found[*]}") edit=$(IFS='|'; echo "${edits[*]}")
cat >"$file" <<-END
	#!/bin/bash
	bundle=.
	for ((i = 1; i < \$#; i++)); do
	  case \${!i} in --bundle|-b) j=\$((i + 1)); bundle=\${!j} ;; --bundle=*) bundle=\${!i#*=} ;; esac
	done
	if [[ " \$* " == *" create "* || " \$* " == *" run "* ]] && grep -qE '$pattern' "\$bundle/config.json" 2>/dev/null; then
	  jq -c --args '$edit' ${missing[*]} <"\$bundle/config.json" >"\$bundle/lab.json" &&
	    mv "\$bundle/lab.json" "\$bundle/config.json"
	fi
	exec $runc "\$@"
END
chmod 755 "$file"
