"""Trains ResNet-50 for a few steps with a large batch and prints the losses, the time of a step and the peak of memory.

The same seed and batch must give the same losses with memory spilled to the host as without.
usage: train_spill.py BATCH [STEPS]
"""
import sys
import time

import torch
import torchvision

batch, steps = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.benchmark = False
net = torchvision.models.resnet50().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
x = torch.randn(batch, 3, 224, 224, device="cuda")
y = torch.randint(0, 1000, (batch,), device="cuda")
losses, times = [], []
for _ in range(steps):
    begin = time.time()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
    times.append(time.time() - begin)
free, total = torch.cuda.mem_get_info()
print("losses", " ".join("%.6f" % l for l in losses))
print("step_ms %.1f" % (sorted(times[1:])[len(times[1:]) // 2] * 1e3), "first_s %.2f" % times[0])
print("reserved_MiB", torch.cuda.memory_reserved() >> 20, "used_MiB", (total - free) >> 20, "total_MiB", total >> 20)
