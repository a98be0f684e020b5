"""What cgpu's own processes on a private node take, for exporter.py and soak.py."""
import glob
import json
import os
import subprocess
import urllib.request

TICK = os.sysconf("SC_CLK_TCK")
RUN_DIR = os.environ.get("CGPU_RUN_DIR", "")


def text(path):
    try:
        with open(path, errors="replace") as f:
            return f.read()
    except OSError:
        return ""


class Size:
    """CPU seconds, anonymous memory, and descriptors of a process, as they are now; zeros of one that has ended."""

    def __init__(self, pid):
        fields = text("/proc/%d/stat" % pid).rpartition(")")[2].split()
        self.cpu = sum(map(int, fields[11:13])) / TICK if fields else 0.0
        status = dict(line.split(":", 1) for line in text("/proc/%d/status" % pid).splitlines() if ":" in line)
        self.anon_kib, self.rss_kib, self.peak_kib = (int(status.get(k, "0").split()[0]) for k in ("RssAnon", "VmRSS", "VmHWM"))
        try:
            self.fds = len(os.listdir("/proc/%d/fd" % pid))
        except OSError:
            self.fds = 0


def spent(pids):
    """CPU seconds of processes' threads, to the nanosecond, and how often they fell asleep: for what a tick is too coarse for."""
    seconds, sleeps = 0.0, 0
    for pid in pids:
        for task in glob.glob("/proc/%d/task/*" % pid):
            seconds += int((text(task + "/schedstat").split() or [0])[0]) / 1e9
            sleeps += sum(int(line.split()[1]) for line in text(task + "/status").splitlines() if line.startswith("voluntary_ctxt_switches:"))
    return seconds, sleeps


def smi():
    done = subprocess.run(["cgpu", "smi", "-o", "json"], stdout=subprocess.PIPE, timeout=60, check=True)
    return json.loads(done.stdout)


def vgpus():
    return [v for g in smi()["gpus"] for v in g["vgpus"]]


def children(pid):
    return [int(p) for task in glob.glob("/proc/%d/task/*/children" % pid) for p in text(task).split()]


def arbiters():
    """This node's: they have files of its run dir."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        if text(path).startswith("cgpu-arbiter"):
            pid = int(path.split("/")[2])
            if RUN_DIR in text("/proc/%d/environ" % pid) or RUN_DIR in text("/proc/%d/maps" % pid):
                found.append(pid)
    return found


class Exporter:
    """`cgpu exporter` on a port of its own."""

    def __init__(self, *options):
        self.process = subprocess.Popen(["cgpu", "exporter", "--listen", "127.0.0.1:0", *options], stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("cgpu exporter: no address: exit status %s" % self.process.wait())
        self.url, self.pid = "http://%s/metrics" % line.split()[-1], self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def scrape(self):
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            return answer.read().decode()


def ledger():
    try:
        return json.loads(text(RUN_DIR + "/ledger.json"))["records"] or []
    except (ValueError, KeyError):
        return []


def length(path):
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
