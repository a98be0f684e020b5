// SPDX-License-Identifier: Apache-2.0

package main

// Sums of which a table has a row for each.
const (
	byGPU   = "sum by (instance, index, gpu) "
	byShare = "sum by (instance, index, namespace, pod, container, id) "
)

// Variables that dashboards have in common.
var (
	nodes      = variable{name: "instance", title: "Node", series: "cgpu_up", label: "instance"}
	oneNode    = variable{name: "instance", title: "Node", series: "cgpu_up", label: "instance", one: true}
	namespaces = variable{name: "namespace", title: "Namespace", series: "cgpu_container_info", label: "namespace"}
	pods       = variable{name: "pod", title: "Pod", series: `cgpu_container_info{namespace=~"$namespace"}`, label: "pod"}
	containers = variable{name: "container", title: "Container", label: "container",
		series: `cgpu_container_info{namespace=~"$namespace", pod=~"$pod"}`}
)

var dashboards = []dashboard{cluster, node, workload, chargeback}

var (
	ofGPUs        = []string{"instance", "index", "gpu"}
	gpuColumns    = []string{"Node", "GPU", "UUID"}
	ofShares      = []string{"instance", "index", "namespace", "pod", "container", "id"}
	shareColumns  = []string{"Node", "GPU", "Namespace", "Pod", "Container", "ID"}
	ofPayers      = []string{"namespace", "container"}
	payersColumns = []string{"Namespace", "Container"}
)

