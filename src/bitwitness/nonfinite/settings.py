"""What an optimizer was set to at its latest update: a schedule may have put it back by the time that the damage is seen."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

NAMES = (
    "lr", "eps", "betas", "alpha", "rho", "momentum", "dampening", "momentum_decay", "weight_decay", "lr_decay", "lambd",
    "fused", "foreach", "capturable",
)  # fmt: skip
_WORDS = {"lr": "learning rate", "weight_decay": "weight decay", "lr_decay": "learning rate's decay"}
_ENORMOUS = 1e6  # a learning rate of which an update alone may carry a weight beyond its dtype

Settings = dict[str, Any]


class SettingsLog:
    """The settings of each optimizer's groups at its updates since the last finite step."""

    def __init__(self) -> None:
        self._latest: dict[int, list[Settings]] = {}
        self._bad: dict[tuple[int, int], Settings] = {}

    def clear(self) -> None:
        """Forget: the step after the updates so far was finite."""
        self._latest.clear()
        self._bad.clear()

    def note(self, optimizer: Optimizer) -> None:
        """Read an optimizer's settings right after its update; waits for no device."""
        groups = [{name: _kept(group[name]) for name in NAMES if name in group} for group in optimizer.param_groups]
        self._latest[id(optimizer)] = groups
        for number, settings in enumerate(groups):
            if any(not _usual(value) for value in settings.values()):
                self._bad.setdefault((id(optimizer), number), settings)

    def at_update(self, optimizer: Optimizer, group: int) -> Settings:
        """Return a group's settings at the update that explains most; as they are now, where none was noted."""
        latest = self._latest.get(id(optimizer), [])
        bad = self._bad.get((id(optimizer), group))
        if bad is not None or group >= len(latest):
            return bad or dict(optimizer.param_groups[group])
        return latest[group]


def _kept(value: Any) -> Any:
    """Return a value as it is now: a learning rate in a tensor is changed in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _usual(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_usual(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def number_of(value: Any) -> float:
    """Return a setting as a number; waits for its device, where it lies on one."""
    return float(value) if isinstance(value, int | float | torch.Tensor) else math.nan


def shown(settings: Settings) -> str:
    """Return settings as they are written in a call; those that are off are left out."""
    return ", ".join(f"{name}={_text(settings[name])}" for name in NAMES if not _off(settings.get(name)))


def _off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def _text(value: Any) -> str:
    return f"{number_of(value):.6g}" if isinstance(value, torch.Tensor) else str(value)


def fault_in(settings: Settings, now: Settings) -> str | None:
    """Say which setting cannot give a finite update; None if all can. ``now``: the group as it is at present."""
    for name in NAMES:
        value = settings.get(name)
        many = value if isinstance(value, tuple | list) else [value]
        numbers = [number_of(v) for v in many if isinstance(v, float | int | torch.Tensor) and not isinstance(v, bool)]
        wrong = [n for n in numbers if not math.isfinite(n) or (name == "lr" and abs(n) > _ENORMOUS)]
        wrong += [n for n in numbers if name == "betas" and not 0 <= n < 1]
        if wrong:
            before = _text(value)
            present = _text(now[name]) if name in now else before
            back = "" if present == before else f" (it is {present} now)"
            verb = "were" if name == "betas" else "was"
            return f"its {_WORDS.get(name, name)} {verb} {before}{back}"
    return None
