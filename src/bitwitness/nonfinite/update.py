"""Whether an optimizer's update explains a parameter that is not finite: its state and settings, looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.nonfinite.flags import flags_of, measurable

_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")
_SETTINGS = ("lr", "eps", "betas", "alpha", "momentum", "weight_decay", "fused", "foreach", "capturable")


def blame_update(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> str | None:
    """Say how an optimizer that holds ``parameter`` can have made it non-finite; None if nothing of it explains that."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(member is parameter for member in group["params"]):
                reason = _reason(parameter, optimizer.state.get(parameter, {}), group)
                return None if reason is None else f"{type(optimizer).__name__}({_settings(group)}): {reason}"
    return None


def _settings(group: dict[str, Any]) -> str:
    return ", ".join(f"{name}={group[name]}" for name in _SETTINGS if group.get(name) not in (None, False, 0))


def _reason(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> str | None:
    tensors = {name: _local(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if measurable(tensor) and flags_of(tensor):
            return f"its state {name} is not finite"
    bad = ~_local(parameter.detach()).isfinite()
    for name in _SECOND_MOMENTS:
        moment = tensors.get(name)
        # zero over zero: where nothing was ever seen of an entry, only eps stands between it and a division by zero
        if moment is not None and moment.shape == bad.shape and not group.get("eps") and bool((moment[bad] == 0).all()):
            return f"it divides by sqrt({name}) + eps, which is zero there (eps = {group.get('eps')})"
    rate = float(group.get("lr", 0.0))
    if not math.isfinite(rate):
        return f"its learning rate is {rate}"
    if parameter.dtype.itemsize < 4 and not bool(_local(parameter.detach()).isnan().any()):
        return f"the update is beyond {str(parameter.dtype).removeprefix('torch.')}"
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(type(tensor), "to_local") else tensor  # type: ignore[attr-defined]
