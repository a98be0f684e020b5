// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	dto "github.com/prometheus/client_model/go"
)

// series is a family of series. Their names and labels are an interface: some may be added, none renamed.
type series struct {
	name, help string
	kind       dto.MetricType
	of         scope
	labels     []string // beside those of the scope
	place      int      // in all
}

// scope is what there is a series for.
type scope int

const (
	ofNode scope = iota
	ofGPU
	ofVGPU      // of a container on a GPU
	ofContainer // as a whole, whatever it has GPUs
)

var (
	gpuLabels       = []string{"gpu", "index"}
	containerLabels = []string{"id", "namespace", "pod", "container"}
	scopeLabels     = map[scope][]string{ofNode: nil, ofGPU: gpuLabels, ofVGPU: append(gpuLabels[:2:2], containerLabels...),
		ofContainer: containerLabels}
)

// all lists the series in the order of the documentation.
var all []*series

func define(of scope, kind dto.MetricType, name, help string, labels ...string) *series {
	s := &series{name: "cgpu_" + name, help: help, kind: kind, of: of, labels: labels, place: len(all)}
	all = append(all, s)
	return s
}

const (
	gauge   = dto.MetricType_GAUGE
	counter = dto.MetricType_COUNTER
)

// Of the node.
var (
	up = define(ofNode, gauge, "up",
		"1 if the node's table and ledger could be read; if not there are no other series but those of the program.")
	buildInfo   = define(ofNode, gauge, "build_info", "1, with the version of the program that exports.", "version")
	nodeInfo    = define(ofNode, gauge, "node_info", "1, with the driver, nvidia or sim, and its version.", "driver", "driver_version")
	driverKnown = define(ofNode, gauge, "driver_known",
		"1 if this version of cgpu knows the driver's branch. If not, no container with a guard starts, unless allow_unknown_driver is set.")
	tableStale = define(ofNode, gauge, "node_table_stale",
		"1 if driver or configuration have changed since the node was looked at; the next container has it looked at again.")
	containers  = define(ofNode, gauge, "containers", "Containers in the ledger, which have vGPUs or whole GPUs.")
	guardsUp    = define(ofNode, gauge, "guards_up", "Guards that answer.")
	guardMemory = define(ofNode, gauge, "guards_resident_memory_bytes",
		"Resident memory of the guards that answer; what they share counts for each.")
	guardCPU   = define(ofNode, counter, "guards_cpu_seconds_total", "CPU time of the guards of all containers since the boot.")
	nodeCalls  = define(ofNode, counter, "trapped_calls_total", "Driver calls that guards were asked about, of all containers since the boot.")
	nodeKilled = define(ofNode, counter, "killed_processes_total",
		"Processes killed for memory beyond a limit or for what they had of the driver, of all containers since the boot.")
	nodeFreed = define(ofNode, counter, "freed_clients_total",
		"RM clients freed for memory that was not charged, of all containers since the boot.")
	nvmlUp = define(ofNode, gauge, "nvml_up", "1 if NVML answers; absent where it is not asked.")
)

