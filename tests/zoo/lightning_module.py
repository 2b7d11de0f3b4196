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


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))
        self.history = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.history.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


train = DataLoader(TensorDataset(torch.randn(80, 16)), batch_size=8, shuffle=True)
valid = DataLoader(TensorDataset(torch.randn(16, 16)), batch_size=8)
model = LitAutoEncoder()
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
)
trainer.fit(model, train, valid)
print("BITS", fingerprint(model, trainer.optimizers, model.history))
