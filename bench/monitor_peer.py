"""A training watched by another tool; started by `monitor.py` with a Python that has the tool installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from monitor_turns import Watching, serve

OPS = ["min", "max", "mean", "norm", "nans"]
_ALL = ("module", "weight_grad", "optimizer", "param")


class Msprobe(Watching):
    """The second version of msprobe's monitor: it wraps the optimizer's step, and writes each step when that ends."""

    def __init__(self, parts: tuple[str, ...], model: torch.nn.Module, optimizer: Any, folder: Path) -> None:
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

        out, config = folder / "out", folder / "config.json"
        out.mkdir()
        monitors = {part: {"enabled": True, "ops": OPS} for part in parts}
        config.write_text(
            json.dumps({"framework": "pytorch", "output_dir": str(out), "monitors": monitors}),
            encoding="utf-8",
        )
        self._monitor = TrainerMonitorV2(str(config), fr="pytorch")
        self._monitor.start(model=model, optimizer=optimizer)

    def close(self) -> None:
        """End."""
        self._monitor.stop()


class Trainscope(Watching):
    """trainscope as its README begins, at its own intervals or with everything in every step."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, folder: Path, **settings: Any) -> None:
        from trainscope import TrainScope
        from trainscope.core.config import TrainScopeConfig

        config = TrainScopeConfig(run_dir=str(folder), run_name="run", **settings)
        self._scope = TrainScope(model, optimizer, config=config).attach()

    def before_update(self, loss: torch.Tensor, number: int) -> None:
        """Record a step, where its README says to."""
        self._scope.step(loss.item(), batch_index=number)

    def close(self) -> None:
        """End."""
        self._scope.detach()


def opened(way: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Watching:
    """Begin to watch."""
    if way == "msprobe: gradients":
        return Msprobe(("weight_grad",), model, optimizer, folder)
    if way == "msprobe: everything":
        return Msprobe(_ALL, model, optimizer, folder)
    if way == "trainscope: default":
        return Trainscope(model, optimizer, folder)
    return Trainscope(model, optimizer, folder, activation_metrics_every_n_steps=1, histogram_every_n_steps=1)


if __name__ == "__main__":
    serve(opened)
