import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(int(os.environ.get("ZOO_SEED", "0")))


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
