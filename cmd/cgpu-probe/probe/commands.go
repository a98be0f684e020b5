// SPDX-License-Identifier: Apache-2.0

// Package probe is what cgpu-probe does: a table of commands, and one of the ways around the limit (cases.go). The tables are what the
// usage, cgpu-probe list and docs/internals/probe.md are made of.
package probe

import (
	"fmt"
	"os"
	"slices"
)

// command is one sub-command; args come after its name.
type command struct {
	name, args, help string
	run              func(args []string) error
}

func commands() []command {
	return []command{
		{"list", "", "what there is, with what each shows", cmdList},
		{"self", "[--limit SIZE]", "what this process sees, and whether anything holds it to its limit: seccomp, guard, page, libraries, " +
			"memory", cmdSelf},
		{"meminfo", "[--json]", "total and free memory by every query", cmdMeminfo},
		{"gpus", "", "GPUs by every query, and nodes", onGPU(cmdGPUs)},
		{"pids", "", "processes on the GPU", onGPU(cmdPids)},
		{"alloc", "[--count N] [--free] SIZE", "allocate device memory", cmdAlloc},
		{"oom", "[--chunk SIZE]", "allocate until refused", cmdOOM},
		{"hold", "SIZE [SECONDS]", "allocate, print ready, wait for a signal or the end of the time", onGPU(cmdHold)},
		{"context", "[SECONDS]", "make the channel groups of a CUDA context, print ready, wait", counted(cmdContext)},
		{"threads", "N SIZE", "allocate and free in N threads", counted(cmdThreads)},
		{"fork", "N SIZE", "N processes that hold SIZE at once", counted(cmdFork)},
		{"dup", "[SIZE]", "duplicate a handle; memory counts once and lives until the last handle", cmdDup},
		{"dup-foreign", "CLIENT OBJECT", "try to duplicate another container's memory", onGPU(cmdDupForeign)},
		{"client-foreign", "CLIENT", "try to use another container's client", onGPU(cmdClientForeign)},
		{"guess", "[--clients N]", "sweep client handles", cmdGuess},
		{"export", "[--chunk SIZE] [--max N]", "allocate, export to a descriptor, free, repeat: the sum must stay bounded", cmdExport},
		{"signals", "[--timer 4ms] [--seconds 5] [--size SIZE]", "allocate and free under a storm of signals", cmdSignals},
		{"managed", "SIZE… [--hold SECONDS] [--free] [--announce] [--hostile]",
			"map managed memory; --hold 0: until a signal; --free: unmap after that and wait on; --announce: tell the guard, as the limiter " +
				"does", cmdManaged},
		{"page", "", "the vGPU page, and whether it can be written", cmdPage},
		{"lease", "", "hold leases on the files that were put into this container, and tell of each that somebody opens", cmdLease},
		{"bench", "N", "time per trapped call", cmdBench},
		{"work", "[--kernel 1ms] [--for 5s] [--gap 0] [--groups N] [--processes N] [--windows 1s] [--json]",
			"compute on the simulated driver; exit status 3 on a real one", cmdWork},
		{"load", "", "compute on the simulated driver as standard input says, in the words of cgpu-load: for cgpu doctor --measure", cmdLoad},
		{"send-fds", "SOCKET [SIZE]", "open the driver's nodes and send the descriptors to whoever connects, for recv-fds in another " +
			"container; with SIZE: those of a client that has so much", cmdSendFDs},
		{"recv-fds", "SOCKET [SECONDS]", "allocate all that can be had by descriptors from SOCKET, and hold it; exit status 0 if that is " +
			"refused; with SECONDS: hold the descriptors only", cmdRecvFDs},
		{"switch-modes", "", "how kernels are preempted in a context that nobody has told; in a container without a guard", cmdSwitchModes},
		{"vas-hold", "[--share TYPE] [--client]", "hold an address space and a context, for steal in another container; print their handles",
			cmdVASHold},
		{"steal", "CLIENT VASPACE CHANNEL", "have UVM take another container's address space and channel", cmdSteal},
		{"mps-control", "[-f]", "stand for nvidia-cuda-mps-control on the simulated driver, with -f as the daemon, and for its server",
			cmdMPSControl},
		{"mps-client", "[--size SIZE] [--hold SECONDS]", "make a context below the MPS server's channel group, and hold it and SIZE of memory",
			cmdMPSClient},
		{"stale-window", "", "what windows on freed memory show when another process has it; on the host, or without a guard", cmdStaleWindow},
		{"host-pages", "", "what the machine has available as host memory of the driver's is mapped, pinned, freed, unmapped; on a real one",
			onGPU(cmdHostPages)},
		{"gspheap", "", "memory of the GPU's firmware; on the host only", onGPU(cmdGSPHeap)},
		{"walk", "[--seed N] [--for 60s] [--procs 3] [--malformed] [--real] [--limit SIZE] [--sync STEPS] [--replay FILE] [--print] " +
			"[--trace]", "driver calls at random, in several processes", cmdWalk},
		{"walk-process", "", "what walk starts", cmdWalkProcess},
		{"hostile", "CASE|all|list [--tries N] [--keep] [--paused]", "try to get around the limit", cmdHostile},
	}
}

// Main runs the command that the arguments name, and returns the exit status.
func Main(args []string) int {
	cs := commands()
	if len(args) > 0 {
		if i := slices.IndexFunc(cs, func(c command) bool { return c.name == args[0] }); i >= 0 {
			if err := cs[i].run(args[1:]); err != nil {
				fmt.Fprintf(os.Stderr, "cgpu-probe: %s: %v\n", args[0], err)
				return 1
			}
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, "usage: cgpu-probe COMMAND [ARGUMENTS]")
	for _, c := range cs {
		fmt.Fprintf(os.Stderr, "  %s %s\n      %s\n", c.name, c.args, c.help)
	}
	return 2
}

// cmdList tells of all commands, and of the cases of hostile, one a line.
func cmdList([]string) error {
	for _, c := range commands() {
		print("%-16s %s", c.name, c.help)
	}
	for _, a := range attacks() {
		print("hostile %-20s %s", a.name, a.proves)
	}
	return nil
}
