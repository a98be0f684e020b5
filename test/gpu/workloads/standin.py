#!/usr/bin/python3
"""Stands in for share, latency, steady, managed, fill and models.py on the simulated driver, so that the scripts can be tried without a GPU:
the same options and lines, and cgpu-probe's simulated kernels. What it prints are no figures."""
import json
import os
import subprocess
import sys
import time

HERE, NAME = os.path.dirname(os.path.abspath(__file__)), os.path.basename(sys.argv[0])
GAPS = {"decoder": "300us", "resnet": "0"}


def parse(words):
    found, words = {}, list(words)
    while words:
        word = words.pop(0)
        found[word.lstrip("-")] = words.pop(0) if words and not words[0].startswith("--") else "1"
    return found


def say(**line):
    print(json.dumps({"pid": os.getpid(), **line}), flush=True)


def compute(seconds, kernel_us=1000.0, gap="0"):
    """Kernels for so many seconds. What the simulated driver says of them, a line at a time: of each window, and of all at the end."""
    command = [HERE + "/cgpu-probe", "work", "--kernel", "%gus" % kernel_us, "--gap", gap, "--for", "%.3fs" % seconds, "--windows", "100ms"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        what, *words = line.split()
        yield what, {k: float(v) for k, v in (word.split("=") for word in words)}
    if process.wait():
        sys.exit("%s: exit %d" % (command, process.returncode))


def run(o):
    ramp = float(o.get("ramp-ms", 400)) / 1000
    start = float(o.get("start-at", 0)) or time.time() + ramp + 0.1
    time.sleep(max(0, start - ramp - time.time()))
    begin, seconds, kernel_us = time.time(), float(o.get("seconds", 5)), float(o.get("kernel-us", 1000))
    total = 0.0
    for what, did in compute(seconds + ramp + 0.2, kernel_us, GAPS.get(o.get("model"), "0")):
        if what != "total":
            total += did["gpu_ms"] * 1e3
            say(t=time.time(), done=did["gpu_ms"] * 1e3, total=total)
    gpu_us, elapsed_us = did["gpu_ms"] * 1e3, did["elapsed_ms"] * 1e3
    say(final=True, count=did["kernels"], work_us=gpu_us, seconds=seconds, late_ms=max(0, begin - start + ramp) * 1000, lost_us=0,
        launched=did["kernels"], event_us=elapsed_us if NAME == "share" else gpu_us, p50=1, p90=1, p99=1, max=1, unfinished=0, samples=[])


if NAME in ("steady", "managed", "fill"):  # their arguments have no names
    numbers = [float(x) for x in sys.argv[1:] if x.replace(".", "", 1).isdigit()]
    print("managed cudaSuccess\nordinary cudaSuccess" if NAME == "managed" else "kept canary 1", flush=True)
    for _ in range(int(numbers[-1])) if NAME == "managed" else [0]:
        list(compute(numbers[0] if NAME == "steady" else 1))
        if NAME == "managed":
            print("right 1 rounds", flush=True)
    sys.exit(0)
options = parse(sys.argv[1:])
if "calibrate" in options:
    sys.exit(print('{"iters_per_us":1,"blocks":1}'))
say(ready=True)
if "stdin" in options:
    for line in sys.stdin:
        run({**options, **parse(line.split())})
else:
    run(options)
