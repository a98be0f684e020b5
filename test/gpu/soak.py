"""Containers that come and go beside some that compute all the time. Each second what guards, arbiter, exporter and run dir take goes to
$OUT/soak.csv; at the end it says what has grown, what is left, and whether all programs ended well. Run by soak.sh.
usage: soak.py PROGRAMS SECONDS"""
import csv
import itertools
import os
import random
import statistics
import subprocess
import sys
import threading
import time

import processes

HERE = os.path.dirname(os.path.abspath(__file__))
LANES = 4
# What has grown by no more from the second fifth of the samples to the last is as large as it was: the first fifth fills caches.
BOUNDS = {"guard_kib": 4096, "guard_fds": 8, "arbiter_kib": 4096, "arbiter_fds": 8, "exporter_kib": 8192, "exporter_fds": 8, "run_files": 16}
MOST = {"logs": 64 + 2 * (LANES + 12)}  # those of containers that are gone are kept up to a number (pkg/ledger), and grow until then


class Container:
    """A program on a vGPU, until it ends."""
    numbers = itertools.count()

    def __init__(self, programs, program):
        self.name, self.program = "soak%d" % next(self.numbers), " ".join(program)
        command = [sys.executable] * program[0].endswith(".py") + [programs + "/" + program[0], *program[1:]]
        self.process = subprocess.Popen([HERE + "/soak.sh", "vgpu", "5GiB", "--rm", "--name", self.name, "-e", "HOME=/tmp", "--", *command],
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        self.said = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.said = line.strip()[:200] or self.said

    def ended(self, seconds):
        try:
            self.process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False

    def end(self):
        subprocess.run(["docker", "rm", "-f", self.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
        self.ended(60)

    def failed(self):
        return self.process.returncode and "%s (%s): exit %d: %s" % (self.name, self.program, self.process.returncode, self.said)


class Lane(threading.Thread):
    """One short container after the other: most end by themselves, some are killed."""

    def __init__(self, programs, seed, until):
        super().__init__()
        self.programs, self.random, self.until, self.begun, self.failures = programs, random.Random(seed), until, 0, []

    def run(self):
        while time.time() < self.until:
            c = Container(self.programs, self.random.choice((["steady", "2"], ["managed", "0.25", "2"], ["steady", "1"])))
            self.begun += 1
            if self.random.random() < 0.25:
                c.ended(self.random.uniform(0.5, 3))
                c.end()
            elif not c.ended(120):
                self.failures.append("%s (%s): does not end: %s" % (c.name, c.program, c.said))
                c.end()
            elif c.failed():
                self.failures.append(c.failed())


def sample(begin, guards, exporter):
    sizes = [processes.Size(p) for p in guards]
    arbiter = [processes.Size(p) for p in processes.arbiters()]
    own = processes.Size(exporter.pid)
    files = [os.path.join(d, f) for d, _, names in os.walk(processes.RUN_DIR) for f in names]
    logs = [f for f in files if f.startswith(processes.RUN_DIR + "/log/")]
    return {"seconds": round(time.time() - begin, 1), "containers": len(processes.ledger()),
            "guard_kib": max(s.anon_kib for s in sizes), "guard_fds": max(s.fds for s in sizes),
            "guard_cpu": round(sum(s.cpu for s in sizes), 2), "arbiter_kib": max([s.anon_kib for s in arbiter] or [0]),
            "arbiter_fds": max([s.fds for s in arbiter] or [0]), "arbiter_cpu": round(sum(s.cpu for s in arbiter), 2),
            "exporter_kib": own.anon_kib, "exporter_fds": own.fds, "exporter_cpu": round(own.cpu, 2), "run_files": len(files) - len(logs),
            "logs": len(logs), "log_bytes": sum(processes.length(f) for f in logs)}


def slope(samples, column):
    """By an hour, of all but the first fifth, by least squares."""
    rest = samples[len(samples) // 5:]
    return 3600 * statistics.linear_regression([s["seconds"] for s in rest], [s[column] for s in rest]).slope


def verdict(samples):
    fifth, grown = len(samples) // 5, []
    print("| what | second fifth, median | last fifth, median | slope by the hour | most | |\n|---|---|---|---|---|---|")
    for column in [*BOUNDS, *MOST]:
        values = [s[column] for s in samples]
        before, after = statistics.median(values[fifth:2 * fifth]), statistics.median(values[-fifth:])
        more = after > MOST[column] if column in MOST else after > before + BOUNDS[column]
        if more:
            grown.append(column)
        print("| %s | %d | %d | %+.0f | %d | %s |" % (column, before, after, slope(samples, column), max(values),
                                                   "HAS GROWN" if more else "ok"))
    return grown


def soak(programs, steady, lanes, exporter, until):
    """Samples until the time, then waits for the lanes and the programs that compute."""
    guards = [v["guard_pid"] for v in processes.vgpus()]
    for lane in lanes:
        lane.start()
    begin, samples, scraped = time.time(), [], 0.0
    with open(os.environ["OUT"] + "/soak.csv", "w", newline="") as f:
        table = None
        while time.time() < until:
            samples.append(sample(begin, guards, exporter))
            table = table or csv.DictWriter(f, samples[0].keys())
            if len(samples) == 1:
                table.writeheader()
            table.writerow(samples[-1])
            f.flush()
            if time.time() - scraped >= 15:
                exporter.scrape()
                scraped = time.time()
            time.sleep(max(0, begin + len(samples) - time.time()))
    for lane in lanes:
        lane.join()
    failures = [x for lane in lanes for x in lane.failures]
    for c in steady:
        if not c.ended(60):
            failures.append("%s (%s): does not end: %s" % (c.name, c.program, c.said))
        elif c.failed():
            failures.append(c.failed())
    return samples, failures


def left():
    """What is there once all containers have gone, after a while at most."""
    for _ in range(30):
        found = ["record of " + r["id"] for r in processes.ledger()] + ["an arbiter, process %d" % p for p in processes.arbiters()]
        if not found:
            break
        time.sleep(1)
    return found


def main():
    programs, seconds = sys.argv[1], float(sys.argv[2])
    ends, seed = time.time() + seconds, int(os.environ.get("SEED", random.randrange(1 << 30)))
    rate = subprocess.run([programs + "/share", "--calibrate"], stdout=subprocess.PIPE, check=True, text=True).stdout
    rate = rate.split('"iters_per_us":')[1].split(",")[0]
    # They end by themselves a while before the time is over.
    compute = "%d" % max(10, seconds - 50)
    steady = [Container(programs, p) for p in
              [["steady", compute]] * 4 + [["share", "--seconds", compute, "--iters-per-us", rate]] * 4 +
              [["models.py", "--model", "decoder", "--seconds", compute]] * 2 + [["models.py", "--model", "resnet", "--seconds", compute]] * 2]
    deadline = time.time() + 60
    while len(processes.vgpus()) < len(steady) and time.time() < deadline:
        time.sleep(0.5)
    until = ends - 55
    lanes = [Lane(programs, seed + i, until) for i in range(LANES)]
    with processes.Exporter() as exporter:
        samples, failures = soak(programs, steady, lanes, exporter, until)
    begun, remains = sum(lane.begun for lane in lanes), left()
    print("%d containers came and went beside %d that computed, in %.0f s; seed %d" % (begun, len(steady), samples[-1]["seconds"], seed))
    grown = verdict(samples)
    for text in failures + remains:
        print("FAIL  " + text)
    print("soak: %d programs failed, %d things are left, grown: %s" % (len(failures), len(remains), ", ".join(grown) or "nothing"))
    sys.exit(1 if failures or remains or grown else 0)


main()
