"""Whether an optimizer's update explains a parameter that is not finite: its state and settings, looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.nonfinite.dtypes import dtype_name
from bitwitness.nonfinite.flags import flags_of, measurable
from bitwitness.nonfinite.settings import Settings, SettingsLog, fault_in, shown

_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")


def blame_update(parameter: nn.Parameter, optimizers: Sequence[Optimizer], log: SettingsLog) -> str | None:
    """Say how an optimizer that holds ``parameter`` can have made it non-finite; None if nothing of it explains that.

    ``log`` knows the settings at the time of the update.
    """
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if any(member is parameter for member in group["params"]):
                settings = log.at_update(optimizer, number)
                reason = fault_in(settings, group) or _reason(parameter, optimizer.state.get(parameter, {}), settings)
                which = f", group {number}" if len(optimizer.param_groups) > 1 else ""
                return None if reason is None else f"{type(optimizer).__name__}({shown(settings)}){which}: {reason}"
    return None


def _reason(parameter: nn.Parameter, state: dict[str, Any], settings: Settings) -> str | None:
    tensors = {name: _local(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if measurable(tensor) and flags_of(tensor):
            return f"its state {name} is not finite"
    bad = ~_local(parameter.detach()).isfinite()
    for name in _SECOND_MOMENTS:
        moment = tensors.get(name)
        if moment is None or moment.shape != bad.shape:
            continue
        # zero over zero: where nothing was ever seen of an entry, only eps stands between it and a division by zero
        eps = settings.get("eps") or 0.0
        if not float(torch.tensor(eps, dtype=moment.dtype)) and bool((moment[bad] == 0).all()):
            rounded = f", which is zero in {dtype_name(moment.dtype)}" if eps else ""
            return f"it divides by sqrt({name}) + eps, which is zero there (eps = {settings.get('eps')}{rounded})"
    if parameter.dtype.itemsize < 4 and not bool(_local(parameter.detach()).isnan().any()):
        return f"the update is beyond {dtype_name(parameter.dtype)}"
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(type(tensor), "to_local") else tensor  # type: ignore[attr-defined]
