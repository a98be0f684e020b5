"""A process for each GPU of the container, which work together in a closed loop.
usage: collective.py [--what allreduce|ddp] [--seconds S] [--start-at EPOCH] [--ramp-ms 400] [--stdin]
  allreduce   256 MiB of floats, added up by NCCL. Counts MiB.
  ddp         ResNet-50 trained by DistributedDataParallel, batch 64 for each GPU, bfloat16. Counts images of all GPUs."""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import closedloop

SIZE_MIB, BATCH = 256, 64


def allreduce(rank, world):
    x = torch.zeros(SIZE_MIB << 18, device="cuda")
    return lambda: dist.all_reduce(x), SIZE_MIB


def ddp(rank, world):
    import torchvision
    net = torchvision.models.resnet50().to(memory_format=torch.channels_last).cuda()
    net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[rank])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    x = torch.randn(BATCH, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (BATCH,), device="cuda")

    def train():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    return train, BATCH * world


def right(rank, world):
    """NCCL adds up rightly, or there is no figure."""
    x = torch.full((1 << 20,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    assert bool((x == world * (world + 1) / 2).all()), "a wrong sum"


def worker(rank, world, what, orders, barrier, over):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    torch.set_num_threads(2)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    right(rank, world)
    work, count = {"allreduce": allreduce, "ddp": ddp}[what](rank, world)
    for _ in range(10):
        closedloop.step(work).synchronize()

    def agreed(mine):
        """All do the same number of steps: the first says when they end. It cannot change its mind before all have read it, because
        it waits for a step of theirs in between."""
        if rank == 0:
            over.value = mine
        barrier.wait()
        return bool(over.value)

    barrier.wait()
    if rank == 0:
        closedloop.say(ready=True, gpus=world, total_mib=torch.cuda.mem_get_info()[1] >> 20)
    while (o := orders[rank].get()) is not None:
        closedloop.run(o, work, count, 4, agreed, quiet=rank > 0)
        barrier.wait()
    right(rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = closedloop.parser(__doc__)
    p.add_argument("--what", choices=["allreduce", "ddp"], default="allreduce")
    options = p.parse_args()
    context, world = mp.get_context("spawn"), torch.cuda.device_count()
    orders = [context.SimpleQueue() for _ in range(world)]
    barrier, over = context.Barrier(world), context.Value("b", 0)  # named: they must live until the processes have them
    workers = mp.spawn(worker, (world, options.what, orders, barrier, over), world, join=False)
    for o in closedloop.orders(p, options):
        for queue in orders:
            queue.put(o)
    for queue in orders:
        queue.put(None)
    while not workers.join():
        pass
