import logging
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(int(os.environ.get("ZOO_SEED", "0")), verbose=False)


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.d = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.history = []

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        fake = self.g(torch.randn(len(real), 4))
        self.toggle_optimizer(opt_d)
        d_loss = F.softplus(self.d(fake.detach())).mean() + F.softplus(-self.d(real)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        g_loss = F.softplus(-self.d(fake)).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.history += [d_loss.item(), g_loss.item()]

    def configure_optimizers(self):
        return torch.optim.Adam(self.g.parameters(), 1e-3), torch.optim.Adam(self.d.parameters(), 1e-3)


model = GAN()
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(120, 2) * 0.5 + 1), batch_size=10, shuffle=True))
print("BITS", fingerprint(model, trainer.optimizers, model.history))