var cluster = dashboard{
	name: "cluster", title: "cgpu / Cluster",
	about: "All nodes: how much of the GPUs is promised, how much is used, and where room is left.", from: "now-6h",
	variables: []variable{nodes},
	rows: []row{
		{"Now", []panel{
			{kind: number, title: "Nodes", about: "Nodes whose ledger can be read.", unit: "short", width: 3,
				queries: []query{{expr: `sum(cgpu_up{instance=~"$instance"})`, legend: "nodes"}}},
			{kind: number, title: "Broken nodes",
				about: "Nodes that answer, but whose table or ledger cannot be read.", unit: "short", width: 3, redAbove: 1,
				queries: []query{{expr: `count(cgpu_up{instance=~"$instance"} == 0) or vector(0)`, legend: "nodes"}}},
			{kind: number, title: "GPUs", about: "GPUs that cgpu has.", unit: "short", width: 3,
				queries: []query{{expr: `count(cgpu_gpu_memory_bytes{instance=~"$instance"})`, legend: "GPUs"}}},
			{kind: number, title: "Containers", about: "Containers that have a share, or a whole GPU.", unit: "short", width: 3,
				queries: []query{{expr: `sum(cgpu_containers{instance=~"$instance"})`, legend: "containers"}}},
			{kind: number, title: "Memory promised", about: "The sum of all limits, as a part of all GPUs' memory.", unit: "percentunit", width: 3,
				queries: []query{{expr: `sum(cgpu_gpu_memory_reserved_bytes{instance=~"$instance"}) / sum(cgpu_gpu_memory_bytes{instance=~"$instance"})`,
					legend: "promised"}}},
			{kind: number, title: "GPU time used",
				about: "Of those GPUs' time that are shared; whole GPUs are not measured.", unit: "percentunit", width: 3,
				queries: []query{{legend: "used", expr: `sum(rate(cgpu_gpu_seconds_total{instance=~"$instance"}[$__rate_interval]))` +
					` / count(cgpu_gpu_seconds_total{instance=~"$instance"})`}}},
			{kind: number, title: "Largest share that fits",
				about: "The most memory that one GPU has left, among those with a free place.", unit: "bytes", width: 3,
				queries: []query{{legend: "free", expr: `max(cgpu_gpu_memory_bytes{instance=~"$instance"}` +
					` - cgpu_gpu_memory_reserved_bytes and cgpu_gpu_slots_free > 0) or vector(0)`}}},
			{kind: number, title: "Alerts", about: "Alerts of cgpu's that are firing.", unit: "short", width: 3, redAbove: 1,
				queries: []query{{expr: `count(ALERTS{alertname=~"Cgpu.+", alertstate="firing", instance=~"$instance"}) or vector(0)`,
					legend: "alerts"}}},
		}},
		{"Use", []panel{
			{kind: lines, title: "GPU time by node",
				about: "GPU seconds per second: 2 is as much as two GPUs that never rest.", unit: "short", width: 12, stacked: true,
				queries: []query{{expr: `sum by (instance) (rate(cgpu_gpu_seconds_total{instance=~"$instance"}[$__rate_interval]))`,
					legend: "{{instance}}"}}},
			{kind: lines, title: "GPU time by namespace",
				about: "GPU seconds per second of each namespace's containers.", unit: "short", width: 12, stacked: true,
				queries: []query{{expr: `sum by (namespace) (rate(cgpu_container_gpu_seconds_total{instance=~"$instance"}[$__rate_interval]))`,
					legend: "{{namespace}}"}}},
			{kind: lines, title: "Memory",
				about: "Of all GPUs: what they have, what is promised to containers, and what these use.", unit: "bytes", width: 12, queries: []query{
					{expr: `sum(cgpu_gpu_memory_bytes{instance=~"$instance"})`, legend: "GPUs"},
					{expr: `sum(cgpu_gpu_memory_reserved_bytes{instance=~"$instance"})`, legend: "promised"},
					{expr: `sum(cgpu_gpu_memory_used_bytes{instance=~"$instance"})`, legend: "used"}}},
			{kind: lines, title: "Memory promised by namespace",
				about: "The sum of the limits of each namespace's containers; whole GPUs have none.", unit: "bytes", width: 12, stacked: true,
				queries: []query{{expr: `sum by (namespace) (cgpu_container_memory_limit_bytes{instance=~"$instance"})`, legend: "{{namespace}}"}}},
			{kind: table, title: "GPUs",
				about: "Each GPU, with what is left of it.", width: 24, labels: ofGPUs, labelColumns: gpuColumns, queries: []query{
					{byGPU + `(cgpu_gpu_memory_bytes{instance=~"$instance"})`, "Memory", "bytes"},
					{byGPU + `(cgpu_gpu_memory_reserved_bytes{instance=~"$instance"})`, "Promised", "bytes"},
					{byGPU + `(cgpu_gpu_memory_used_bytes{instance=~"$instance"})`, "Used", "bytes"},
					{byGPU + `(cgpu_gpu_slots_free{instance=~"$instance"})`, "Free places", "short"},
					{byGPU + `(cgpu_gpu_promised_ratio{instance=~"$instance"})`, "Caps promised", "percentunit"},
					{byGPU + `(rate(cgpu_gpu_seconds_total{instance=~"$instance"}[$__rate_interval]))`, "GPU time", "percentunit"}}},
		}},
		{"Trouble", []panel{
			{kind: lines, title: "Refused allocations", about: "Allocations beyond a limit, in each step of the picture.", unit: "short", width: 8,
				queries: []query{{expr: `sum by (instance) (increase(cgpu_gpu_denied_allocations_total{instance=~"$instance"}[$__rate_interval]))`,
					legend: "{{instance}}"}}},
			{kind: lines, title: "Kills", about: "Processes that guards killed, in each step of the picture.", unit: "short", width: 8,
				queries: []query{{expr: `sum by (instance) (increase(cgpu_killed_processes_total{instance=~"$instance"}[$__rate_interval]))`,
					legend: "{{instance}}"}}},
			{kind: lines, title: "Guards that do not answer", about: "Their containers can allocate nothing any more.", unit: "short", width: 8,
				queries: []query{{expr: `sum by (instance) (cgpu_container_guard_up{instance=~"$instance"} == bool 0)`, legend: "{{instance}}"}}},
		}},
	},
}

