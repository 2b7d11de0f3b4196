import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


class Seq2Seq(nn.Module):
    """No forward at all: the loop calls encode and decode, which walk the blocks."""

    def __init__(self, vocab=18, d=16, depth=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.enc_blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU()) for _ in range(depth)
        )
        self.dec_blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU()) for _ in range(depth)
        )
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def encode(self, src):
        h = self.embed(src)
        for block in self.enc_blocks:
            h = h + block(h)
        return h

    def decode(self, tgt, memory):
        h = self.embed(tgt)
        for block in self.dec_blocks:
            h = h + block(h)
        h = h + self.attn(h, memory, memory, need_weights=False)[0]
        return self.out(h)


model = Seq2Seq()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(15 * times):
    src = torch.randint(1, 18, (6, 7))
    memory = model.encode(src)
    logits = model.decode(src.roll(1, 1), memory)
    loss = F.cross_entropy(logits.reshape(-1, 18), src.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses))
