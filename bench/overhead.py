"""What the guard costs: interleaved A/B in one process, process-CPU time a step, one thread.

Each variant has a model and an optimizer of its own and its guard is switched on for its own steps only. A round runs one
step of every variant in random order; the figure is the mean over rounds of ln(variant / unguarded in the same round), with a
95 % interval (Student's t). ``default`` is put together from the measured light and deep steps (one deep step in
``deep_every``) and, where ``--blocks`` is given, also measured whole.

    python bench/overhead.py --tokens 512 4096 --dtype float32 bfloat16 --rounds 20
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from gpt import GPT

from bitwitness.guard import Guard
from bitwitness.tap.holdpoints import HoldPoints

CONTEXT = 128
T95 = {5: 2.57, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04, 60: 2.0}


class Variant:
    """One way to train: unguarded, or under a guard with its settings."""

    def __init__(self, name: str, dtype: torch.dtype, settings: dict[str, object] | None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.dtype = dtype
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.guard = None
        if settings is not None:
            self.guard = Guard(self.model, self.optimizer, replay={"calibrate": False}, **settings)
            self.guard.__enter__()
            self.guard._stack.pop_all()  # its hold points are entered for its own steps only
            for hook in (torch.autograd,):
                assert hook is not None
        self.seconds: list[float] = []
        self.own: list[float] = []

    def step(self, tokens: torch.Tensor, *, count: bool) -> float:
        """Train one step; return its process-CPU seconds."""
        watch = None if self.guard is None else self.guard.watch
        own = 0.0 if watch is None else watch.own_seconds
        with nullcontext() if watch is None else HoldPoints(watch):
            started = time.process_time()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
                loss = self.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            spent = time.process_time() - started
        if count:
            self.seconds.append(spent)
            self.own.append(0.0 if watch is None else watch.own_seconds - own)
        return spent
