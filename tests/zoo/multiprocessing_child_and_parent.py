import multiprocessing as mp
import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))


def train(seed, steps):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps * times):
        x = torch.randn(12, 7)
        loss = F.cross_entropy(net(x), (x.sum(1) > 0).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return fingerprint(net, opt, losses)


def worker(queue, seed):
    queue.put(train(seed, 15))


if __name__ == "__main__":
    context = mp.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=worker, args=(queue, SEED + 1))
    child.start()
    there = queue.get()
    child.join()
    assert child.exitcode == 0, child.exitcode
    print("BITS", fingerprint(there, train(SEED, 15)))
