import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


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
