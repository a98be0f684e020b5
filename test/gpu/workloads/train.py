"""ResNet-50 with random weights: some training steps, some inference, a large matrix product (cuBLAS). Each checks itself."""
import time

import torch
import torchvision

torch.manual_seed(0)
net = torchvision.models.resnet50().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
x = torch.randn(16, 3, 224, 224, device="cuda")
y = torch.randint(0, 1000, (16,), device="cuda")
losses, begin = [], time.time()
for _ in range(5):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
print("train losses", ["%.3f" % l for l in losses], "s %.2f" % (time.time() - begin))
assert all(l == l for l in losses) and losses[-1] < losses[0]

net.eval().half()
with torch.inference_mode():
    out = net(x.half())
torch.cuda.synchronize()
assert out.shape == (16, 1000) and bool(torch.isfinite(out).all())
print("inference ok")

a, b = torch.randn(1024, 1024, dtype=torch.float64), torch.randn(1024, 1024, dtype=torch.float64)
worst = float(((a.cuda() @ b.cuda()).cpu() - a @ b).abs().max())
print("cublas worst difference %.2e" % worst)
assert worst < 1e-9
