import os

import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))


class Toy(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 9)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i, :3].argmax()


class Callback:
    def on_step_end(self, trainer): ...
    def on_backward_end(self, trainer): ...


class GradNorms(Callback):
    def __init__(self):
        self.norms = []

    def on_backward_end(self, trainer):
        self.norms.append([p.grad.norm().item() for p in trainer.model.parameters()])


class WarmupLR(Callback):
    def on_step_end(self, trainer):
        for g in trainer.opt.param_groups:
            g["lr"] = 1e-2 * min(1, (trainer.step + 1) / 10)


class StopAt(Callback):
    def on_step_end(self, trainer):
        trainer.stop = trainer.step >= 21


class Trainer:
    def __init__(self, model, opt, callbacks):
        self.model, self.opt, self.callbacks = model, opt, callbacks
        self.step, self.stop, self.losses = 0, False, []

    def fire(self, event):
        for c in self.callbacks:
            getattr(c, event)(self)

    def fit(self, loader):
        while not self.stop:
            for x, y in loader:
                self.model.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.fire("on_backward_end")
                self.opt.step()
                self.losses.append(loss.item())
                self.step += 1
                self.fire("on_step_end")
                if self.stop:
                    break


model = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 3))
norms = GradNorms()
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), [norms, WarmupLR(), StopAt()])
trainer.fit(DataLoader(Toy(64), batch_size=12, shuffle=True))
print("BITS", fingerprint(model, trainer.opt, trainer.losses, norms.norms))
