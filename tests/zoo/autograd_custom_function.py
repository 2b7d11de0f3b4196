import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class BinarizeSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.sign()

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * (w.abs() <= 1).float()


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.lam * grad, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 12) * 0.3)
        self.cls, self.dom = nn.Linear(24, 3), nn.Linear(24, 2)

    def forward(self, x, lam):
        h = torch.relu(x @ BinarizeSTE.apply(self.w).t() * 0.2)
        return self.cls(h), self.dom(GradReverse.apply(h, lam))


net = DANN()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for step in range(25 * times):
    x = torch.randn(24, 12)
    d = torch.randint(0, 2, (24,))
    y, dom = net(x + d[:, None] * 0.5, step / 25)
    loss = nn.functional.cross_entropy(y, x[:, :3].argmax(1)) + nn.functional.cross_entropy(dom, d)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
