import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))


class MaskedAutoencoder(nn.Module):
    def __init__(self, n=12, d=8, generator=None):
        super().__init__()
        self.enc = nn.TransformerEncoderLayer(d, 2, 16, dropout=0.0, batch_first=True)
        self.mask_token = nn.Parameter(torch.zeros(d))
        self.dec = nn.Linear(d, d)
        self.generator = generator

    def forward(self, x):
        mask = torch.rand(x.shape[:2], generator=self.generator) < 0.5
        h = torch.where(mask[..., None], self.mask_token, x)
        return F.mse_loss(self.dec(self.enc(h))[mask], x[mask])


torch.manual_seed(SEED)
gen = torch.Generator().manual_seed(SEED + 10)
data_gen = torch.Generator().manual_seed(SEED + 20)
model = MaskedAutoencoder(generator=gen)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(20 * times):
    loss = model(torch.randn(6, 12, 8, generator=data_gen))
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print("BITS", fingerprint(model, opt, losses, gen.get_state(), data_gen.get_state()))
