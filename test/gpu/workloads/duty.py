"""Computes for 10 ms of every 100 ms, as a service with few requests does, and says how long a burst took beside one of a GPU that is always
busy: `burst_percent N`, 100 where clocks stay up."""
import time

import torch

x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)


def work(n):
    begin = time.time()
    for _ in range(n):
        x @ x
    torch.cuda.synchronize()
    return time.time() - begin


work(500)
each = work(2000) / 2000
n = int(0.01 / each)
bursts = []
end = time.time() + 4
while time.time() < end:
    bursts.append(work(n))
    time.sleep(0.09)
last = sorted(bursts[-10:])[5]
print("a matrix %d us, a burst of %d %.1f ms" % (each * 1e6, n, last * 1e3))
print("burst_percent %d" % (100 * last / (n * each)))
