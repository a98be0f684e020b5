"""Two processes, one for each of the container's two GPUs, add up a tensor by NCCL a few times.

Prints sum_ok, and gigabytes a second of the all-reduce as NCCL's tests count them (bus bandwidth).
"""
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE, ROUNDS = 256 << 20, 20


def worker(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    x = torch.full((SIZE // 4,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    right = bool((x == world * (world + 1) / 2).all())
    torch.cuda.synchronize()
    begin = time.time()
    for _ in range(ROUNDS):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    rate = SIZE * ROUNDS / (time.time() - begin) * 2 * (world - 1) / world / 1e9
    if rank == 0:
        print("gpus", torch.cuda.device_count(), "total_MiB", torch.cuda.mem_get_info()[1] >> 20, "sum_ok", right, "GBps", round(rate))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
