#!/usr/bin/env python3
"""What `cgpu exporter` costs with 20 and with 60 containers, scraped every 15 s, each second, and not at all: its CPU time and its helper's (NVML),
the guards' that it asks, memory, and how long a scrape takes. Run by run.sh on a private node; the containers hold memory and need no CUDA,
as a guard has the same to say of one that computes. A table for docs/measurements.md goes to standard output, all figures to
$OUT/exporter.json. 330 s.
  WINDOW=SECONDS   how long each row is measured (default 45; CPU seconds are printed for a minute)
  CONTAINERS=N,N   how many containers (default 20,60)"""
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import processes

WINDOW = float(os.environ.get("WINDOW", 45))
COUNTS = [int(n) for n in os.environ.get("CONTAINERS", "20,60").split(",")]
INTERVALS = (None, 15.0, 1.0)


def start(i):
    subprocess.run(["docker", "run", "-d", "--runtime", "cgpu", "--network", "none", "--name", "export%d" % i, "-e", "CGPU_MEM=200MiB",
                    "-e", "CGPU_GPUS=0", "probe", "cgpu-probe", "hold", "4MiB"], check=True, stdout=subprocess.DEVNULL)


def cpu(pids):
    return sum(processes.Size(p).cpu for p in pids)


def scrapes(exporter, interval):
    """Scrapes at the interval until the window's end: how long each took, and the last answer."""
    took, answer, begin = [], "", time.time()
    end, due = begin + WINDOW, begin
    while interval and due < end:
        time.sleep(max(0, due - time.time()))
        asked = time.time()
        answer = exporter.scrape()
        took.append(1000 * (time.time() - asked))
        due += interval
    time.sleep(max(0, end - time.time()))
    return took, answer


def row(exporter, n, interval):
    guards, helpers = [v["guard_pid"] for v in processes.vgpus()], processes.children(exporter.pid)
    if len(guards) != n:
        sys.exit("exporter: %d containers have a guard, want %d" % (len(guards), n))
    groups = {"exporter": [exporter.pid], "helper": helpers, "guards": guards}
    before, begin = {k: cpu(p) for k, p in groups.items()}, time.time()
    took, answer = scrapes(exporter, interval)
    minute = 60 / (time.time() - begin)
    spent = {k: (cpu(p) - before[k]) * minute for k, p in groups.items()}
    size = processes.Size(exporter.pid)
    return {"containers": n, "interval": interval, **spent, "rss_mib": size.rss_kib / 1024, "peak_mib": size.peak_kib / 1024, "fds": size.fds,
            "helper_mib": sum(processes.Size(p).rss_kib for p in helpers) / 1024, "scrapes": len(took),
            "median_ms": statistics.median(took) if took else None, "max_ms": max(took) if took else None, "bytes": len(answer),
            "series": sum(1 for line in answer.splitlines() if line and line[0] != "#")}


def main():
    rows, started = [], 0
    subprocess.run(["cgpu", "refresh"], check=True)
    subprocess.run(["cgpu", "policy", "0", "preempt", "--max-inst", "64"], check=True, stdout=subprocess.DEVNULL)
    print("| containers | scraped | scrape: median, max | series, bytes | exporter: CPU s a minute | its helper | guards | exporter: resident, peak"
          " | helper |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    with processes.Exporter() as exporter:
        for n in COUNTS:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(start, range(started, n)))
            started = max(started, n)
            time.sleep(5)
            exporter.scrape()  # what is made once
            for interval in INTERVALS:
                r = row(exporter, n, interval)
                rows.append(r)
                scraped = ("every %g s" % interval, "%.1f, %.1f ms" % (r["median_ms"], r["max_ms"])) if interval else ("not", "")
                print("| %d | %s | %s | %s | %.2f | %.2f | %.2f | %.1f, %.1f MiB | %.1f MiB |" % (
                    n, *scraped, "%d, %d" % (r["series"], r["bytes"]) if interval else "", r["exporter"], r["helper"], r["guards"],
                    r["rss_mib"], r["peak_mib"], r["helper_mib"]), flush=True)
    with open(os.environ["OUT"] + "/exporter.json", "w") as f:
        json.dump(rows, f, indent=1)
    subprocess.run(["docker", "rm", "-f"] + ["export%d" % i for i in range(started)], stdout=subprocess.DEVNULL)
    worst = max(r["max_ms"] for r in rows if r["scrapes"])
    print("the slowest scrape %.1f ms, wanted at most 10: %s" % (worst, "reached" if worst <= 10 else "NOT REACHED"))


main()
