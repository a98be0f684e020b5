"""Has `calls` (workloads/) make calls, bare and on a vGPU, and looks at the guard meanwhile. Run by calls.sh, which says more."""
import collections
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PHASES = [("context", 1), ("syscall", 20000), ("waved", 20000), ("memgetinfo", 5000), ("malloc", 2000)]
TRACED = [("context", 1), ("waved", 1000), ("memgetinfo", 1000), ("malloc", 1000)]
NOTIFY = {0xc0502100: "notification received", 0xc0182101: "notification answered", 0x40082102: "notification still valid"}
RM = {0x27: "RM_ALLOC_MEMORY", 0x29: "RM_FREE", 0x2a: "RM_CONTROL", 0x2b: "RM_ALLOC", 0x34: "RM_DUP_OBJECT", 0x35: "RM_SHARE",
      0x4e: "RM_MAP_MEMORY", 0x4f: "RM_UNMAP_MEMORY", 0x57: "RM_MAP_MEMORY_DMA", 0x58: "RM_UNMAP_MEMORY_DMA"}


class Program:
    """`calls` in a container."""

    def __init__(self, program, *how):
        self.process = subprocess.Popen([HERE + "/calls.sh", *how, "-i", "--rm", "-e", "CGPU_LIMITER=off", "--", program], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.make("syscall", 1)  # it runs

    def make(self, kind, n):
        """Microseconds for a call."""
        self.process.stdin.write("%s %d\n" % (kind, n))
        self.process.stdin.flush()
        line = self.process.stdout.readline().split()
        if line[:2] != [kind, str(n)]:
            sys.exit("calls: %s ended at %s" % (self.process.args, kind))
        return float(line[2])

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def guard():
    """The guard of the one container."""
    with open(os.environ["CGPU_RUN_DIR"] + "/ledger.json") as f:
        return json.load(f)["records"][-1]["guardPid"]


def spent(pid):
    """CPU time of a process in µs, and how often its threads slept and were preempted."""
    total = [0, 0, 0]
    for task in glob.glob("/proc/%d/task/*" % pid):
        with open(task + "/schedstat") as f:
            total[0] += int(f.read().split()[0]) / 1e3
        with open(task + "/status") as f:
            found = re.findall(r"voluntary_ctxt_switches:\s+(\d+)", f.read())
        total[1] += int(found[0])
        total[2] += int(found[1])
    return total


def name(call, args):
    """What a line of strace is counted as."""
    if call != "ioctl":
        return call
    number = int(args.split(",")[1], 0)
    if number in NOTIFY:
        return NOTIFY[number]
    if number >> 8 & 0xff == ord("F"):
        return "driver: " + RM.get(number & 0xff, "escape %#x" % (number & 0xff))
    return "driver: UVM %d" % number if number < 0x10000 else "ioctl %#x" % number


def traced(pid, path, make):
    """System calls of a process while make() runs: by name, how many and the seconds that they took, strace's own included."""
    strace = subprocess.Popen(["strace", "-f", "-T", "-s", "0", "-e", "raw=ioctl", "-o", path, "-p", str(pid)],
                              stderr=subprocess.PIPE, text=True)
    if "attached" not in strace.stderr.readline():
        sys.exit("calls: strace cannot attach to the guard")
    make()
    strace.send_signal(signal.SIGINT)
    strace.communicate()
    calls, begun = collections.defaultdict(lambda: [0, 0.0]), {}
    for line in open(path):
        m = re.match(r"(\d+) +(?:<\.\.\. )?(\w+)(?:\((.*)| resumed>)", line)
        if not m:
            continue
        thread, call, args = m.groups()
        if line.rstrip().endswith("<unfinished ...>"):
            begun[thread] = name(call, args)
            continue
        what = begun.pop(thread, call) if args is None else name(call, args)
        took = re.search(r"<([\d.]+)>$", line)
        calls[what][0] += 1
        calls[what][1] += float(took.group(1)) if took else 0
    return calls


def machine():
    def read(path):
        try:
            with open(path) as f:
                return f.read().strip()
        except OSError:
            return "?"
    print("kernel %s, %d CPUs, clock %s, seccomp's BPF %s" % (os.uname().release, os.cpu_count(),
          read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
          {"0": "interpreted", "1": "compiled", "2": "compiled"}.get(read("/proc/sys/net/core/bpf_jit_enable"), "?")))
    for path in sorted(glob.glob("/sys/devices/system/cpu/vulnerabilities/spec*")):
        print("%s: %s" % (os.path.basename(path), read(path)))


def main():
    program, out = sys.argv[1:]
    machine()
    bare = Program(program, "bare")
    alone = {kind: bare.make(kind, n) for kind, n in PHASES}
    bare.end()
    vgpu = Program(program, "vgpu", "6GiB")
    print("%-12s %11s %11s %15s %14s %17s" % ("µs a call", "bare", "vGPU", "guard's CPU", "its sleeps", "its preemptions"))
    for kind, n in PHASES:
        before = spent(guard())
        took = vgpu.make(kind, n)
        cpu, slept, preempted = ((b - a) / n for a, b in zip(before, spent(guard())))
        print("%-12s %11.2f %11.2f %15.2f %14.2f %17.2f" % (kind, alone[kind], took, cpu, slept, preempted))
    vgpu.end()
    if not shutil.which("strace"):
        print("there is no strace here: system calls were not counted")
        return
    vgpu = Program(program, "vgpu", "6GiB")
    for kind, n in TRACED:
        calls = traced(guard(), "%s/calls-%s.strace" % (out, kind), lambda: vgpu.make(kind, n))
        print("\n%s: the guard's system calls for each of %d, and the mean µs of one, strace's own included" % (kind, n))
        for what, (count, seconds) in sorted(calls.items(), key=lambda x: -x[1][0]):
            if count >= n / 50:
                print("  %-32s %9.2f %11.1f" % (what, count / n, seconds / count * 1e6))
    vgpu.end()


main()
