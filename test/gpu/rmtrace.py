"""Reads what workloads/rmtrace.c has written of programs, an MPS server and its clients say, and says what goes between processes and what
each asks for, with what the guard's tables say of it (pkg/rm); or only each call with the driver's answer, so that two runs can be compared.

    rmtrace.py FOLDER [--answers]
"""
import collections
import os
import re
import struct
import sys

TABLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../pkg/rm")
# Where the answer stands, where it is not at the end (statusOffs in pkg/rm/shape.go).
STATUS = {0x27: 40, 0x2A: 28, 0x29: 12, 0x34: 24, 0x35: 20, 0x41: 48, 0x4A: 20, 0x4E: 40, 0x4F: 24, 0x5E: 32}
ESCAPES = {0x27: "ALLOC_MEMORY", 0x28: "ALLOC_OBJECT", 0x29: "FREE", 0x2A: "CONTROL", 0x2B: "ALLOC", 0x34: "DUP_OBJECT", 0x35: "SHARE",
           0x4A: "VID_HEAP_CONTROL", 0x4E: "MAP_MEMORY", 0x4F: "UNMAP_MEMORY", 0x57: "MAP_MEMORY_DMA", 0x58: "UNMAP_MEMORY_DMA",
           0x5E: "UPDATE_DEVICE_MAPPING_INFO", 0xC8: "CARD_INFO", 0xC9: "REGISTER_FD", 0xCE: "ALLOC_OS_EVENT", 0xCF: "FREE_OS_EVENT",
           0xD1: "STATUS_CODE", 0xD2: "CHECK_VERSION_STR", 0xD4: "ATTACH_GPUS_TO_FD", 0xD9: "EXPORT_TO_DMABUF_FD"}
UVM = {18: "REGISTER_MPS_SERVER", 19: "REGISTER_MPS_CLIENT", 23: "CREATE_RANGE_GROUP", 24: "DESTROY_RANGE_GROUP", 25: "REGISTER_GPU_VASPACE",
       26: "UNREGISTER_GPU_VASPACE", 27: "REGISTER_CHANNEL", 28: "UNREGISTER_CHANNEL", 29: "ENABLE_PEER_ACCESS", 33: "MAP_EXTERNAL_ALLOCATION",
       34: "FREE", 37: "REGISTER_GPU", 38: "UNREGISTER_GPU", 39: "PAGEABLE_MEM_ACCESS", 42: "SET_PREFERRED_LOCATION", 45: "DISABLE_READ_DUPLICATION",
       51: "MIGRATE", 62: "TOOLS_READ_PROCESS_MEMORY", 65: "MAP_DYNAMIC_PARALLELISM_REGION", 66: "UNMAP_EXTERNAL", 68: "ALLOC_SEMAPHORE_POOL",
       69: "CLEAN_UP_ZOMBIE_RESOURCES", 72: "VALIDATE_VA_RANGE", 73: "CREATE_EXTERNAL_RANGE", 74: "MAP_EXTERNAL_SPARSE", 75: "MM_INITIALIZE",
       0x30000001: "INITIALIZE", 0x30000002: "DEINITIALIZE"}
SHARES = {0: "none", 1: "ALL", 2: "OS_SECURITY_TOKEN", 3: "CLIENT", 4: "PID", 5: "SMC_PARTITION", 6: "GPU", 7: "FM_CLIENT"}
LINE = re.compile(r"(\d+\.\d+) (\S+)\[(\d+)\] (\S+) ?(.*)")


def table(name):
    """Rows of a table of pkg/rm: number → (name, kind). Where drivers differ the last row counts."""
    try:
        with open(os.path.join(TABLES, name)) as f:
            return {int(n, 16): (label, kind) for n, label, kind in re.findall(r'\{id: (0x[0-9a-f]+), name: "(\w+)", kind: (\w+)', f.read())}
    except OSError:
        return {}


CONTROLS, CLASSES = table("controls.go"), table("classes.go")


def word(data, off):
    return struct.unpack_from("<I", data, off)[0] if len(data) >= off + 4 else 0


