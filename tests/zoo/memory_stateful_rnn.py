import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class StatefulLSTM(nn.Module):
    def __init__(self, vocab=16, hidden=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.decoder = nn.Linear(hidden, vocab)
        self.hidden = None

    def reset(self):
        self.hidden = None

    def forward(self, x):
        out, (h, c) = self.lstm(self.embed(x), self.hidden)
        self.hidden = (h.detach(), c.detach())
        return self.decoder(out)


model = StatefulLSTM()
opt = torch.optim.SGD(model.parameters(), lr=1.0)
stream = torch.randint(0, 16, (4, 121))
losses = []
for epoch in range(2 * times):
    model.reset()
    for i in range(0, 120, 10):
        x, y = stream[:, i : i + 10], stream[:, i + 1 : i + 11]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
        losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses, model.hidden))
