// SPDX-License-Identifier: Apache-2.0

//go:build integration

package main

import (
	"reflect"
	"testing"
)

// TestSplit: the parts of a start, from lines as the kernel's tracer writes them.
func TestSplit(t *testing.T) {
	const text = `# tracer: nop
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
           <...>-2       [000] ..... 100.001000: sched_process_exec: filename=/bin/cgpu-runtime pid=2 old_pid=2
      cgpu-guard-3       [000] ..... 100.003000: sched_process_exec: filename=/bin/cgpu-guard pid=3 old_pid=3
    cgpu-runtime-2       [000] ..... 100.004900: sched_process_exit: comm=cgpu-runtime pid=2 prio=120 group_dead=false
            runc-2       [000] d..2. 100.005000: sched_process_exec: filename=/usr/sbin/runc pid=2 old_pid=2
             exe-4       [000] ..... 100.009000: sched_process_exec: filename=/proc/self/exe pid=4 old_pid=4
             exe-4       [000] ..... 100.009100: sys_mount(dev_name: 7fff, dir_name: 7fff, type: 0, flags: 1000, data: 0)
 runc:[0:PARENT]-4       [000] ..... 100.009500: sched_process_exit: comm=runc:[0:PARENT] pid=4 prio=120 group_dead=true
   runc:[2:INIT]-9       [000] ..... 100.010000: sys_mount(dev_name: 7fff, dir_name: 7fff, type: 0, flags: 84000, data: 0)
   runc:[2:INIT]-9       [000] ..... 100.014000: sys_mount(dev_name: 7fff, dir_name: 7fff, type: 0, flags: 1000, data: 0)
       cgpu-hook-5       [000] ..... 100.016000: sched_process_exec: filename=/bin/cgpu-hook pid=5 old_pid=5
       cgpu-hook-6       [001] ..... 100.018000: sys_move_mount(from_dfd: 7, from_pathname: c0, to_dfd: 8, to_pathname: c0, flags: 44)
       cgpu-hook-6       [001] ..... 100.018500: sys_move_mount(from_dfd: 7, from_pathname: c0, to_dfd: 8, to_pathname: c0, flags: 44)
       cgpu-hook-5       [001] ..... 100.021000: sched_process_exit: comm=cgpu-hook pid=5 prio=120 group_dead=true
   runc:[2:INIT]-9       [000] ..... 100.022000: sys_pivot_root(new_root: c0, put_old: c0)
   runc:[2:INIT]-9       [000] ..... 100.023000: sys_mount(dev_name: 7fff, dir_name: 7fff, type: 0, flags: 1000, data: 0)
            runc-2       [000] ..... 100.024000: sched_process_exit: comm=runc pid=2 prio=120 group_dead=true
    cgpu-runtime-8       [000] ..... 100.030000: sched_process_exec: filename=/bin/cgpu-runtime pid=8 old_pid=8
            runc-8       [000] ..... 100.032000: sched_process_exec: filename=/usr/sbin/runc pid=8 old_pid=8
            true-9       [000] ..... 100.035000: sched_process_exec: filename=/bin/true pid=9 old_pid=9
            runc-8       [000] ..... 100.036000: sched_process_exit: comm=runc pid=8 prio=120 group_dead=true
       cgpu-hook-10      [000] ..... 100.040000: sched_process_exec: filename=/bin/cgpu-hook pid=10 old_pid=10
`
	want := map[string]float64{"create, all": 23, "  cgpu-runtime until it is runc": 4, "    until the guard begins": 2,
		"  runc until its init begins": 4, "  runc's init until it mounts": 1, "  runc's mounts, from the first to the last": 4,
		"    calls for them (no ms)": 2, "  cgpu-hook setup": 5, "    its mounts": 0.5, "  runc from its new root to the end": 2,
		"start, all": 6, "  cgpu-runtime start until it is runc": 2, "  runc until the program begins": 3}
	got := map[string]float64{}
	for _, p := range split(readTrace(text)) {
		got[p.name] = float64(int(p.took*1000+0.5)) / 1000
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if parts := split(readTrace("sh-1 [001] ..... 1.0: sched_process_exec: filename=/usr/bin/sh pid=1 old_pid=1\n")); len(parts) != 0 {
		t.Errorf("of no start: %v", parts)
	}
}