var node = dashboard{
	name: "node", title: "cgpu / Node",
	about: "One node: its GPUs, who shares them, and what cgpu itself costs.", from: "now-6h", variables: []variable{oneNode},
	rows: []row{
		{"Now", []panel{
			{kind: number, title: "Driver known",
				about: "1 if this version of cgpu knows the driver; if not, new shares are refused.", unit: "short", width: 4, redBelow: 1,
				queries: []query{{expr: `cgpu_driver_known{instance=~"$instance"}`, legend: "known"}}},
			{kind: number, title: "NVML", about: "1 if NVML answers; nothing where it is not asked.", unit: "short", width: 4, redBelow: 1,
				queries: []query{{expr: `cgpu_nvml_up{instance=~"$instance"}`, legend: "up"}}},
			{kind: number, title: "Containers", about: "Containers that have a share, or a whole GPU.", unit: "short", width: 4,
				queries: []query{{expr: `cgpu_containers{instance=~"$instance"}`, legend: "containers"}}},
			{kind: number, title: "Guards that do not answer",
				about: "Their containers can allocate nothing any more.", unit: "short", width: 4, redAbove: 1,
				queries: []query{{expr: `sum(cgpu_container_guard_up{instance=~"$instance"} == bool 0) or vector(0)`, legend: "guards"}}},
			{kind: number, title: "Kills", about: "Processes that guards have killed since the boot.", unit: "short", width: 4,
				queries: []query{{expr: `cgpu_killed_processes_total{instance=~"$instance"}`, legend: "kills"}}},
			{kind: number, title: "Xid errors",
				about: "Critical errors of all GPUs since the exporter's start.", unit: "short", width: 4, redAbove: 1,
				queries: []query{{expr: `sum(cgpu_gpu_xid_errors_total{instance=~"$instance"})`, legend: "errors"}}},
		}},
		{"GPUs", []panel{
			{kind: lines, title: "GPU time", about: "The part of each GPU's time in which a container computes.", unit: "percentunit", width: 12,
				queries: []query{{expr: `rate(cgpu_gpu_seconds_total{instance=~"$instance"}[$__rate_interval])`, legend: "GPU {{index}}"}}},
			{kind: lines, title: "GPU time by container",
				about: "Who computes: the part of one GPU's time.", unit: "percentunit", width: 12, stacked: true,
				queries: []query{{expr: `rate(cgpu_container_gpu_seconds_total{instance=~"$instance"}[$__rate_interval])`,
					legend: "GPU {{index}} {{namespace}}/{{pod}} {{container}}"}}},
			{kind: lines, title: "Memory",
				about: "What is promised to containers of each GPU, and what they use.", unit: "bytes", width: 12, queries: []query{
					{expr: `cgpu_gpu_memory_bytes{instance=~"$instance"}`, legend: "GPU {{index}}"},
					{expr: `cgpu_gpu_memory_reserved_bytes{instance=~"$instance"}`, legend: "GPU {{index}} promised"},
					{expr: `cgpu_gpu_memory_used_bytes{instance=~"$instance"}`, legend: "GPU {{index}} used"}}},
			{kind: lines, title: "Memory by container", about: "What is charged to each container.", unit: "bytes", width: 12, stacked: true,
				queries: []query{{expr: `cgpu_container_memory_used_bytes{instance=~"$instance"}`,
					legend: "GPU {{index}} {{namespace}}/{{pod}} {{container}}"}}},
			{kind: lines, title: "Temperature", about: "By NVML.", unit: "celsius", width: 8,
				queries: []query{{expr: `cgpu_gpu_temperature_celsius{instance=~"$instance"}`, legend: "GPU {{index}}"}}},
			{kind: lines, title: "Power", about: "What the cards draw, by NVML.", unit: "watt", width: 8,
				queries: []query{{expr: `cgpu_gpu_power_watts{instance=~"$instance"}`, legend: "GPU {{index}}"}}},
			{kind: lines, title: "Errors",
				about: "Xid and ECC errors in each step of the picture, by NVML.", unit: "short", width: 8, queries: []query{
					{expr: `increase(cgpu_gpu_xid_errors_total{instance=~"$instance"}[$__rate_interval])`, legend: "GPU {{index}} Xid"},
					{expr: `increase(cgpu_gpu_ecc_errors_total{instance=~"$instance"}[$__rate_interval])`, legend: "GPU {{index}} ECC {{kind}}"}}},
			{kind: table, title: "Shares",
				about: "Who has what of this node's GPUs.", width: 24, labels: ofShares, labelColumns: shareColumns, queries: []query{
					{byShare + `(cgpu_container_memory_limit_bytes{instance=~"$instance"})`, "Limit", "bytes"},
					{byShare + `(cgpu_container_memory_used_bytes{instance=~"$instance"})`, "Used", "bytes"},
					{byShare + `(rate(cgpu_container_gpu_seconds_total{instance=~"$instance"}[$__rate_interval]))`, "GPU time", "percentunit"},
					{byShare + `(rate(cgpu_container_gpu_entitled_seconds_total{instance=~"$instance"}[$__rate_interval]))`, "Entitled", "percentunit"},
					{byShare + `(rate(cgpu_container_gpu_throttled_seconds_total{instance=~"$instance"}[$__rate_interval]))`, "Throttled", "percentunit"},
					{byShare + `(cgpu_container_denied_allocations_total{instance=~"$instance"})`, "Refused", "short"}}},
		}},
		{"What cgpu costs", []panel{
			{kind: lines, title: "Guards' CPU", about: "CPU time of all guards, as a part of one core.", unit: "percentunit", width: 8,
				queries: []query{{expr: `rate(cgpu_guards_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])`, legend: "guards"}}},
			{kind: lines, title: "Guards' memory",
				about: "Resident memory of all guards; what they share counts for each.", unit: "bytes", width: 8,
				queries: []query{{expr: `cgpu_guards_resident_memory_bytes{instance=~"$instance"}`, legend: "guards"}}},
			{kind: lines, title: "Driver calls",
				about: "Calls that guards were asked about, per second. Kernel launches are none.", unit: "cps", width: 8,
				queries: []query{{expr: `rate(cgpu_trapped_calls_total{instance=~"$instance"}[$__rate_interval])`, legend: "calls"}}},
		}},
	},
}

