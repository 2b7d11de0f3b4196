"""A training whose every step is questioned; one rank is killed in the middle of its replay at step 3."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from scenarios import Scenario, train

from bitwitness import Guard
from bitwitness.replay.run import Replayer

torch.set_num_threads(1)
dist.init_process_group("gloo")
victim, how = int(sys.argv[1]), sys.argv[2]
run = Replayer.run


def killed(self, record, *args, **kwargs):
    if record.step == 3 and dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return run(self, record, *args, **kwargs)


Replayer.run = killed
settings = {"trend": {"z": 1e-9, "warmup": 1}, "replay": {"rest": False}, "ranks": {"deadline_s": 8.0}}
train(Scenario("gpt", steps=8), lambda model, optimizer: Guard(model, optimizer, **settings))
print("trained to the end", flush=True)
