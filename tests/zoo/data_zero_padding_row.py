import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))

PAD = 0


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 12)  # padding row kept at zero by hand
        self.convs = nn.ModuleList([nn.Conv1d(12, 6, k, padding=k // 2) for k in (3, 5)])
        self.fc = nn.Linear(12, 2)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        return self.fc(torch.cat([F.relu(c(x)).amax(2) for c in self.convs], 1))


net = TextCNN()
net.emb.weight.data[PAD].zero_()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
losses = []
for step in range(20 * times):
    ids = torch.randint(1, 30, (12, 9))
    ids[:, 6:] = PAD
    y = (ids[:, 0] > 15).long()
    loss = F.cross_entropy(net(ids), y)
    opt.zero_grad()
    loss.backward()
    net.emb.weight.grad[PAD] = 0
    opt.step()
    net.emb.weight.data[PAD] = 0.0
    losses.append(loss.item())
print("BITS", fingerprint(net, opt, losses))