// chosen selects what the workload's dashboard is about.
const chosen = `{namespace=~"$namespace", pod=~"$pod", container=~"$container"}`

// chosenAnd is the same, for one more condition.
const chosenAnd = `{namespace=~"$namespace", pod=~"$pod", container=~"$container", `

// name is how a line of a container is called.
const name = "{{namespace}}/{{pod}} {{container}} GPU {{index}}"

var workload = dashboard{
	name: "workload", title: "cgpu / Workload",
	about:     "Pods or containers: what they have of their GPUs, what they use, and who else is on these. For 30 minutes to 7 days.",
	from:      "now-30m",
	variables: []variable{namespaces, pods, containers},
	rows: []row{
		{"Now", []panel{
			{kind: number, title: "Shares", about: "Shares of GPUs, one for each GPU of a container.", unit: "short", width: 4,
				queries: []query{{expr: `count(cgpu_container_info` + chosen + `)`, legend: "shares"}}},
			{kind: number, title: "Memory used",
				about: "Of the limits, by the container that is fullest.", unit: "percentunit", width: 4, redAbove: 0.95,
				queries: []query{{expr: `max(cgpu_container_memory_used_bytes` + chosen + ` / cgpu_container_memory_limit_bytes)`, legend: "used"}}},
			{kind: number, title: "GPU time", about: "GPU seconds per second, of all of them.", unit: "short", width: 4,
				queries: []query{{expr: `sum(rate(cgpu_container_gpu_seconds_total` + chosen + `[$__rate_interval]))`, legend: "GPUs"}}},
			{kind: number, title: "Refused allocations", about: "In the time that is shown.", unit: "short", width: 4, redAbove: 1,
				queries: []query{{expr: `sum(increase(cgpu_container_denied_allocations_total` + chosen + `[$__range]))`, legend: "refused"}}},
			{kind: number, title: "Kills",
				about: "Processes killed and RM clients freed by guards in the time that is shown.", unit: "short", width: 4, redAbove: 1,
				queries: []query{{expr: `sum(increase(cgpu_container_kills_total` + chosen + `[$__range]))`, legend: "kills"}}},
			{kind: number, title: "Paused", about: "Containers that are paused.", unit: "short", width: 4,
				queries: []query{{legend: "paused",
					expr: `count(count by (instance, id) (cgpu_container_info` + chosenAnd + `paused="true"})) or vector(0)`}}},
		}},
		{"Time", []panel{
			{kind: lines, title: "GPU time", about: "The part of one GPU's time that each has.", unit: "percentunit", width: 12,
				queries: []query{{expr: `rate(cgpu_container_gpu_seconds_total` + chosen + `[$__rate_interval])`, legend: name}}},
			{kind: lines, title: "Everybody on the same GPUs",
				about: "GPU time of all containers on these GPUs: who is beside the chosen ones.", unit: "percentunit", width: 12, stacked: true,
				queries: []query{{legend: name,
					expr: `rate(cgpu_container_gpu_seconds_total[$__rate_interval]) and on (instance, gpu) cgpu_container_info` + chosen}}},
			{kind: lines, title: "Entitled, and had", width: 8, unit: "percentunit",
				about: "What each was entitled to while it had work, less what it had: above 0 it is behind, below 0 others left it more.",
				queries: []query{{legend: name, expr: `rate(cgpu_container_gpu_entitled_seconds_total` + chosen + `[$__rate_interval])` +
					` - rate(cgpu_container_gpu_seconds_total` + chosen + `[$__rate_interval])`}}},
			{kind: lines, title: "Waiting", width: 8, unit: "short",
				about:   "Contexts that wait for their next turn in the middle of their work, in the mean: others compute.",
				queries: []query{{expr: `rate(cgpu_container_gpu_waiting_seconds_total` + chosen + `[$__rate_interval])`, legend: name}}},
			{kind: lines, title: "Throttled", width: 8, unit: "percentunit",
				about:   "The part of the time in which it had work and was off: outside of its cap's slot, in others' turns, or paused.",
				queries: []query{{expr: `rate(cgpu_container_gpu_throttled_seconds_total` + chosen + `[$__rate_interval])`, legend: name}}},
		}},
		{"Memory", []panel{
			{kind: lines, title: "Memory", about: "What is charged, and the limit.", unit: "bytes", width: 12, queries: []query{
				{expr: `cgpu_container_memory_used_bytes` + chosen, legend: name},
				{expr: `cgpu_container_memory_limit_bytes` + chosen, legend: name + " limit"}}},
			{kind: lines, title: "Spilled memory",
				about: "Memory of the host's in the place of the GPU's, where that is allowed.", unit: "bytes", width: 12,
				queries: []query{{expr: `cgpu_container_memory_spilled_bytes` + chosen, legend: name}}},
			{kind: lines, title: "Refused allocations", about: "In each step of the picture.", unit: "short", width: 12,
				queries: []query{{expr: `increase(cgpu_container_denied_allocations_total` + chosen + `[$__rate_interval])`, legend: name}}},
			{kind: lines, title: "Driver calls",
				about: "Calls that the guards were asked about, per second: allocations, not kernel launches.", unit: "cps", width: 12,
				queries: []query{{expr: `rate(cgpu_container_trapped_calls_total` + chosen + `[$__rate_interval])`,
					legend: "{{namespace}}/{{pod}} {{container}}"}}},
		}},
		{"Settings", []panel{
			{kind: table, title: "As set", about: "Weight, percent, priority and who enforces the limit, of each share.", width: 24,
				labels:       []string{"namespace", "pod", "container", "weight", "percent", "priority", "enforcement", "instance", "index"},
				labelColumns: []string{"Namespace", "Pod", "Container", "Weight", "Percent", "Priority", "Enforced by", "Node", "GPU"},
				queries: []query{{legend: "Shares", unit: "short",
					expr: `count by (namespace, pod, container, weight, percent, priority, enforcement, instance, index) (cgpu_container_info` + chosen +
						`)`}}},
		}},
	},
}

