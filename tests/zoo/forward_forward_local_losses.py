import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class FFLayer(nn.Linear):
    """Hinton's forward-forward: each layer trains itself, with an optimizer of its own, inside a method."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.opt = torch.optim.Adam(self.parameters(), lr=0.03)
        self.threshold = 2.0

    def forward(self, x):
        d = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(torch.mm(d, self.weight.T) + self.bias.unsqueeze(0))

    def train_layer(self, pos, neg):
        g_pos, g_neg = self.forward(pos).pow(2).mean(1), self.forward(neg).pow(2).mean(1)
        loss = torch.log(1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return self.forward(pos).detach(), self.forward(neg).detach(), loss.item()


layers = [FFLayer(12, 24), FFLayer(24, 24)]
losses = []
for _ in range(14 * times):
    pos = torch.randn(20, 12) + 1
    neg = torch.randn(20, 12) - 1
    for layer in layers:
        pos, neg, loss = layer.train_layer(pos, neg)
        losses.append(loss)
print("BITS", fingerprint(layers, [layer.opt for layer in layers], losses))
