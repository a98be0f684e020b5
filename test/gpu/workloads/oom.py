"""Fills the GPU with small tensors until PyTorch reports out of memory, then shows that it can go on.

Prints total_MiB as PyTorch sees the card, used_MiB (total - free) when it was refused, and the error's name.
usage: oom.py [PIECE_MIB]
"""
import sys

import torch

piece = int(sys.argv[1]) if len(sys.argv) > 1 else 2
torch.zeros(1, device="cuda")
free, total = torch.cuda.mem_get_info()
print("total_MiB", total >> 20, "free_MiB", free >> 20)
print("properties_MiB", torch.cuda.get_device_properties(0).total_memory >> 20)
held, error = [], ""
try:
    while True:
        held.append(torch.empty(piece << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as e:
    error = type(e).__name__
free, total = torch.cuda.mem_get_info()
print("used_MiB", (total - free) >> 20, "allocated_MiB", len(held) * piece, "then", error)
held.clear()
torch.cuda.empty_cache()
x = torch.ones(1024, 1024, device="cuda")
assert float((x @ x)[0, 0]) == 1024.0
print("goes on after", error)
