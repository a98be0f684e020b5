"""ResNet-50 with random weights, fp16, channels last, batch 64: inference in a closed loop, one batch after the other, with four under way
(--ahead): with one, the GPU would be idle for a moment after each, and a neighbour's turn come with it.
usage: resnet.py --seconds S [--start-at EPOCH] [--ramp-ms 400] [--batch 64] [--ahead 4] [--stdin]
The options and the lines printed are those of share.cu, counted in images; a line stands for one batch, not for a window."""
import argparse
import collections
import json
import os
import sys
import time

import torch
import torchvision

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("--seconds", type=float, default=5)
parser.add_argument("--start-at", type=float, default=0)
parser.add_argument("--ramp-ms", type=float, default=400)
parser.add_argument("--window-ms", type=float)  # share's; not used
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--ahead", type=int, default=4)
parser.add_argument("--stdin", action="store_true")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
net = torchvision.models.resnet50().half().to(memory_format=torch.channels_last).cuda().eval()
images = torch.randn(options.batch, 3, 224, 224, dtype=torch.half, device="cuda").to(memory_format=torch.channels_last)


def launch():
    net(images)
    done = torch.cuda.Event(blocking=True)
    done.record()
    return done


def run(o):
    begin = (o.start_at or time.time() + o.ramp_ms / 1000 + 0.1) - o.ramp_ms / 1000
    start = begin + o.ramp_ms / 1000
    time.sleep(max(0, begin - time.time()))
    late = time.time() - begin
    # Two batches may be under way at the end of the time that counts; the others must not get their share early.
    ends, total, until = [(time.time(), 0)], 0, start + o.seconds + 0.3
    queue = collections.deque(launch() for _ in range(o.ahead))
    while ends[-1][0] < until:
        queue.popleft().synchronize()
        queue.append(launch())
        total += options.batch
        ends.append((time.time(), total))
    torch.cuda.synchronize()
    pid = os.getpid()
    print("\n".join('{"pid":%d,"t":%.6f,"done":%d,"total":%d}' % (pid, t, options.batch, n) for t, n in ends))
    counted = sum(options.batch for t, _ in ends[1:] if start <= t < start + o.seconds)
    print(json.dumps({"pid": pid, "final": True, "images": counted, "seconds": o.seconds, "late_ms": late * 1000}), flush=True)


with torch.inference_mode():
    for _ in range(20):
        launch().synchronize()
    print(json.dumps({"pid": os.getpid(), "ready": True}), flush=True)
    if options.stdin:
        for line in sys.stdin:
            run(parser.parse_args(line.split(), argparse.Namespace(**vars(options))))
    else:
        run(options)
