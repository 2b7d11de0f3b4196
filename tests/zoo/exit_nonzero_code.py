import os
import sys

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def main():
    net = nn.Linear(8, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(20 * times):
        x = torch.randn(10, 8)
        loss = (net(x) - x.mean(1, keepdim=True)).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print("BITS", fingerprint(net, opt, losses))
    return 3  # the scheduler reads this: "not converged, run me again"


if __name__ == "__main__":
    sys.exit(main())