// payers selects who pays, in the series that the rules record.
const payers = `{namespace=~"$namespace", container=~"$container"}`

// Sums of what is recorded each minute, over the time that is shown.
const (
	usedHours     = `sum by (namespace, container) (sum_over_time(namespace_container:cgpu_gpu_seconds:rate5m` + payers + `[$__range])) / 60`
	entitledHours = `sum by (namespace, container) (sum_over_time(namespace_container:cgpu_gpu_entitled_seconds:rate5m` + payers +
		`[$__range])) / 60`
	reservedHours = `sum by (namespace, container) (sum_over_time(namespace_container:cgpu_gpus_reserved:sum` + payers + `[$__range])) / 60`
	memoryHours   = `sum by (namespace, container) (sum_over_time(namespace_container:cgpu_memory_used_bytes:sum` + payers + `[$__range]))` +
		` / 60 / 1024 / 1024 / 1024`
)

var chargeback = dashboard{
	name: "chargeback", title: "cgpu / Chargeback", from: "now/M",
	about: "What each namespace held and used, this month or in any other time. " +
		"Made of the recorded series, which begin when the rules are loaded.",
	variables: []variable{
		{name: "namespace", title: "Namespace", series: "namespace_container:cgpu_gpus_reserved:sum", label: "namespace"},
		{name: "container", title: "Container", label: "container",
			series: `namespace_container:cgpu_gpus_reserved:sum{namespace=~"$namespace"}`},
		{name: "price", title: "Price of a GPU hour", text: "2.00"},
	},
	rows: []row{
		{"Sum", []panel{
			{kind: number, title: "GPU hours held",
				about: "Of each GPU the part that the memory limit is of its memory, times the hours.", unit: "h", width: 6,
				queries: []query{{expr: `sum(` + reservedHours + `)`, legend: "held"}}},
			{kind: number, title: "GPU hours used", about: "GPU seconds by the driver's records, in hours.", unit: "h", width: 6,
				queries: []query{{expr: `sum(` + usedHours + `)`, legend: "used"}}},
			{kind: number, title: "GPU hours of nobody", unit: "h", width: 6,
				about: "In the GPUs' counters and in no container's: of containers that ended between two scrapes. All namespaces.",
				queries: []query{{legend: "nobody", expr: `clamp_min((sum_over_time(cluster:cgpu_gpu_seconds:rate5m[$__range])` +
					` - on () sum(sum_over_time(namespace_container:cgpu_gpu_seconds:rate5m[$__range]))) / 60, 0)`}}},
			{kind: number, title: "To pay for what was held", about: "GPU hours held, times the price.", unit: "short", width: 6,
				queries: []query{{expr: `sum(` + reservedHours + `) * $price`, legend: "held"}}},
		}},
		{"Who", []panel{
			{kind: table, title: "By namespace and container",
				about: "What each has to pay, for what it held and for what it used.", width: 24, labels: ofPayers,
				labelColumns: payersColumns, queries: []query{
					{reservedHours, "GPU hours held", "h"},
					{entitledHours, "GPU hours entitled", "h"},
					{usedHours, "GPU hours used", "h"},
					{`(` + usedHours + `) / (` + reservedHours + `)`, "Used of held", "percentunit"},
					{memoryHours, "GiB hours used", "short"},
					{`(` + reservedHours + `) * $price`, "To pay for held", "short"},
					{`(` + entitledHours + `) * $price`, "To pay for entitled", "short"},
					{`(` + usedHours + `) * $price`, "To pay for used", "short"}}},
			{kind: lines, title: "GPUs held", about: "By namespace.", unit: "short", width: 12, stacked: true,
				queries: []query{{expr: `sum by (namespace) (namespace_container:cgpu_gpus_reserved:sum` + payers + `)`, legend: "{{namespace}}"}}},
			{kind: lines, title: "GPUs used", about: "GPU seconds per second, by namespace.", unit: "short", width: 12, stacked: true,
				queries: []query{{expr: `sum by (namespace) (namespace_container:cgpu_gpu_seconds:rate5m` + payers + `)`, legend: "{{namespace}}"}}},
		}},
	},
}