// Of a GPU.
var (
	gpuInfo     = define(ofGPU, gauge, "gpu_info", "1, with the card's name, PCI address and policy in effect.", "name", "bus_id", "policy")
	gpuMemory   = define(ofGPU, gauge, "gpu_memory_bytes", "Memory of the GPU.")
	gpuReserved = define(ofGPU, gauge, "gpu_memory_reserved_bytes", "Sum of the containers' limits.")
	gpuUsed     = define(ofGPU, gauge, "gpu_memory_used_bytes", "Memory that is charged to containers with a guard or a page that answers.")
	gpuSlots    = define(ofGPU, gauge, "gpu_slots", "Containers that may share the GPU.")
	gpuFree     = define(ofGPU, gauge, "gpu_slots_free",
		"Containers that may still come, as far as their number goes. 0 beside one that has the whole GPU.")
	gpuPromised = define(ofGPU, gauge, "gpu_promised_ratio", "Sum of the hard caps, as a part of the GPU's time.")
	gpuTime     = define(ofGPU, counter, "gpu_seconds_total",
		"Time on the GPU of all containers since the boot, those that have ended too, by the driver's records of context switches; absent "+
			"where there are none.")
	gpuWaiting = define(ofGPU, counter, "gpu_waiting_seconds_total",
		"Time in which containers waited for their next turn in the middle of their work, of all since the boot.")
	gpuThrottled = define(ofGPU, counter, "gpu_throttled_seconds_total",
		"Time with work in which containers were off, of all since the boot.")
	gpuEntitled = define(ofGPU, counter, "gpu_entitled_seconds_total",
		"Time on the GPU that containers were entitled to, of all since the boot.")
	gpuDenied = define(ofGPU, counter, "gpu_denied_allocations_total",
		"Allocations refused because of a limit, of all containers since the boot, those that have ended too.")
	gpuTemperature = define(ofGPU, gauge, "gpu_temperature_celsius", "Temperature of the GPU, by NVML.")
	gpuPower       = define(ofGPU, gauge, "gpu_power_watts", "Power that the card draws, by NVML.")
	gpuECC         = define(ofGPU, counter, "gpu_ecc_errors_total",
		"ECC errors of the GPU's memories since the driver was loaded, by NVML; absent where ECC is off.", "kind")
	gpuHealthy = define(ofGPU, gauge, "gpu_healthy", "Whether cgpu health finds nothing wrong with the GPU; absent where nobody watches.")
	gpuXid     = define(ofGPU, counter, "gpu_xid_errors_total", "Critical Xid errors since the exporter's start, by NVML.")
)

// Of a container on a GPU.
var (
	vgpuInfo = define(ofVGPU, gauge, "container_info",
		"1, with the whole ID, who enforces the limit (guard, preload or driver), whether the GPU is the container's alone (native), "+
			"weight, percent (empty: no cap) and priority as set, whether the container is paused, by cgpu pause or by its engine, and the "+
			"trust domain that it computes in or is the MPS server of (empty: none).",
		"container_id", "enforcement", "native", "weight", "percent", "priority", "paused", "domain")
	vgpuLimit   = define(ofVGPU, gauge, "container_memory_limit_bytes", "Memory that the container may have; absent of a whole GPU.")
	vgpuUsed    = define(ofVGPU, gauge, "container_memory_used_bytes", "Memory that is charged to the container, managed memory included.")
	vgpuSpilled = define(ofVGPU, gauge, "container_memory_spilled_bytes",
		"Host memory in use in the place of the GPU's, which is not in what is used; absent where no spill is allowed.")
	vgpuTime = define(ofVGPU, counter, "container_gpu_seconds_total",
		"Time on the GPU, by the driver's records of context switches; absent where there are none, and of a whole GPU.")
	vgpuWaiting = define(ofVGPU, counter, "container_gpu_waiting_seconds_total",
		"Time from the end of a turn in the middle of work to the next turn, of each context; absent where GPU seconds are. "+
			"A program that waits for each kernel is not seen to wait for its turn.")
	vgpuThrottled = define(ofVGPU, counter, "container_gpu_throttled_seconds_total",
		"Time with work in which the container was off: outside of its cap's slot, while others' turns were, or paused; "+
			"absent where GPU seconds are.")
	vgpuEntitled = define(ofVGPU, counter, "container_gpu_entitled_seconds_total",
		"Time on the GPU that the container was entitled to while it had work: its part, by policy, weight and priority, "+
			"of what all had together, or its cap's; absent where GPU seconds are.")
	vgpuDenied = define(ofVGPU, counter, "container_denied_allocations_total",
		"Allocations refused because of the limit; absent in preload mode.")
)

// Of a container.
var (
	containerUp = define(ofContainer, gauge, "container_guard_up",
		"1 if the container's guard answers; absent in preload mode, where there is none.")
	containerCalls = define(ofContainer, counter, "container_trapped_calls_total",
		"Driver calls that the guard was asked about; absent in preload mode.")
	containerKills = define(ofContainer, counter, "container_kills_total",
		"Processes killed and RM clients freed by the guard; absent in preload mode.")
)
