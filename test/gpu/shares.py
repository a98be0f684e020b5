"""Measures how containers share a GPU's time: starts them, lets them begin together, compares what each got done with what
cgpu promises. Every number is printed, reached or not. Run by shares.sh, which says how.

Containers run `share`, `latency`, `models.py` or `collective.py` (workloads/) with --stdin: they live as long as their case, and a run is
one line to each. Work is counted between two times of the wall clock that are the same for all, while all have work.
"""
import argparse
import bisect
import contextlib
import glob
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import processes

HERE = os.path.dirname(os.path.abspath(__file__))
LEAD, RAMP = 0.3, 0.4  # seconds between a run's order and its load, and between that and the time that counts
# cgpu, by time or in a trust domain; or the whole card with runc, and the driver's own timeslices or one MPS server for all.
SIDES = {"cgpu": "vgpu", "domain": "vgpu", "default": "bare", "mps": "mps"}

MS1, MS120 = "--kernel-us 1000", "--kernel-us 120000"
SPIN = "--kernel-us 1200"  # the kernel of the prototype's figures
KERNELS = {"10 us": "--kernel-us 10", "1 ms": MS1, "100 ms": "--kernel-us 100000", "graph": "--mode graph --kernel-us 50",
           "persistent": "--mode persistent"}
CAPPED = {"1 ms": MS1, "120 ms": MS120, "graph": KERNELS["graph"], "cooperative": "--mode cooperative --kernel-us 20000",
          "persistent": KERNELS["persistent"]}
REQUEST = "--work-us 125 --every-ms 2"  # takes 0.14 ms alone, launch included
PAUSED = "--work-us 125 --think-ms 2"   # the prototype's client: 2 ms from the end of one to the next
SELDOM = "--work-us 125 --every-ms 500"  # ten in 5 s, each the first after idle; the p99 of ten is the longest
POISSON_US = 400
MODEL = "models.py --model "
UNITS = {"resnet": "img/s", "bert": "seq/s", "decoder": "tokens/s", "allreduce": "MiB/s", "ddp": "img/s"}
# What a program that waits for each of its kernels gets beside one that never waits, and what is left to that one: kernel in µs,
# pause between two in ms, weight; least percent of the GPU for each.
LOOPS = [(100, 0, 1, 7.5, 75), (1000, 0, 1, 43, 43), (1000, 0, 3, 60, 18), (5000, 0, 1, 47, 47), (20000, 0, 1, 45, 45), (1000, 1, 1, 43, 43)]
LOSS = "30%"  # max_loss; and what the loop then is to get
LOOPS_AT_LOSS = [(100, 0, 1, 13, 52)]
SERVICE_US, SERVICE_KERNELS = 2000, 50
# Whose GPU seconds are compared with CUDA's events: one that never waits, one with some steps under way, one that waits for each; and
# the load by which the last one's steps come without a pause between them. Models by CUDA graphs: else the GPU rests between the kernels of a
# step, which events do not tell (ResNet-50 launched kernel by kernel computes for 83 % of its events' time, by CUPTI).
ACCOUNTED = {"kernel loop": ("share", MS1, ""), "ResNet-50": (MODEL + "resnet --graph --events", "", ""),
             "decoder": (MODEL + "decoder --graph --events", "", "--ahead 4")}
SETTLED = 10  # seconds after which a container that is alone on its GPU has the time in its account: 8, and the exporter's second
# What a context's end of turn takes on the engine until it is saved, and what lies between two runs (docs/internals/sched.md).
SAVE_PREEMPTED, SAVE_YIELDED, BETWEEN = 0.10e-3, 0.06e-3, 0.083e-3


class Broken(Exception):
    """The rig or a program failed, so that there is no figure."""


