"""A pipeline of two stages, by torch's own schedules."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F
from trials import Training, Trial, both, drawn, main, rank


def pipeline() -> Training:
    torch.manual_seed(rank())
    part = nn.Sequential(nn.Linear(8, 8), nn.ReLU()) if rank() == 0 else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    stage = PipelineStage(part, rank(), dist.get_world_size(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    x, labels = drawn(8, 8), torch.arange(8) % 4

    def step(_index: int) -> None:
        if rank() == 0:
            schedule.step(x())
        else:
            schedule.step(target=labels, losses=[])
        optimizer.step()
        optimizer.zero_grad()

    return Training(part, optimizer, step)


TRIALS = {"pipeline": Trial(pipeline, faults=both("0/addmm:forward", rank=0))}

if __name__ == "__main__":
    main(TRIALS)
