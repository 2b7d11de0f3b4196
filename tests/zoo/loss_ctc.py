import os

import torch
import torch.nn as nn
from bits import fingerprint

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Speech(nn.Module):
    def __init__(self, feats=8, hidden=16, classes=7):
        super().__init__()
        self.rnn = nn.GRU(feats, hidden, bidirectional=True)
        self.out = nn.Linear(2 * hidden, classes)

    def forward(self, x):
        y, _ = self.rnn(x)
        return self.out(y).log_softmax(2)


model = Speech()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
losses = []
for step in range(15 * times):
    x = torch.randn(14, 4, 8)
    targets = torch.randint(1, 7, (4, 5))
    in_len = torch.tensor([14, 13, 12, 14])
    tgt_len = torch.tensor([5, 4, 3, 5])
    loss = ctc(model(x), targets, in_len, tgt_len)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