def long(data, off):
    return struct.unpack_from("<Q", data, off)[0] if len(data) >= off + 8 else 0


def raw(fields, key):
    return bytes.fromhex(fields[key]) if fields.get(key, "-") != "-" else b""


def label(of, number, guard=True):
    name, kind = of.get(number, ("%#x" % number, "NOT IN THE TABLE"))
    return "%s %#x%s" % (name, number, " [%s]" % kind if guard else "")


class Trace:
    def __init__(self, folder):
        self.lines = []
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), errors="replace") as f:
                for m in map(LINE.match, f):
                    if m:
                        # Numbers of processes are their namespace's: two files can have the same.
                        self.lines.append((float(m[1]), m[2].replace("nvidia-cuda-mps-", "") + "/" + m[3], m[4], m[5]))
        self.lines.sort(key=lambda x: x[0])
        self.begin = self.lines[0][0] if self.lines else 0
        self.owner, self.objects = {}, {}  # of clients: who; of (client, handle): class
        self.crossing, self.device, self.host = [], collections.Counter(), collections.Counter()
        self.asked = collections.defaultdict(collections.Counter)
        self.failed = collections.Counter()
        self.doing = {}
        self.answers = []
        for self.now, self.who, kind, rest in self.lines:
            handler = getattr(self, "on_" + kind, None)
            if handler:
                handler(rest)

    def what(self, client, handle):
        return label(CLASSES, self.objects.get((client, handle), 0), False) if (client, handle) in self.objects else "object %#x" % handle

    def note(self, text):
        self.crossing.append("%8.3f %-14s %-18s %s" % (self.now - self.begin, self.who, self.doing.get(self.who, "")[:18], text))

    def on_mark(self, rest):
        self.doing[self.who] = rest

    def on_loaded(self, rest):
        self.asked[self.who]["loaded " + re.sub(r" ppid.*", "", rest)] += 1

    def on_pass(self, rest):
        self.note("passes " + rest)

    def on_connect(self, rest):
        self.note("connects " + rest)

    def on_bind(self, rest):
        self.note("binds " + rest)

    def on_open(self, rest):
        path = re.search(r"path=(\S+)", rest)
        self.asked[self.who]["open " + re.sub(r"\d+", "N", path[1] if path else rest)] += 1
        self.answers.append(re.sub(r"fd=\d+", "opened", "open " + rest))

    def on_uvm(self, rest):
        f = dict(x.split("=", 1) for x in rest.split() if "=" in x)
        nr, data = int(f["nr"], 16), raw(f, "out")
        name = "uvm " + UVM.get(nr, "%#x" % nr)
        if nr == 0x30000001:
            name += " flags=%#x" % long(raw(f, "in"), 0)
        client, handle = {25: (20, 24), 27: (20, 24)}.get(nr, (0, 0))
        if client:
            self.cross("uvm " + UVM[nr], word(data, client), word(data, handle))
        elif nr == 33 and "tail" in f:
            tail = bytes.fromhex(f["tail"])
            self.cross("uvm " + UVM[nr], word(tail, 4), word(tail, 8))
        self.asked[self.who][name] += 1
        self.answers.append("%s: rc %s errno %s" % (name, f["rc"], f["errno"]))

    def cross(self, how, client, handle):
        """Notes the use of an object of another process' client."""
        of = self.owner.get(client)
        if of != self.who and client:
            self.note("%s: %s of client %#x of %s" % (how, self.what(client, handle), client, of or "nobody seen"))

    def on_rm(self, rest):
        f = dict(x.split("=", 1) for x in rest.split() if "=" in x)
        nr, before, after = int(f["nr"], 16), raw(f, "in"), raw(f, "out")
        name, status = "rm " + ESCAPES.get(nr, "%#x" % nr), word(after, STATUS.get(nr, max(0, len(after) - 4)))
        if nr == 0x2B:
            root, handle, number = word(after, 0), word(after, 8), word(after, 12)
            status = word(after, 28 if len(after) == 32 else 40)
            name = "class " + label(CLASSES, number)
            if status == 0 and f["rc"] == "0":
                if number in (0, 1, 0x41):
                    root = handle
                    self.owner[root] = self.who
                self.objects[root, handle] = number
                if number in (0x40, 0x3E):
                    (self.device if number == 0x40 else self.host)[self.who] += long(raw(f, "pout"), 64)
                if number in (0xA06C, 0x9067, 0x900E, 0x90F1) or number & 0xFF == 0x6F:
                    self.note("makes %s %#x below %#x in client %#x: %s" % (label(CLASSES, number, False), handle, word(after, 4), root,
                                                                         raw(f, "pin")[:40].hex()))
            self.cross("makes " + label(CLASSES, number, False) + " below", root, word(after, 4))
        elif nr == 0x2A:
            number = word(after, 8)
            name = "control " + label(CONTROLS, number)
            self.cross("control " + label(CONTROLS, number, False), word(after, 0), word(after, 4))
            if number in (0xD04, 0xD06):
                p = raw(f, "pin")[-12:]
                self.note("opens %s to %s, target %#x, rights %#x, action %d" % ("its client" if number == 0xD04 else "an object", SHARES.get(
                    p[8] | p[9] << 8, "?"), word(p, 0), word(p, 4), p[10]))
            elif number in (0xA06C0105, 0x801108) or number >> 8 == 0x906701 or number >> 8 == 0x906702 or 0x3D05 <= number <= 0x3D0C:
                self.note("%s of %s: %s" % (label(CONTROLS, number), self.what(word(after, 0), word(after, 4)), raw(f, "pin").hex()))
        elif nr == 0x34:
            to, source = word(after, 0), (word(after, 12), word(after, 16))
            self.note("dups %s of client %#x of %s into client %#x of %s as %#x" % (self.what(*source), source[0], self.owner.get(
                source[0], "nobody seen"), to, self.owner.get(to, "nobody seen"), word(after, 8)))
            if status == 0 and source in self.objects:
                self.objects[to, word(after, 8)] = self.objects[source]
        elif nr == 0x35:
            p = before[8:20]
            self.note("opens %s to %s, target %#x, rights %#x, action %d" % (self.what(word(before, 0), word(before, 4)), SHARES.get(
                p[8] | p[9] << 8, "?"), word(p, 0), word(p, 4), p[10]))
        self.answers.append("%s: rc %s errno %s status %#x" % (name, f["rc"], f["errno"], status))
        self.asked[self.who][name] += 1
        if nr != 0x2B and nr not in STATUS:
            status = 0  # where it is differs
        if status or f["rc"] != "0":
            self.failed[self.who, name, "status %#x rc %s errno %s" % (status, f["rc"], f["errno"]), self.doing.get(self.who, "")] += 1

    def report(self):
        print("--- what goes between processes, and groups, contexts and channels (seconds, process, its step)")
        print("\n".join(self.crossing))
        print("--- memory allocated, MiB over the whole time (device, host)")
        for who in sorted(set(self.device) | set(self.host)):
            print("%-14s %8.1f %8.1f" % (who, self.device[who] / 2**20, self.host[who] / 2**20))
        print("--- what failed")
        for (who, name, how, step), n in sorted(self.failed.items()):
            print("%5d %-14s %-18s %s: %s" % (n, who, step[:18], name, how))
        print("--- what was asked for, by program; in brackets what the guard's tables say")
        programs = collections.defaultdict(collections.Counter)
        for who, names in self.asked.items():
            if any(name.split()[0] in ("rm", "uvm", "class", "control") for name in names):
                programs[who.split("/")[0]].update(names)
        for program, names in sorted(programs.items()):
            for name, n in sorted(names.items()):
                print("%-8s %6d %s" % (program, n, name))


def main():
    trace = Trace(sys.argv[1])
    if "--answers" in sys.argv:
        print("\n".join(trace.answers))
    else:
        trace.report()


if __name__ == "__main__":
    main()
