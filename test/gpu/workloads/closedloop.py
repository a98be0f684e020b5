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
    p.add_argument("--stdin", action="store_true")
    return p


def say(**line):
    print(json.dumps({"pid": os.getpid(), **line}), flush=True)


def step(work):
    """Begins a step of work, and returns what its end can be waited for by."""
    work()
    done = torch.cuda.Event(blocking=True)
    done.record()
    return done


def run(o, work, count, ahead, agreed=lambda over: over, quiet=False):
    """One run: work() again and again, each of it count units. agreed(over) says whether all processes of the program end now."""
    begin = (o.start_at or time.time() + o.ramp_ms / 1000 + 0.1) - o.ramp_ms / 1000
    start = begin + o.ramp_ms / 1000
    time.sleep(max(0, begin - time.time()))
    late = time.time() - begin
    # Some steps may be under way at the end of the time that counts; the others must not get their share early.
    ends, total, until = [(time.time(), 0)], 0, start + o.seconds + 0.3
    queue = collections.deque(step(work) for _ in range(ahead))
    while not agreed(ends[-1][0] >= until):
        queue.popleft().synchronize()
        queue.append(step(work))
        total += count
        ends.append((time.time(), total))
    torch.cuda.synchronize()
    if quiet:
        return
    print("\n".join('{"pid":%d,"t":%.6f,"done":%d,"total":%d}' % (os.getpid(), t, count, n) for t, n in ends))
    counted = sum(count for t, _ in ends[1:] if start <= t < start + o.seconds)
    say(final=True, count=counted, seconds=o.seconds, late_ms=late * 1000)


def orders(p, options):
    """The options of each run: a line of standard input, or the command's own."""
    if not options.stdin:
        yield options
        return
    for line in sys.stdin:
        yield p.parse_args(line.split(), argparse.Namespace(**vars(options)))
