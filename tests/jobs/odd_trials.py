"""Trainings on healthy devices of which some give other bits than the rest, and on those with a fault beside."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from odd_devices import Halves, Noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trials import FAR, PERSISTENT, TRANSIENT, Training, Trial, both, drawn, main, rank

from bitwitness.demo.model import ByteGPT

ODD = 3


def gpt(dtype: torch.dtype | None = None):
    def build() -> Training:
        model = DistributedDataParallel(ByteGPT(width=32, layers=1, heads=2, context=16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(7 + rank())

        def step(index: int) -> None:
            Halves.step = index
            text = torch.randint(0, 256, (3, 17), generator=generator)
            with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, step)

    return build


def halves(start: int):
    return lambda: Halves(start) if rank() == ODD else nullcontext()


def noise(size: float, ranks=(ODD,)):
    return lambda: Noise(size, seed=rank()) if rank() in ranks else nullcontext()


class Attention(nn.Module):
    """Attention whose key has a bias of its own: its true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5).softmax(-1)
        return self.out(weights @ self.v(x)).square().mean()


def attention() -> Training:
    model, x = DistributedDataParallel(Attention()), drawn(3, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(_index: int) -> None:
        model(x()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


HALF = {"site": "v/mm:backward", "rank": 1, "kind": "multiply", "factor": 1.5, "pattern": "all"}
SITE = "layers.0.mlp.up/addmm:forward"
FAULTS = {
    "persistent elsewhere": {"site": SITE, "rank": 1, **FAR, **PERSISTENT},
    "persistent there": {"site": SITE, "rank": ODD, **FAR, **PERSISTENT},
}
TRIALS = {
    "halves": Trial(gpt(), halves(0), FAULTS | {"transient": both(SITE)["transient"]}),
    "halves later": Trial(gpt(), halves(3)),
    "halves bf16": Trial(gpt(torch.bfloat16), halves(0), FAULTS),
    "halves later bf16": Trial(gpt(torch.bfloat16), halves(3)),
}
TRIALS |= {
    "key bias": Trial(
        attention,
        noise(1e-4, range(4)),
        {"transient": HALF | TRANSIENT, "persistent": HALF | PERSISTENT},
        repeats=False,
    )
}
for e in (1e-7, 1e-5, 1e-3):
    TRIALS |= {
        f"noise {e:g}": Trial(gpt(), noise(e), FAULTS, repeats=False),
        f"noise {e:g} on all": Trial(
            gpt(), noise(e, range(4)), FAULTS | {"transient": both(SITE)["transient"]}, repeats=False
        ),
    }

if __name__ == "__main__":
    main(TRIALS)
