import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))
times = int(os.environ.get("ZOO_TIMES", "1"))


def fingerprint(*things):
    h = hashlib.sha256()

    def eat(x):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            x = x.to_dense() if x.is_sparse else x
            h.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(x, nn.Module):
            eat(list(x.parameters()))
            eat(list(x.buffers()))
        elif isinstance(x, torch.optim.Optimizer):
            eat(x.state_dict()["state"])
        elif isinstance(x, dict):
            for k in x:
                eat(x[k])
        elif isinstance(x, (list, tuple)):
            for y in x:
                eat(y)
        else:
            h.update(x.hex().encode() if isinstance(x, float) else repr(x).encode())

    eat(things)
    return h.hexdigest()


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
