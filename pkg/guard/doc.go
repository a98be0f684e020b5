// SPDX-License-Identifier: Apache-2.0

// Package guard answers the NVIDIA driver calls of one container, from a process outside it.
//
// The container's seccomp filter hands every ioctl that could allocate device memory, or reach other tenants, to this
// process (seccomp user notification). The guard copies the call's structures once, checks the copies, carries the call
// out on its own copy of the task's file (pidfd_getfd), charges what it made, and writes the result back. Nothing that the
// container does to its memory or descriptors meanwhile can change what was checked; see docs/internals/guard.md.
//
// cmd/cgpu-guard is its only caller; cgpu-runtime starts that before the container exists.
//
// Read dispatch.go first: serve and handle are the main way of a call.
//
// # Where is what
//
//	start and end      guard.go (Guard, New), run.go (Run, what it waits for at the end), filters.go (seccomp listeners come and go),
//	                   config.go, status.go (control socket), ledgerwatch.go (the ledger's changes), events.go (what it tells), tally.go
//	a call's way       listener.go (workers), dispatch.go, call.go (copies), arena.go, execute.go (rule, plan, the driver is asked),
//	                   replay.go (answers that found nobody), linux.go and arch_*.go (kernel interfaces)
//	rules              escapes.go, alloc.go (RM_ALLOC by class), control.go (RM_CONTROL by control), uvm.go, checkversion.go;
//	                   present.go (answers as the container may see them)
//	who calls          task.go (threads and processes), procfs.go (threads, descriptors), cgroup.go, watcher.go (ends), kill.go
//	what it costs      bill.go, meter.go, bucket.go, slowcalls.go (those that hold the driver's locks)
//
//	the account        account.go (clients), objects.go, charges.go (memory and its references), limits.go (what fits), calllock.go
//	device memory      vidmem.go, vidheap.go (RM_VID_HEAP_CONTROL), virtual.go (address ranges, RM's page tables), dma.go (mapped there),
//	                   fabric.go (NVLink addresses), contextmemory.go
//	host memory        hostmemory.go, spill.go, kernelmap.go (mapped into the kernel)
//	managed memory     managed.go, managedlimit.go (its part of the account), spans.go (ranges), maps.go (/proc/PID/maps)
//	for the processor  windows.go (RM_MAP_MEMORY), taskwindows.go (RM_ALLOC_MEMORY)
//	for others         share.go (RM_SHARE), export.go (objects in files), lend.go, loans.go (to members of a trust domain)
//	UVM                uvm.go, uvmmaps.go (what is mapped), uvmranges.go, uvmspace.go (address spaces, channels), uvmtables.go
//	                   (page tables), zombies.go
//
//	channels           channels.go, groups.go, gpfifo.go (GPFIFO_SCHEDULE), preemption.go, notifiers.go (errors), userd.go
//	GPU time           gputime.go: what pkg/gpusched sees of the container
//	debuggers          debugger.go (kernels that fail, core dumps, cuda-gdb), profiler.go
//	files              files.go (open files), nodes.go (device nodes), clientfile.go (a client's, copied back), leases.go (held open),
//	                   osevents.go
//	RM clients         rootalloc.go (the call that runs in the task), rootfate.go (what became of it), whereabouts.go (of its thread),
//	                   rootsettled.go (whether somebody else made its client),
//	                   unseen.go, dependants.go (what ends with something else), wholeclient.go (channels that
//	                   nobody has seen made), audit.go (the driver's account), guardclient.go (the guard's own)
//	another program    upgrade.go (cgpu upgrade), park.go (how all comes to rest), snapshot.go, restore.go (the state)
//	another guard      books.go (what is written down), flight.go (calls under way), keep.go (the keeper), revive.go (a guard of the books),
//	                   rise.go, takeback.go (what was under way)
//	ends               teardown.go (channels, UVM address spaces), sweep.go (files that are closed), sentfds.go (files sent out of the
//	                   container), lookout.go (one guard looks for all), belongings.go (what is the container's)
//
// Packages beside it: journal and keeper (what outlives this process),
// guardcfg (its configuration), api (its answers), driver (NVIDIA's or the simulated one), handover (its state as
// data).
//
// # Locks
//
// Who holds one waits only for those further down. Down to Guard.rmClientMu the driver may be called with them held, from Guard.mu on not.
//
//	Guard.work         what the guard does by itself, held for reading; for writing it is only tried, as are all for a hand-over
//	task.mu            a thread's calls are served one after the other
//	managed.mu         managed memory; its holder looks through files, sweeps, and charges
//	sentFDs.mu, Guard.preemptMu, Guard.teardownMu, Guard.sweepTurnMu
//	                   one look at processes outside, at contexts that were made unseen, one end of an address space, one sweep in the
//	                   background at a time; none of these is taken with another
//	client.calls       calls that make, open or drop objects of an RM client; of two clients that with the smaller handle first (callLock).
//	                   A member of a trust domain waits with it for one of the server's, in another guard (borrow), and never the reverse
//	file.uvm           calls on a UVM address space, or on a file with exports, are recorded in the driver's order
//	Guard.sweepMu      one sweep at a time. It waits for no end of an address space; who needs its memory does, without the lock
//	UserPages.viewing, Scheduler.Lock, gpuScheduler.mu
//	                   pkg/gpusched's: pages of channels; who stops channels or lets them run. With them held it asks for the container,
//	                   and only tries for client.calls (tryLockCalls)
//	Guard.rootGate     no root alloc is let through while it is held for reading: memory is freed, channels are let run
//	Guard.windowsMu    windows that are over are looked at
//	hostPool.mu        host memory that is charged in large pieces
//	openRights.mu      an object of a client is opened, or closed again
//	books.commits      what was noted is written down
//	memoryCalls.looking  threads in RM_ALLOC_MEMORY are looked for; memoryCalls.mu below it is as account.mu
//	file.mu            a file's clients, exports, and what is mapped or registered in it
//	Guard.rmClientMu   the guard's own RM client is made
//	Guard.mu           what has no lock of its own
//	account.mu         clients, objects, charges, limits
//	taskTable.mu, watcher.mu, fileTable.mu, books.mu, keep.mu, bill.mu, bucket.mu, monitor.mu, event.Writer.mu, channelCount.mu
//	                   within a method; taskTable.mu before watcher.mu, and with it a task.mu is only tried for
package guard
