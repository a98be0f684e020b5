"""A program's steps one after the other, some of them under way, between two times of the wall clock.
The options and the lines printed are those of share.cu; a line stands for one step, not for a window."""
import argparse
import collections
import json
import os
import sys
import time

import torch


def parser(usage):
    p = argparse.ArgumentParser(usage=usage)
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--start-at", type=float, default=0)
    p.add_argument("--ramp-ms", type=float, default=400)
    p.add_argument("--window-ms", type=float)    # share's; not used
    p.add_argument("--iters-per-us", type=float)  # the same
    p.add_argument("--events", action="store_true")  # the time of all steps by CUDA's events
    p.add_argument("--stdin", action="store_true")
    return p


def say(**line):
    print(json.dumps({"pid": os.getpid(), **line}), flush=True)


def mark(timed=False):
    event = torch.cuda.Event(blocking=True, enable_timing=timed)
    event.record()
    return event


def step(work, timed=False):
    """Begins a step of work, and returns what its end can be waited for by."""
    work()
    return mark(timed)


def run(o, work, count, ahead, agreed=lambda over: over, quiet=False):
    """One run: work() again and again, each of it count units. agreed(over) says whether all processes of the program end now."""
    begin = (o.start_at or time.time() + o.ramp_ms / 1000 + 0.1) - o.ramp_ms / 1000
    start = begin + o.ramp_ms / 1000
    time.sleep(max(0, begin - time.time()))
    late = time.time() - begin
    # Some steps may be under way at the end of the time that counts; the others must not get their share early.
    ends, total, until = [(time.time(), 0)], 0, start + o.seconds + 0.3
    launched, computed = 0, 0.0

    def launch():
        nonlocal launched
        launched += count
        return mark(True) if o.events else None, step(work, o.events)

    def finish(begin, end):
        nonlocal computed
        end.synchronize()
        computed += begin.elapsed_time(end) if begin else 0

    queue = collections.deque(launch() for _ in range(ahead))
    while not agreed(ends[-1][0] >= until):
        finish(*queue.popleft())
        queue.append(launch())
        total += count
        ends.append((time.time(), total))
    for events in queue:
        finish(*events)
    torch.cuda.synchronize()
    if quiet:
        return
    print("\n".join('{"pid":%d,"t":%.6f,"done":%d,"total":%d}' % (os.getpid(), t, count, n) for t, n in ends))
    counted = sum(count for t, _ in ends[1:] if start <= t < start + o.seconds)
    say(final=True, count=counted, seconds=o.seconds, late_ms=late * 1000, launched=launched, event_us=computed * 1000)


def orders(p, options):
    """The options of each run: a line of standard input, or the command's own."""
    if not options.stdin:
        yield options
        return
    for line in sys.stdin:
        yield p.parse_args(line.split(), argparse.Namespace(**vars(options)))
