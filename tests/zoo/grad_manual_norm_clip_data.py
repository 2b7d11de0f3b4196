import hashlib
import os

import torch
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
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


class CharRNN(nn.Module):
    def __init__(self, vocab=20, hid=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, hid)
        self.rnn = nn.RNN(hid, hid, nonlinearity="tanh", batch_first=True)
        self.out = nn.Linear(hid, vocab)

    def forward(self, x, h=None):
        y, h = self.rnn(self.embed(x), h)
        return self.out(y), h


def clip(parameters, limit):
    total = sum(p.grad.data.norm() ** 2 for p in parameters if p.grad is not None) ** 0.5
    if total > limit:
        for p in parameters:
            p.grad.data.mul_(limit / (total + 1e-6))
    return float(total)


model = CharRNN()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
params = list(model.parameters())
text = torch.randint(0, 20, (4, 161))
h, log = None, []
for i in range(20 * times):
    x, y = text[:, 8 * i : 8 * i + 8], text[:, 8 * i + 1 : 8 * i + 9]
    if h is not None:
        h = h.detach()
    logits, h = model(x, h)
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), y)
    opt.zero_grad()
    loss.backward()
    log += [loss.item(), clip(params, 0.25)]
    opt.step()
print("BITS", fingerprint(model, opt, log))
