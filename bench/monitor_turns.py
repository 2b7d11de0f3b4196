"""A training that goes on a few steps whenever it is told to, in a process of its own: what `monitor.py` measures tools by.

Imports torch and the model only, so that it runs in whichever environment a tool is installed in. A line on the standard
input says how many steps; one on the standard output answers with the process-CPU seconds of one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import GPT

SEEN = "turn: "
"""Begins a line that is an answer; tools print lines of their own."""


class Watching:
    """What a tool does around steps; as it is, nothing."""

    def begin(self) -> None:
        """Before the first of some steps."""

    def before_update(self, loss: torch.Tensor, number: int) -> None:
        """Between a step's backward and its optimizer step."""

    def end(self) -> None:
        """After the last of some steps: what was seen is on disk when this returns."""

    def close(self) -> None:
        """After all of them."""


Opener = Callable[[str, torch.nn.Module, torch.optim.Optimizer, Path], Watching]
"""Begins to watch a model in the way that a name says, and writes into a folder."""


class Training:
    """GPT of 11.2 million parameters, 4 x 128 tokens, float32, AdamW as a for-loop; ``tiny``: it only runs."""

    def __init__(self, *, tiny: bool = False) -> None:
        torch.manual_seed(0)
        self._vocabulary, self._shape = (64, (4, 17)) if tiny else (4096, (4, 129))
        self.model = GPT(64, 32, 1, 2, 16) if tiny else GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self._generator = torch.Generator().manual_seed(1)
        self._number = 0

    def steps(self, count: int, watching: Watching) -> float:
        """Train some steps; return the process-CPU seconds of one."""
        batches = [torch.randint(0, self._vocabulary, self._shape, generator=self._generator) for _ in range(count)]
        started = time.process_time()
        watching.begin()
        for tokens in batches:
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            watching.before_update(loss, self._number)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._number += 1
        watching.end()
        return (time.process_time() - started) / count


def serve(opener: Opener) -> None:
    """Train as many steps as each line of the standard input says, watched in the way that ``--way`` names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(tiny=args.tiny)
    with tempfile.TemporaryDirectory(prefix="bench-monitor-") as scratch:
        watching = opener(args.way, training.model, training.optimizer, Path(scratch))
        answer({"torch": torch.__version__})
        for line in sys.stdin:
            answer({"seconds": training.steps(int(line), watching)})
        watching.close()


def answer(found: dict[str, Any]) -> None:
    """Print an answer."""
    print("\n" + SEEN + json.dumps(found), flush=True)
