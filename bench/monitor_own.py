"""A training that bitwitness monitors, or nobody; started by `monitor.py`, see there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from monitor_turns import Watching, serve

GRADIENTS = ("training", "grad", "grad_reduced")
WAYS: dict[str, dict[str, Any]] = {
    "gradients": {"kinds": GRADIENTS},
    "gradients, no rules": {"kinds": GRADIENTS, "watch": False},
    "activations": {"kinds": ("training", "activation", "activation_grad")},
    "weights and optimizer": {"kinds": ("training", "param", "moment1", "moment2", "update")},
    "everything": {},
    "everything, zeros": {"zeros": True},
}


class Own(Watching):
    """A `bitwitness.Monitor`, which is waited for after some steps."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        monitor.pause()

    def begin(self) -> None:
        """Go on."""
        self._monitor.resume()

    def end(self) -> None:
        """Close the last step, and wait for what the monitor's thread makes of them."""
        self._monitor.pause()

    def close(self) -> None:
        """End."""
        self._monitor.close()


def opened(way: str, model: torch.nn.Module, _optimizer: torch.optim.Optimizer, folder: Path) -> Watching:
    """Begin to monitor."""
    if way == "nothing":
        return Watching()
    import bitwitness as bw

    return Own(bw.Monitor(model, out=folder / "run", **WAYS[way]).start())


if __name__ == "__main__":
    serve(opened)