class Worker:
    """A container and the program in it. Its lines come in by a thread of its own."""
    numbers = itertools.count()

    def __init__(self, bench, side, program="share", env=None, size="4GiB", processes=1, domain="a"):
        self.name, self.program, self.processes = "shares-%d" % next(self.numbers), program, processes
        self.kill = False  # at its end, do not wait
        self.changed, self.lines, self.noise, self.ended = threading.Condition(), [], [], False
        options = ["-i", "--rm", "--log-driver", "none", "--name", self.name]
        for key, value in (env or {}).items():
            options += ["-e", "ALIYUN_COM_GPU_%s=%s" % (key, value)]
        if SIDES[side] != "vgpu" and "VISIBLE_DEVICES" not in (env or {}):
            options += ["-e", "CUDA_VISIBLE_DEVICES=0"]
        if side == "domain":
            options += ["-e", "CGPU_DOMAIN=" + domain]
        script, *words = program.split()
        if script.endswith(".py"):
            command = [sys.executable, bench.programs + "/" + script, *words, "--stdin"]
            options += ["--shm-size", "1g", "-e", "HOME=/tmp", "-e", "NCCL_NVLS_ENABLE=0", "-e", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"]
        else:
            command = [bench.programs + "/" + program, "--stdin", "--iters-per-us", str(bench.rate)]
            if processes > 1:
                command += ["--processes", str(processes)]
        how = [SIDES[side]] + ([size] if SIDES[side] == "vgpu" else [])
        self.process = subprocess.Popen([HERE + "/shares.sh"] + how + options + ["--"] + command, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for text in self.process.stdout:
            with self.changed:
                try:
                    self.lines.append(json.loads(text)) if text.startswith("{") else self.noise.append(text.rstrip())
                except ValueError:
                    self.noise.append(text.rstrip())
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait(self, what, key, timeout):
        """Waits for a line with key from each process; its lines."""
        def found():
            return [x for x in self.lines if key in x]
        with self.changed:
            self.changed.wait_for(lambda: self.ended or len(found()) >= self.processes, timeout)
            if len(found()) < self.processes:
                why = "it ended" if self.ended else "nothing after %d s" % timeout
                raise Broken("%s: %s: %s: %s" % (self.name, what, why, " / ".join(self.noise[-4:]) or "it said nothing"))
            return found()

    def send(self, line):
        with self.changed:
            self.lines = []
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError as e:
            raise Broken("%s: %s: %s" % (self.name, e, " / ".join(self.noise[-4:]))) from e

    def id(self):
        return output("docker", "inspect", "-f", "{{.Id}}", self.name).strip()

    def end(self):
        """The program ends when its input does, and the container with it."""
        try:
            self.process.stdin.close()
        except OSError:
            pass
        try:
            if not self.kill:
                self.process.wait(8)
                return
        except subprocess.TimeoutExpired:
            pass
        subprocess.run(["docker", "rm", "-f", self.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Run:
    """What one worker did in one run."""

    def __init__(self, lines):
        self.finals = [x for x in lines if "final" in x]
        self.late = max(x["late_ms"] for x in self.finals)
        self.series = {}
        for x in lines:
            if "total" in x:
                self.series.setdefault(x["pid"], []).append((x["t"], x["total"]))

    def work(self, begin, end):
        """Work between two times, of all processes; between two lines it is taken to go on evenly."""
        return sum(at(points, end) - at(points, begin) for points in self.series.values())


def at(points, t):
    i = bisect.bisect_left(points, (t,))
    if i == 0:
        return points[0][1]
    if i == len(points):
        return points[-1][1]
    (t0, n0), (t1, n1) = points[i - 1], points[i]
    return n0 + (n1 - n0) * (t - t0) / (t1 - t0)


def output(*command, timeout=30):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Broken(str(e)) from e
    if done.returncode:
        raise Broken("%s: exit status %d: %s" % (" ".join(command), done.returncode, done.stdout.strip()[-300:]))
    return done.stdout


def gpu_seconds():
    """Of each container, by its name."""
    return {v.get("name") or v["id"]: (v.get("compute") or {}).get("gpu_time_seconds", 0) for v in processes.vgpus()}


def shares(runs, begin, end):
    """Percent of all work for each worker."""
    work = [r.work(begin, end) for r in runs]
    return [100 * w / (sum(work) or 1) for w in work]


def worst_second(runs, want, begin, seconds):
    """The largest distance from want, in points, of any worker in any second."""
    worst, t = 0.0, begin
    while t + 1 <= begin + seconds + 1e-6:
        worst = max([worst] + [abs(s - w) for s, w in zip(shares(runs, t, t + 1), want)])
        t += 0.1
    return worst


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def percents(values):
    return " : ".join("%.1f" % v for v in values)


class Sampler:
    """The GPU's utilization by NVML, ten times a second, as monitors have it. Of no use where there is no NVML."""

    def __init__(self):
        try:
            import pynvml
            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.read = lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            self.read()
        except Exception as e:  # the module's own kinds, or no module
            self.read = None
            print("NVML is not sampled: %s" % e)

    def __enter__(self):
        self.begin, self.samples, self.done = time.time(), [], threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()
        return self

    def sample(self):
        while self.read and not self.done.wait(0.1):
            self.samples.append((time.time(), self.read()))

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    def seconds(self):
        """Utilization times time; None: not known."""
        before = [self.begin] + [t for t, _ in self.samples]
        return sum(u / 100 * (t - t0) for (t, u), t0 in zip(self.samples, before)) if self.samples else None


class Bench:
    def __init__(self, options):
        self.programs, self.out, self.rows, self.case, self.rate, self.card = options.programs, options.out, [], "", 0, None
        self.facts = {}

    # What the cases are made of.

    def row(self, what, got, want="", ok=None, **figures):
        """Prints and keeps one line. ok None: for information."""
        verdict = {True: "ok", False: "NOT REACHED", None: ""}[ok]
        print("%-24s %-38s %-34s %-22s %s" % (self.case, what, got, want, verdict))
        self.rows.append({"case": self.case, "what": what, "got": got, "want": want, "ok": ok, **figures})

    def policy(self, name, max_inst=20, gpus=1):
        if self.card != (name, max_inst, gpus):
            for gpu in range(gpus):
                output("cgpu", "policy", str(gpu), name, "--max-inst", str(max_inst))
            self.card = (name, max_inst, gpus)

    def group(self, side, specs, at_once=10):
        return Group(self, side, specs, at_once)

    def measure(self, loads, seconds=5.0, window_ms=100, during=(), ramp=RAMP):
        """Runs loads, {worker: options}, together for seconds; during are (offset, function) to call meanwhile.
        Returns the begin of the time that counts, a Run for each worker, what the functions returned."""
        begin = time.time() + LEAD + ramp
        for w, options in loads.items():
            common = "--start-at %.3f --seconds %g --ramp-ms %d " % (begin, seconds, ramp * 1000)
            if w.program != "latency":
                common += "--window-ms %g " % window_ms
            w.send(common + options)
        results = []
        for offset, function in during:
            time.sleep(max(0, begin + offset - time.time()))
            results.append(function())
        runs = []
        for w in loads:
            w.wait("a run of %g s" % seconds, "final", max(0, begin + seconds - time.time()) + 30)
            runs.append(Run(w.lines))
        late = max(r.late for r in runs)
        if late > 100:
            raise Broken("a program began its load %.0f ms late: no figure" % late)
        return begin, runs, results

    def rates(self, worker, kernels, seconds=2.5):
        """Work per second of one worker alone, for each kernel."""
        found = {}
        for name, kernel in kernels.items():
            begin, (run,), _ = self.measure({worker: kernel}, seconds)
            found[name] = run.work(begin, begin + seconds) / seconds
        return found

    # The cases.

    def weights(self, side, weights):
        seconds = 5.0 if side == "cgpu" else 3.0
        if side == "cgpu":
            self.policy("preempt")
        with self.group(side, [{"env": {"SCHD_WEIGHT": w}} for w in weights]) as workers:
            want = [100 * w / sum(weights) for w in weights]
            for name, kernel in KERNELS.items():
                begin, runs, _ = self.measure({w: kernel for w in workers}, seconds)
                got, worst = shares(runs, begin, begin + seconds), worst_second(runs, want, begin, seconds)
                off = max(abs(g - w) for g, w in zip(got, want))
                ours = side == "cgpu"
                self.row("%s: shares over %g s" % (name, seconds), percents(got), "%s ± 1" % percents(want) if ours else "",
                         off <= 1 if ours else None, shares=got, off=off,
                         total=sum(r.work(begin, begin + seconds) for r in runs) / seconds,
                         windows=[[round(r.work(begin + i / 10, begin + i / 10 + 0.1)) for i in range(int(seconds * 10))] for r in runs])
                self.row("%s: worst second off by" % name, "%.1f" % worst, "≤ 3" if ours else "", worst <= 3 if ours else None, worst=worst)

    def sharers(self, side, program, load, unit, goals=((2, 99.0), (5, 99.0), (10, 98.5))):
        """Some at once, and what they get done together: percent of one alone, or (goals None) not less than the driver's default, and in a
        domain 97 % of what MPS makes of them."""
        size = "8GiB" if ".py" in program else "4GiB"
        seconds, ours = 5.0, SIDES[side] == "vgpu"
        rival, part = ("mps", 0.97) if side == "domain" else ("default", 1)
        if ours:
            self.policy("preempt")
        with self.group(side, [{"program": program, "size": size}] * 10) as workers:
            totals = {}
            # Alone before and after, so that a drift of the clocks falls out.
            for key, n in (("before", 1), (2, 2), (5, 5), (10, 10), ("after", 1)):
                begin, runs, _ = self.measure({w: load for w in workers[:n]}, seconds)
                totals[key] = sum(r.work(begin, begin + seconds) for r in runs) / seconds
        alone = (totals["before"] + totals["after"]) / 2
        sides = self.facts.setdefault("sharers", {}).setdefault(program, {})
        sides[side] = totals
        self.row("one exclusive container", "%.4g %s" % (alone, unit), rate=alone, before=totals["before"], after=totals["after"])
        for n, least in goals or ((2, None), (5, None), (10, None)):
            got = 100 * totals[n] / alone
            want, ok = ("≥ %g %%" % least, got >= least) if least else ("", None)
            if ours and not least and rival in sides:
                want, ok = "≥ %.4g" % (part * sides[rival][n]), totals[n] >= part * sides[rival][n]
            self.row("%d sharers of one exclusive" % n, "%.2f %%, %.4g %s" % (got, totals[n], unit), want if ours else "", ok if ours else None,
                     percent=got, rate=totals[n])

    def loops(self, side, cases=LOOPS):
        """Programs that wait for each kernel, beside one that never waits. No less than under the driver's default, if that was measured."""
        ours, seconds, default = side == "cgpu", 5.0, self.facts.setdefault("loops", {})
        if ours:
            self.policy("preempt")
        with self.group(side, [{"program": "latency"}, {"program": "latency", "env": {"SCHD_WEIGHT": 3}}, {}]) as (plain, heavy, hog):
            for kernel, pause, weight, least, rest in cases:
                if weight > 1 and not ours:
                    continue
                loop, name = heavy if weight > 1 else plain, "%g ms, pause %g ms, weight %d" % (kernel / 1000, pause, weight)
                begin, (run, other), _ = self.measure({loop: "--work-us %d --think-ms %g" % (kernel, pause), hog: SPIN}, seconds)
                f = run.finals[0]
                got, left = f["count"] * kernel * 1e-4 / seconds, other.work(begin, begin + seconds) * 1e-4 / seconds
                if ours:
                    least = max(least, default.get(name, 0))
                else:
                    default[name] = got
                self.row(name, "%.1f : %.1f %%" % (got, left), "≥ %.4g : %g" % (least, rest) if ours else "",
                         got >= least and left >= rest if ours else None, loop=got, hog=left, p50=f["p50"], p99=f["p99"], max=f["max"])

    def loss(self):
        """The shortest loop on a node that lets preemptions take more. An arbiter keeps the settings that it began with."""
        with self.settings('max_loss = "%s"\n' % LOSS):
            self.loops("cgpu", LOOPS_AT_LOSS)

    @contextlib.contextmanager
    def settings(self, lines):
        """The node's configuration has these lines, too."""
        path = os.environ["CGPU_CONFIG"]
        with open(path) as f:
            usual = f.read()
        try:
            self.configure(path, lines + usual)
            yield
        finally:
            self.configure(path, usual)

    @staticmethod
    def configure(path, text):
        """The node's configuration, for containers and arbiters that begin from now on; those that wait for containers end now."""
        with open(path, "w") as f:
            f.write(text)
        time.sleep(2)  # a guard's end
        while pids := processes.arbiters():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def crowd(self, side, counts=(10, 30, 60)):
        """Many programs that wait for each kernel, once slices have been set for all, and what guards and arbiters take then and at rest."""
        ours, seconds, size = side == "cgpu", 5.0, max(counts)
        if ours:
            self.policy("preempt", 64)
        with self.group(side, [{"program": "latency", "size": "1GiB"}] * size, at_once=16) as workers:
            guards = [v["guard_pid"] for v in processes.vgpus()]

            def spent():
                return processes.spent(guards), processes.spent(processes.arbiters())

            for n in counts:
                _, runs, (a, b) = self.measure({w: "--work-us 1000 --think-ms 0 --block" for w in workers[:n]}, seconds,
                                               during=((0, spent), (seconds, spent)), ramp=3)
                work = [r.finals[0]["count"] for r in runs]
                ratio = max(work) / max(min(work), 1)
                self.row("%d loops of 1 ms: largest ÷ smallest" % n, "%.3f, together %.1f %%" % (ratio, sum(work) * 0.1 / seconds),
                         "≤ 1.2" if ours else "", ratio <= 1.2 if ours else None, counts=work)
                if ours:
                    of_guards, of_arbiters = ((y[0] - x[0]) / seconds for x, y in zip(a, b))
                    self.row("  guards, arbiters", "%.3f, %.3f cores" % (of_guards, of_arbiters), "≤ 0.25 together" if n == size else "",
                             of_guards + of_arbiters <= 0.25 if n == size else None, guards=of_guards, arbiters=of_arbiters)
            if ours:
                time.sleep(seconds)
                each = [[g] for g in guards] + [processes.arbiters()]
                a, _, b = [processes.spent(x) for x in each], time.sleep(seconds), [processes.spent(x) for x in each]
                *took, of_arbiters = (1e3 * (y[0] - x[0]) / seconds for x, y in zip(a, b))
                *woken, ringing = ((y[1] - x[1]) / seconds for x, y in zip(a, b))
                self.row("%d at rest: guards, arbiters" % size, "%.2f, %.2f ms a second" % (sum(took), of_arbiters), "≤ 1 together",
                         sum(took) + of_arbiters <= 1, guards=took, arbiters=of_arbiters)
                self.row("  woken", "%.1f, %.1f times a second" % (sum(woken), ringing))
                self.row("  the one that looks; median of the others", "%.2f; %.3f ms a second, woken %.1f; %.1f times"
                         % (max(took), statistics.median(took), max(woken), statistics.median(woken)))

    def space(self, case, *arguments):
        """A case on a node that has trust domains."""
        with self.settings('domains = [{name = "a"}, {name = "b"}]\n'):
            case(*arguments)

    def throughput(self, workers, load="", seconds=5.0):
        """Work per second that they get done together."""
        begin, runs, _ = self.measure({w: load for w in workers}, seconds)
        return sum(r.work(begin, begin + seconds) for r in runs) / seconds

    def domains(self, program, load, unit, weights=((1, 1), (1, 3)), members=5, seconds=5.0):
        """Two domains: what each gets of the GPU, by what it gets done and by its account, and whether it keeps what its members gain by
        computing side by side."""
        specs = [{"program": program, "size": "8GiB", "domain": name} for name in "ab" for _ in range(members)]
        with self.group("domain", specs) as workers:
            sides = workers[:members], workers[members:]
            alone = [self.throughput(s, load) for s in sides]
            self.row("each domain by itself", ", ".join("%.4g %s" % (a, unit) for a in alone), alone=alone)
            for pair in weights:
                for name, weight in zip("ab", pair):
                    output("cgpu", "set", "mps-%s-0" % name, "--weight", str(weight))
                before = gpu_seconds()
                begin, runs, _ = self.measure({w: load for w in workers}, seconds)
                time.sleep(2)  # until it is in the accounts
                spent = {k: v - before.get(k, 0) for k, v in gpu_seconds().items()}
                done = [sum(r.work(begin, begin + seconds) for r in runs[i:i + members]) / seconds for i in (0, members)]
                parts = [100 * d / a for d, a in zip(done, alone)]
                got, want = [100 * p / sum(parts) for p in parts], [100 * w / sum(pair) for w in pair]
                self.row("weights %d:%d: shares" % pair, percents(got), "%s ± 1" % percents(want),
                         max(abs(g - w) for g, w in zip(got, want)) <= 1, shares=got, done=done)
                self.row("weights %d:%d: of what they do alone" % pair, "%.1f %%" % sum(parts), "≥ 97 %", sum(parts) >= 97, percent=sum(parts))
                servers = [spent.get("mps-%s-0" % name, 0) for name in "ab"]
                self.row("  GPU seconds", "%.2f : %.2f, others %.2f" % (*servers, sum(spent.values()) - sum(servers)), spent=spent)

    def requests(self, batches=(1, 2, 4, 8, 16, 32)):
        """Two decoders against one that has the GPU alone, each with as many requests under way: Dynamo's comparison, with a model of ours."""
        for batch in batches:
            for side in ("cgpu", "domain"):
                with self.group(side, [{"program": MODEL + "decoder --graph --batch %d" % batch, "size": "30GiB"}] * 2) as workers:
                    if side == "cgpu":
                        alone = self.throughput(workers[:1])
                    both = self.throughput(workers)
                least = 97 if side == "cgpu" else 105 if batch <= 16 else None
                got = 100 * both / alone
                self.row("%d requests each, %s" % (batch, side), "%.1f %% of %.4g tokens/s" % (got, alone), "≥ %d %%" % least if least else "",
                         got >= least if least else None, percent=got, alone=alone, both=both)

    def service(self):
        """Requests of many small kernels with Poisson arrivals, beside training."""
        seconds, load = 8.0, "--work-us %d --kernels %d --poisson %%d --seed 7" % (SERVICE_US, SERVICE_KERNELS)
        training = "collective.py --what ddp"
        p99 = {}

        def ask(label, client, trainer, percent, limit=None):
            begin, (run, *rest), _ = self.measure({client: load % percent, **({trainer: ""} if trainer else {})}, seconds)
            f = run.finals[0]
            beside = "; training %.4g img/s" % (rest[0].work(begin, begin + seconds) / seconds) if rest else ""
            self.row("load %d %%, %s" % (percent, label), "p50 %d p99 %d max %d µs%s" % (f["p50"], f["p99"], f["max"], beside),
                     "p99 ≤ %d µs" % limit if limit else "", f["p99"] <= limit if limit else None, **{k: f[k] for k in ("p50", "p99", "max", "unfinished")})
            p99[label, percent] = f["p99"]

        with self.group("default", [{"program": "latency"}, {"program": training}]) as (client, trainer):
            for percent in (20, 50, 80):
                ask("alone", client, None, percent)
                ask("driver's default", client, trainer, percent)
        self.policy("preempt")
        specs = [{"program": "latency"}, {"program": "latency", "env": {"SCHD_WEIGHT": 4}}, {"program": "latency", "env": {"HIGH_PRIO": 1}},
                 {"program": training, "size": "16GiB"}]
        with self.group("cgpu", specs) as (equal, heavy, high, trainer):
            for percent in (20, 50, 80):
                ask("equal weights", equal, trainer, percent, p99["driver's default", percent])
                ask("weight 4", heavy, trainer, percent)
                ask("high priority", high, trainer, percent, 1.15 * p99["alone", percent])

    def pair(self, side, what):
        """Two containers that have both GPUs each, and in each a process for each GPU: together, of one alone."""
        ours, seconds, unit = side == "cgpu", 8.0, UNITS[what]
        if ours:
            self.policy("preempt", gpus=2)
        spec = {"program": "collective.py --what " + what, "size": "24GiB", "env": {"VISIBLE_DEVICES": "0,1"}}
        with self.group(side, [spec] * 2) as workers:
            totals = {}
            for key, some in (("before", workers[:1]), ("two", workers), ("after", workers[:1])):
                begin, runs, _ = self.measure({w: "" for w in some}, seconds)
                totals[key] = sum(r.work(begin, begin + seconds) for r in runs) / seconds
                each = shares(runs, begin, begin + seconds)
                if key == "two":
                    totals["shares"] = each
        alone = (totals["before"] + totals["after"]) / 2
        got = 100 * totals["two"] / alone
        self.row("one of them alone", "%.4g %s" % (alone, unit), **totals)
        self.row("two of one alone", "%.1f %%" % got, "≥ 95 %" if ours else "", got >= 95 if ours else None, percent=got)
        self.row("  shares", percents(totals["shares"]), "50.0 : 50.0 ± 2" if ours else "", abs(totals["shares"][0] - 50) <= 2 if ours else None)

    # GPU seconds: a program's CUDA events against cgpu smi and the exporter.
    #
    # Alone, events around its work are its time on the GPU. Of a program that waits they are around each step, and the GPU comes to the first
    # before the work has been launched: some 10 µs each. So how long a step is was measured with some of them under way, too.
    # Beside another they have the other's turns in them, and no clock of the GPU's stands still meanwhile. So there
    #  * the program is expected to need for each unit of work what it needed alone by its events. What a turn's end takes on the engine until
    #    the context is saved comes on top, and is in the account by intent (sched.md); with and without it are printed.
    #  * what both got and the time between their runs is the whole time of a GPU that never had nothing to do: the neighbour's events.
    # NVML's utilization is the GPU's, not a container's; it is sampled ten times a second, and summed up.

    def accounts(self, exporter, workers):
        """For each: GPU seconds by cgpu smi and by the exporter, switches, preemptions. What is absent is none yet."""
        computed, text, found = {v["id"]: v.get("compute") or {} for v in processes.vgpus()}, exporter.scrape(), []
        for w in workers:
            container = w.id()
            c, line = computed[container], re.search(r'^cgpu_container_gpu_seconds_total\{[^}]*\bid="%s"[^}]*\} (\S+)' % container[:12], text, re.M)
            found.append((c.get("gpu_time_seconds", 0), float(line.group(1)) if line else 0, c.get("switches", 0), c.get("preemptions", 0)))
        return found

    def accounted(self, exporter, sampler, loads, seconds):
        """Runs loads; for each its last line and what its account got more: smi, exporter, switches, preemptions. And NVML's seconds.
        Accounts have what was before, as they do when it returns."""
        before = self.accounts(exporter, loads)
        with sampler:
            _, runs, _ = self.measure(loads, seconds)
        time.sleep(SETTLED)
        after = self.accounts(exporter, loads)
        return [(r.finals[0], *(b - a for a, b in zip(x, y))) for r, x, y in zip(runs, before, after)], sampler.seconds()

    def account(self, seconds=8.0):
        self.policy("preempt")
        off = lambda got, want: 100 * (got / want - 1)
        close = lambda percent: abs(percent) <= 1
        sampler, specs = Sampler(), [{"program": p, "size": "8GiB"} for p, _, _ in ACCOUNTED.values()] + [{}]
        with processes.Exporter("--no-nvml") as exporter, self.group("cgpu", specs) as workers:
            hog = workers[-1]
            packed_each = {}
            for (name, (_, _, packed)), w in zip(ACCOUNTED.items(), workers):
                if packed:
                    _, (run,), _ = self.measure({w: packed}, 2)
                    packed_each[name] = run.finals[0]["event_us"] * 1e-6 / run.finals[0]["launched"]
            time.sleep(SETTLED)
            for (name, (_, load, packed)), w in zip(ACCOUNTED.items(), workers):
                [(final, smi, exported, switches, _)], nvml = self.accounted(exporter, sampler, {w: load}, seconds)
                events = final["event_us"] * 1e-6
                each = packed_each.get(name) or events / final["launched"]
                self.row(name + ": smi against events", "%.3f s, %.3f s: %+.2f %%" % (smi, events, off(smi, events)), "" if packed else "± 1 %",
                         None if packed else close(off(smi, events)), smi=smi, events=events, switches=switches)
                if packed:
                    events = each * final["launched"]
                    self.row("  against its steps without a pause", "%.3f s, %.3f s: %+.2f %%" % (smi, events, off(smi, events)), "± 1 %",
                             close(off(smi, events)), steps=events)
                self.row("  the exporter", "%.3f s: %+.2f %%" % (exported, off(exported, smi)), "± 1 % of smi", close(off(exported, smi)),
                         exporter=exported)
                if nvml is not None:
                    self.row("  NVML at 10 Hz", "%.3f s: %+.2f %%" % (nvml, off(nvml, events)), nvml=nvml)

                # The neighbour has work before, and after.
                covering = "%s --ramp-ms 600 --seconds %g" % (MS1, seconds + 1.5)
                (mine, its), nvml = self.accounted(exporter, sampler, {w: load, hog: covering}, seconds)
                final, smi, exported, switches, preemptions = mine
                expected = each * final["launched"]
                saving = preemptions * SAVE_PREEMPTED + (switches - preemptions) * SAVE_YIELDED
                self.row(name + ", neighbour: smi against work", "%.3f s, %.3f s: %+.2f %%" % (smi, expected, off(smi, expected)), smi=smi,
                         expected=expected, switches=switches, preemptions=preemptions, exporter=exported)
                self.row("  and what %d saves take" % switches, "%.3f s: %+.2f %%" % (expected + saving, off(smi, expected + saving)), "± 1 %",
                         close(off(smi, expected + saving)))
                self.row("  the exporter", "%.3f s: %+.2f %%" % (exported, off(exported, smi)), "± 1 % of smi", close(off(exported, smi)))
                whole, both = its[0]["event_us"] * 1e-6, smi + its[1] + (switches + its[3]) * BETWEEN
                self.row("  both, and between, of the whole time", "%.3f s, %.3f s: %+.2f %%" % (both, whole, off(both, whole)), "± 1 %",
                         close(off(both, whole)), both=both, whole=whole, neighbour=its[1], neighbour_switches=its[3])
                if nvml is not None:
                    self.row("  NVML at 10 Hz, of the GPU", "%.3f s, of whom: unknown" % nvml, nvml=nvml)

    def caps(self):
        with self.group("default", [{}]) as (alone,):
            exclusive = self.rates(alone, CAPPED)
            self.row("exclusive, work in µs per s", ", ".join("%s %.0f" % x for x in exclusive.items()), **{"exclusive": exclusive})
        self.policy("fixed")
        seconds = 5.0

        def check(label, workers, wanted, kernels):
            for name in kernels:
                begin, runs, _ = self.measure({w: CAPPED[name] for w in workers}, seconds)
                got = [100 * r.work(begin, begin + seconds) / seconds / exclusive[name] for r in runs]
                worst = max(abs(100 * r.work(begin + i / 10, begin + i / 10 + 1) / exclusive[name] - p)
                            for r, p in zip(runs, wanted) for i in range(int(seconds * 10) - 9))
                self.row("%s, %s" % (label, name), percents(got) + " %", "%s ± 1" % percents(wanted),
                         all(abs(g - p) <= 1 for g, p in zip(got, wanted)), percent=got, worst_second=worst)

        two = ("1 ms", "120 ms")
        with self.group("cgpu", [{"env": {"CORE_PERCENTAGE": p}} for p in (10, 30, 50)]) as workers:
            for w, p in zip(workers, (10, 30, 50)):
                check("%d %% alone" % p, [w], [p], CAPPED if p == 30 else two)
        with self.group("cgpu", [{"env": {"CORE_PERCENTAGE": p}} for p in (70, 30)]) as (seventy, thirty):
            check("70 % alone", [seventy], [70], two)
            check("30 % + 70 %", [thirty, seventy], [30, 70], two)
        with self.group("cgpu", [{"env": {"CORE_PERCENTAGE": 50}}] * 2) as workers:
            check("50 % + 50 %", workers, [50, 50], two)

    def processes(self, side):
        if side == "cgpu":
            self.policy("preempt")
        ours, seconds = side == "cgpu", 5.0
        with self.group(side, [{}, {"processes": 8, "size": "8GiB"}]) as workers:
            begin, runs, _ = self.measure({w: MS1 for w in workers}, seconds)
            got, worst = shares(runs, begin, begin + seconds), worst_second(runs, [50, 50], begin, seconds)
            self.row("1 process : 8 processes", percents(got), "50.0 : 50.0 ± 1" if ours else "", abs(got[0] - 50) <= 1 if ours else None, shares=got)
            self.row("worst second off by", "%.1f" % worst, worst=worst)

    def priority(self, side):
        ours, seconds = side == "cgpu", 5.0
        if ours:
            self.policy("preempt")
        with self.group(side, [{"program": "latency", "env": {"HIGH_PRIO": 1}}] + [{}] * 4) as (client, *others):
            if ours:
                for o in others:
                    output("cgpu", "set", o.id(), "--priority", "best-effort")

            def beside(label, load, n, limit=None, least=None, exclusive=None, request=REQUEST):
                loads = {client: request, **{o: load for o in others[:n]}}
                begin, (run, *rest), _ = self.measure(loads, seconds)
                f = run.finals[0]
                self.row(label, "p50 %d p90 %d p99 %d max %d µs" % (f["p50"], f["p90"], f["p99"], f["max"]),
                         "p99 ≤ %d µs" % limit if limit and ours else "", f["p99"] <= limit if limit and ours else None,
                         **{k: f[k] for k in ("p50", "p90", "p99", "max", "count", "unfinished")})
                if rest:
                    got = 100 * sum(r.work(begin, begin + seconds) for r in rest) / seconds / exclusive
                    self.row("  best effort gets", "%.1f %% of exclusive" % got, "≥ %d %%" % least if least and ours else "",
                             got >= least if least and ours else None, percent=got)

            beside("client alone", None, 0)
            exclusive = self.rates(others[0], {"spin": SPIN, "long": MS120})
            beside("client beside one", SPIN, 1, 200, 78, exclusive["spin"], PAUSED)
            beside("client beside one, every 2 ms", SPIN, 1, 450, None, exclusive["spin"])
            beside("client beside one, 120 ms kernels", MS120, 1, 450, 78, exclusive["long"], PAUSED)
            beside("client beside four", SPIN, 4, 250, 78, exclusive["spin"], PAUSED)
            beside("first after idle, beside one", SPIN, 1, 300, None, exclusive["spin"], SELDOM)
            beside("first after idle, beside four", SPIN, 4, 300, None, exclusive["spin"], SELDOM)

    def poisson(self):
        seconds, found = 8.0, {}
        for side in ("default", "cgpu"):
            if side == "cgpu":
                self.policy("preempt")
            with self.group(side, [{"program": "latency"}] * 4) as workers:
                for load in (20, 50):
                    # The same seeds on both sides: the same requests at the same times.
                    loads = {w: "--work-us %d --poisson %g --seed %d --samples" % (POISSON_US, load / 4, 1 + i) for i, w in enumerate(workers)}
                    _, runs, _ = self.measure(loads, seconds)
                    samples = [s for r in runs for f in r.finals for s in f["samples"]]
                    found[side, load] = [quantile(samples, q) for q in (0.5, 0.99)] + [sum(f["unfinished"] for r in runs for f in r.finals), len(samples)]
        for load in (20, 50):
            (p50, p99, left, n), (d50, d99, dleft, _) = found["cgpu", load], found["default", load]
            self.row("load %d %%, 4 containers, %d requests" % (load, n), "p50 %d p99 %d µs" % (p50, p99), "p99 ≤ 1.1 × %d µs" % d99,
                     p99 <= 1.1 * d99 and left == 0, p50=p50, p99=p99, unfinished=left, count=n)
            self.row("  driver's default", "p50 %d p99 %d µs" % (d50, d99), p50=d50, p99=d99, unfinished=dleft)

    def live(self):
        """One of a pair gets weight 4, then 1 again, three times. A share is reached at the first time from which on every
        200 ms are within 5 points of it. That window holds several rounds of slices; so that it does not flatter, the part
        of it that 5 points of the 30 may hide is added."""
        self.policy("preempt")
        every, window, slack, targets = 1.2, 0.2, 5, [80, 50] * 3
        with self.group("cgpu", [{}, {}]) as workers:
            changing = workers[1].id()

            def change(weight):
                def go():
                    issued = time.time()
                    output("cgpu", "set", changing, "--weight", str(weight))
                    return issued, time.time()
                return go

            during = [(1 + every * i, change(4 if target == 80 else 1)) for i, target in enumerate(targets)]
            begin, runs, changes = self.measure({w: MS1 for w in workers}, 1 + every * len(targets), window_ms=5, during=during)
            delays, hidden = [], 1000 * window * slack / abs(targets[0] - targets[1])
            for (issued, returned), target in zip(changes, targets):
                steps = [issued + i * 0.01 for i in range(int((every - window - 0.05) * 100))]
                good = [abs(shares(runs, t, t + window)[1] - target) <= slack for t in steps]
                first = len(good) - list(reversed(good)).index(False) if False in good else 0
                delays.append(1000 * (steps[first] - issued) + hidden if first < len(steps) else float("inf"))
            self.row("ms until new shares, of each change", " ".join("%.0f" % d for d in delays), "≤ 200", max(delays) <= 200, delays_ms=delays)
            self.row("  of that cgpu set itself", " ".join("%.0f" % (1000 * (b - a)) for a, b in changes))

    def many(self, side, counts=(20, 50, 64)):
        if side == "cgpu":
            self.policy("preempt", 64)
        ours, seconds = side == "cgpu", 5.0
        begin = time.time()
        with self.group(side, [{"size": "1GiB"}] * max(counts), at_once=16) as workers:
            self.row("start of %d containers" % len(workers), "%.0f s" % (time.time() - begin))
            for n in counts:
                begin, runs, _ = self.measure({w: MS1 for w in workers[:n]}, seconds)
                got = shares(runs, begin, begin + seconds)
                off = max(abs(g - 100 / n) for g in got)
                self.row("%d containers: shares" % n, "%.2f to %.2f, mean %.2f" % (min(got), max(got), 100 / n),
                         "all > 0, ± 3" if ours else "", min(got) > 0 and off <= 3 if ours else None, shares=got, off=off,
                         total=sum(r.work(begin, begin + seconds) for r in runs) / seconds)
        if ours:
            self.row("100 containers", "not tried", "a GPU takes 64 at most (max_inst)")

    def suspend(self):
        self.policy("preempt")
        with self.group("cgpu", [{}, {}]) as workers:
            paused = workers[0].id()

            def command(verb):
                def go():
                    issued = time.time()
                    output("cgpu", verb, paused)
                    return issued, time.time()
                return go

            for name, load in (("1 ms", MS1), ("100 ms", KERNELS["100 ms"])):
                begin, runs, ((_, off), (on, _)) = self.measure({w: load for w in workers}, 6, 10, ((1.5, command("pause")), (3.5, command("resume"))))
                whole = sum(r.work(begin, begin + 1.4) for r in runs) / 1.4
                its, other = (100 * r.work(off + 0.02, on) / (on - off - 0.02) / whole for r in runs)
                self.row("%s: paused one gets" % name, "%.2f %%" % its, "0", its < 0.1, percent=its)
                self.row("%s: the other meanwhile" % name, "%.1f %%" % other, "≥ 99 %", other >= 99, percent=other)
                resumed = next((t for t, n in next(iter(runs[0].series.values())) if t > on and n > at(next(iter(runs[0].series.values())), on) + 1), float("inf"))
                self.row("%s: resumed after" % name, "%.0f ms" % (1000 * (resumed - on)), "≤ 200 ms", resumed - on <= 0.2)
                after = shares(runs, on + 0.5, begin + 6)
                self.row("%s: shares afterwards" % name, percents(after), "50.0 : 50.0 ± 1.5", abs(after[0] - 50) <= 1.5, shares=after)
                if name == "1 ms":
                    lost = runs[0].finals[0]["lost_us"]
                    self.row("launched and never done", "%.0f µs" % lost, "0", lost == 0)

    def guard(self):
        """A guard is killed while its container (10 %) is off: the kernel at work must go on without it."""
        self.policy("fixed")
        for attempt in range(3):
            with self.group("cgpu", [{"env": {"CORE_PERCENTAGE": 10}}]) as (w,):
                ledger = json.load(open(os.environ["CGPU_RUN_DIR"] + "/ledger.json"))
                pid = next(r["guardPid"] for r in ledger["records"] if r["id"] == w.id())
                # One kernel that outlasts the case: the program makes no driver call, which would fail.
                w.send("--start-at %.3f --seconds 20 --window-ms 5 --ramp-ms 100 --mode persistent --kernel-us 60000000" % (time.time() + 0.3))
                w.kill = True
                time.sleep(1.2)
                points = self.wait_off(w)
                os.kill(pid, signal.SIGKILL)
                killed = time.time()
                time.sleep(2.5)
                points = [(x["t"], x["total"]) for x in list(w.lines) if "total" in x]
                standing = at(points, killed)
                off_since = max((t for (t, n), (_, before) in zip(points[1:], points) if n > before and t <= killed), default=killed)
                again = next((t for t, n in points if t > killed and n > standing), float("inf"))
                later = 100 * (at(points, killed + 2.4) - at(points, killed + 1)) / 1.4e6
                self.row("try %d: off for %.0f ms when killed" % (attempt + 1, 1000 * (killed - off_since)), "goes on after %.0f ms" % (1000 * (again - killed)),
                         "≤ 1000 ms", again - killed <= 1 and later > 0, delay_s=again - killed)
                self.row("  later it gets", "%.1f %% of the GPU" % later, percent=later)
                try:
                    output("docker", "exec", w.name, self.programs + "/share", "--calibrate", timeout=30)
                    self.row("  a new GPU program", "runs", "fails", False)
                except Broken:
                    self.row("  a new GPU program", "fails", "fails", True)
            subprocess.run(["cgpu", "gc"], stdout=subprocess.DEVNULL, timeout=30)

    @staticmethod
    def wait_off(w):
        """Returns once the worker has had work and then none for 20 to 40 ms."""
        deadline = time.time() + 5
        while time.time() < deadline:
            points = [(x["t"], x["total"]) for x in w.lines[-40:] if "total" in x]
            moved = [t for (t, n), (_, before) in zip(points[1:], points) if n > before]
            if moved and 0.02 <= time.time() - moved[-1] <= 0.04:
                return points
            time.sleep(0.002)
        raise Broken("%s: no off phase seen in 5 s" % w.name)

    def cases(self):
        """Name, seconds that it takes (with the containers' start), function."""
        listed = [("weights " + ":".join(map(str, w)), 38, lambda w=w: self.weights("cgpu", w)) for w in ((1, 1), (1, 3), (1, 9), (1, 2, 4, 8))]
        listed.append(("weights default", 24, lambda: self.weights("default", (1, 1))))
        for side in ("default", "cgpu"):
            listed.append(("sharers spin " + side, 36, lambda s=side: self.sharers(s, "share", SPIN, "µs/s", ((2, 99.4), (5, 99.3), (10, 99.0)))))
        for side in ("default", "cgpu"):
            listed.append(("sharers resnet " + side, 70, lambda s=side: self.sharers(s, MODEL + "resnet", "", "img/s")))
        listed.append(("caps", 115, self.caps))
        for side in ("cgpu", "default"):
            listed.append(("processes " + side, 12, lambda s=side: self.processes(s)))
        for side in ("cgpu", "default"):
            listed.append(("priority " + side, 55, lambda s=side: self.priority(s)))
        listed += [("poisson", 45, self.poisson), ("live", 14, self.live), ("suspend", 18, self.suspend), ("guard", 20, self.guard)]
        for side in ("cgpu", "default"):
            listed.append(("many " + side, 55, lambda s=side: self.many(s)))
        for side in ("default", "cgpu"):
            listed.append(("real loop " + side, 40, lambda s=side: self.loops(s)))
        listed.append(("real loop max_loss", 25, self.loss))
        for side in ("default", "cgpu"):
            listed.append(("real crowd " + side, 68, lambda s=side: self.crowd(s)))
        for model in ("decoder", "bert"):
            for side in ("default", "mps", "cgpu"):
                listed.append(("real %s %s" % (model, side), 60, lambda m=model, s=side: self.sharers(s, MODEL + m, "", UNITS[m], None)))
        for model, unit in (("decoder --graph", "tokens/s"), ("bert", "seq/s")):
            for side in ("default", "mps", "cgpu", "domain"):
                listed.append(("space %s %s" % (model, side), 60, lambda m=model, s=side, u=unit: self.space(self.sharers, s, MODEL + m, "", u, None)))
        listed += [("space domains", 70, lambda: self.space(self.domains, MODEL + "decoder --graph", "", "tokens/s")),
                   ("space domains that saturate", 50, lambda: self.space(self.domains, "share", SPIN, "µs/s", ((1, 1), (1, 3)), 2)),
                   ("space requests", 240, lambda: self.space(self.requests))]
        listed.append(("real service", 170, self.service))
        listed.append(("account", 150, self.account))
        if len(glob.glob("/dev/nvidia[0-9]*")) > 1:
            for what in ("allreduce", "ddp"):
                for side in ("default", "cgpu"):
                    listed.append(("two gpus %s %s" % (what, side), 55, lambda w=what, s=side: self.pair(s, w)))
        return listed

    def save(self):
        with open(self.out, "w") as f:
            json.dump({"facts": self.facts, "rows": self.rows}, f, indent=1)


class Group:
    """Containers of one case. A spec has the arguments of Worker."""

    def __init__(self, bench, side, specs, at_once):
        self.bench, self.side, self.specs, self.at_once, self.workers = bench, side, specs, at_once, []

    def __enter__(self):
        if self.side == "mps":
            output(HERE + "/shares.sh", "mps_start")

        def start(spec):
            w = Worker(self.bench, self.side, **spec)
            self.workers.append(w)
            w.wait("its start", "ready", 120)
            return w
        try:
            with ThreadPoolExecutor(self.at_once) as pool:
                return list(pool.map(start, self.specs))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(Worker.end, self.workers))
        if self.side == "mps":
            output(HERE + "/shares.sh", "mps_stop")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--programs", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=540)
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    bench = Bench(options)
    if options.only == "list":
        for name, seconds, _ in bench.cases():
            print("%4d s  %s" % (seconds, name))
        return 0
    bench.rate = json.loads(output(bench.programs + "/share", "--calibrate"))["iters_per_us"]
    bench.facts["iters_per_us"] = bench.rate
    try:
        bench.facts["gpu"] = output("nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,temperature.gpu", "--format=csv,noheader").strip()
    except Broken as e:
        bench.facts["gpu"] = str(e)
    print("%.2f iterations are 1 µs of the GPU; %s" % (bench.rate, bench.facts["gpu"]))
    broken, left = 0, []
    for name, seconds, case in bench.cases():
        if not re.search(options.only, name):
            continue
        if time.monotonic() + seconds > deadline:
            left.append(name)
            continue
        begin, bench.case = time.monotonic(), name
        try:
            case()
        except (Broken, KeyError, ValueError, OSError, StopIteration, subprocess.SubprocessError) as e:
            broken += 1
            bench.row("broken", "", str(e) or type(e).__name__, False)
            bench.card = None
        took = time.monotonic() - begin
        print("%-24s took %.0f s" % (name, took))
        bench.facts.setdefault("seconds", {})[name] = took
        bench.save()
    reached = sum(r["ok"] is True for r in bench.rows)
    missed = sum(r["ok"] is False for r in bench.rows) - broken
    if left:
        print("not run, no time left: ONLY='^(%s)$'" % "|".join(left))
    print("shares: %d reached, %d not reached, %d cases broken, %d cases not run" % (reached, missed, broken, len(left)))
    return 1 if missed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
