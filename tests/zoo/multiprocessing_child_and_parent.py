import hashlib
import multiprocessing as mp
import os

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))


def fingerprint(*things):
    h = hashlib.sha256()

    def eat(x):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            x = x.to_dense() if x.is_sparse else x
            h.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, nn.Module):
            eat(list(x.parameters()))
            eat(list(x.buffers()))
        elif isinstance(x, torch.optim.Optimizer):
            eat(x.state_dict()["state"])
        elif isinstance(x, dict):
            for k in x:
                eat(x[k])
        elif isinstance(x, (list, tuple)):
            for y in x:
                eat(y)
        else:
            h.update(x.hex().encode() if isinstance(x, float) else repr(x).encode())

    eat(things)
    return h.hexdigest()


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
