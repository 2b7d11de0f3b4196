import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class SAGE(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.self_lin, self.neigh_lin = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x, src, dst):
        agg = torch.zeros_like(x).index_add_(0, dst, x[src])
        deg = torch.zeros(x.size(0)).scatter_add_(0, dst, torch.ones(dst.numel())).clamp(min=1)
        return self.self_lin(x) + self.neigh_lin(agg / deg[:, None])


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = SAGE(8, 16), SAGE(16, 4)

    def forward(self, x, edge_index):
        h = F.relu(self.c1(x, *edge_index))
        return F.log_softmax(self.c2(F.dropout(h, 0.3, self.training), *edge_index), 1)


x, edges = torch.randn(40, 8), torch.randint(0, 40, (2, 160))
labels = torch.randint(0, 4, (40,))
train_mask = torch.rand(40) < 0.6
model = GNN()
opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
losses = []
for epoch in range(25 * times):
    model.train()
    opt.zero_grad()
    out = model(x, edges)
    loss = F.nll_loss(out[train_mask], labels[train_mask])
    loss.backward()
    opt.step()
    model.eval()
    with torch.no_grad():
        acc = (model(x, edges).argmax(1) == labels)[~train_mask].float().mean()
    losses += [loss.item(), acc.item()]
print("BITS", fingerprint(model, opt, losses))
