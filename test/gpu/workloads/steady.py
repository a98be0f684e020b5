"""Works with a buffer that must stay what it is, for so many seconds. Usage: steady.py SECONDS"""
import sys
import time

import torch

kept = torch.arange(1 << 26, device="cuda")
want = int(kept.sum())
a = torch.randn(2048, 2048, device="cuda")
begin = time.time()
rounds = 0
while time.time() - begin < float(sys.argv[1]):
    extra = torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(1)
    assert torch.isfinite(a @ a).all() and int(kept.sum()) == want
    del extra
    torch.cuda.empty_cache()
    rounds += 1
print("steady rounds", rounds)
