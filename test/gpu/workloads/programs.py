"""One piece of work that touches the driver in its own way, for the check that a vGPU leaves nothing out that programs use.
Usage: programs.py graph|ipc|compile|profile|jax|managed|vmm"""
import os
import sys

what = sys.argv[1]
if what == "vmm":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
if what == "jax":
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax.numpy as jnp
    x = jnp.ones((1024, 1024))
    assert float((x @ x).sum()) == 1024.0**3
    sys.exit(print("jax ok"))
import torch


def child(queue, done):
    tensor = queue.get()
    tensor += 1
    torch.cuda.synchronize()
    done.set()


if __name__ == "__main__":
    if what == "ipc":
        import torch.multiprocessing as mp
        ctx = mp.get_context("spawn")
        queue, done = ctx.Queue(), ctx.Event()
        p = ctx.Process(target=child, args=(queue, done))
        p.start()
        tensor = torch.zeros(1 << 20, device="cuda")
        queue.put(tensor)
        assert done.wait(60)
        torch.cuda.synchronize()
        p.join()
        assert tensor[0].item() == 1
    elif what == "compile":
        f = torch.compile(lambda x: torch.sin(x) * x + 1)
        x = torch.randn(1 << 20, device="cuda")
        assert torch.allclose(f(x), torch.sin(x) * x + 1, atol=1e-5)
    elif what == "profile":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            a = torch.randn(1024, 1024, device="cuda")
            (a @ a).sum().item()
        print("events", len(p.events()))
    else:
        a = torch.randn(4096, 4096, device="cuda")
        assert torch.isfinite((a @ a).sum())
    print(what, "ok")
