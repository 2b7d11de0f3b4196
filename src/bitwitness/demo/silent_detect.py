"""The Ascend document's silent_detect.py, ported to PyTorch: a tiny network, one rank of which computes wrongly.

    torchrun --nproc-per-node 8 -m bitwitness.demo.silent_detect RUN

with ``MS_NPU_ASD_CONFIG`` set. The document sleeps for a second after each of its 200 steps; here a clock that moves on by one
second a step stands for that, so that a checksum window of one minute lasts for sixty steps.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.guard import Guard
from bitwitness.inject.eod_mask import eod_mask_v2

STEPS = 75
FAULTY_RANK = 2


class Net(nn.Module):
    """Dense(1, 8), ReLU, the fault operator, Dense(8, 8)."""

    cur_step: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(1, 8)
        self.fc2 = nn.Linear(8, 8)
        self.relu = nn.ReLU()
        self.register_buffer("cur_step", torch.tensor(-1))
        self.flip_mode = "bitflip_designed" if rank == FAULTY_RANK else "multiply"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, 1] to [batch, 8]; every fifth step one element in between is struck on the faulty rank."""
        x = self.relu(self.fc1(x))
        self.cur_step += 1
        x = eod_mask_v2(
            x,
            ele_pos=0,
            cur_step=int(self.cur_step),
            seed=0,
            offset=0,
            start=0,
            steps=[5],
            error_mode="cycle",
            flip_mode=self.flip_mode,
            multiply_factor=1.0,
            bit_pos=0,
            flip_probability=0.0,
        )
        result: torch.Tensor = self.fc2(x)
        return result


def main() -> None:
    """Train; the network's output is what is differentiated, with ones, as MindSpore's TrainOneStepCell does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    generator = np.random.default_rng(1)
    net = DistributedDataParallel(Net(dist.get_rank()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seconds = 0.0
    with Guard(net, optimizer, out=sys.argv[1], clock=lambda: seconds):
        for _ in range(STEPS):
            inputs = torch.from_numpy(generator.random((8, 1), dtype=np.float32))
            net(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds += 1.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
