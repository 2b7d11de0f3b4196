import os

import torch
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class WordLM(nn.Module):
    """The loss (adaptive softmax) lives in the model."""

    def __init__(self, vocab=60, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(dim, vocab, cutoffs=[10, 30], div_value=2.0)

    def forward(self, x, y):
        h, _ = self.lstm(self.drop(self.emb(x)))
        return self.softmax(h.reshape(-1, h.size(-1)), y.reshape(-1)).loss


model = WordLM()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
losses = []
for step in range(18 * times):
    seq = torch.randint(0, 60, (4, 11))
    loss = model(seq[:, :-1], seq[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
