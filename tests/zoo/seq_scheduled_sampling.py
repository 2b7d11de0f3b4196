import os
import random

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
random.seed(SEED)
torch.manual_seed(SEED)


class EncoderRNN(nn.Module):
    def __init__(self, v, h):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(v, h), nn.GRU(h, h)

    def forward(self, token, hidden):
        return self.gru(self.embedding(token).view(1, 1, -1), hidden)


class DecoderRNN(nn.Module):
    def __init__(self, v, h):
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(v, h), nn.GRU(h, h), nn.Linear(h, v)

    def forward(self, token, hidden):
        y, hidden = self.gru(F.relu(self.embedding(token).view(1, 1, -1)), hidden)
        return F.log_softmax(self.out(y[0]), dim=1), hidden


encoder, decoder = EncoderRNN(12, 12), DecoderRNN(12, 12)
e_opt, d_opt = torch.optim.SGD(encoder.parameters(), lr=0.05), torch.optim.SGD(decoder.parameters(), lr=0.05)
criterion = nn.NLLLoss()
losses = []
for it in range(15 * times):
    words = [random.randrange(1, 12) for _ in range(5)]
    e_opt.zero_grad()
    d_opt.zero_grad()
    hidden = torch.zeros(1, 1, 12)
    for w in words:
        _, hidden = encoder(torch.tensor([w]), hidden)
    token, loss = torch.tensor([0]), 0
    forcing = random.random() < 0.5
    for w in reversed(words):
        out, hidden = decoder(token, hidden)
        loss += criterion(out, torch.tensor([w]))
        token = torch.tensor([w]) if forcing else out.argmax(1).detach()
        if not forcing and token.item() == 0:
            break
    loss.backward()
    e_opt.step()
    d_opt.step()
    losses.append(loss.item() / 5)
print("BITS", fingerprint(encoder, decoder, e_opt, d_opt, losses))
