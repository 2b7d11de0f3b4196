import os

import torch
from bits import fingerprint
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(25, 10, padding_idx=0)
        self.rnn = nn.GRU(10, 12, batch_first=True, bidirectional=True)
        self.out = nn.Linear(24, 4)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(y)


model = Tagger()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
losses = []
for _ in range(15 * times):
    lengths = torch.randint(3, 9, (6,))
    x = pad_sequence([torch.randint(1, 25, (n,)) for n in lengths.tolist()], batch_first=True)
    tags = (x % 4).masked_fill(x == 0, -1)
    logits = model(x, lengths)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
