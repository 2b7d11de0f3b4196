"""Parts of an optimizer's parameters, kept as they were before its step, and the step taken again on them.

The optimizer's own code takes it: an instance of the same class with the same options, on copies. Torch's element-wise
optimizers alone: what others keep besides, or read of whole matrices, is not known.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer

from bitwitness.stats.local import is_in_shared_memory, local_parts
from bitwitness.tap.optimizerhooks import others_around
from bitwitness.tap.threads import working_elsewhere

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.ASGD, optim.Rprop,
)  # fmt: skip
"""Each number of a parameter is stepped by its own gradient and state."""


@dataclass(slots=True, eq=False)
class Piece:
    """A part of one parameter, ``start`` to ``end`` of its elements on this rank, as it was before a step; copies, 1-D."""

    parameter: nn.Parameter
    group: int
    start: int
    end: int
    value: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]

    def now(self, key: str, optimizer: Optimizer) -> torch.Tensor | None:
        """Return what is there now; ``key`` as in the optimizer's state, empty for the parameter itself."""
        whole = self.parameter if not key else optimizer.state.get(self.parameter, {}).get(key)
        return _part(whole, self.parameter, self.start, self.end) if isinstance(whole, torch.Tensor) else None


def unfit(optimizer: Optimizer) -> str:
    """Say why an optimizer's step cannot be taken again; empty where it can."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        return f"{kind.__name__} is none of torch's element-wise optimizers"
    if getattr(kind.step, "__wrapped__", None) is None:
        return f"the step of {kind.__name__} is not torch's own"
    if others_around(optimizer):
        return f"{kind.__name__} has hooks around its step"
    if getattr(optimizer, "found_inf", None) is not None:
        return f"{kind.__name__} unscales gradients in its step"
    if any(
        is_in_shared_memory(local_parts(p.detach())[0]) for group in optimizer.param_groups for p in group["params"]
    ):
        return f"parameters of {kind.__name__} lie in memory that other processes may write"
    if (thread := working_elsewhere()) is not None:
        return f"another thread of the script's works ({thread})"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__} is differentiable"
    return ""


def piece_of(optimizer: Optimizer, parameter: nn.Parameter, group: int, start: int, end: int) -> Piece | None:
    """Copy a part of a parameter with all that belongs to it; None where it has no dense gradient, or odd state."""
    grad = parameter.grad
    if grad is None or grad.layout != torch.strided or parameter.is_complex():
        return None
    state: dict[str, Any] = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, torch.Tensor):
            state[key] = copy.copy(value)
        elif value.numel() != 1 and value.shape != parameter.shape:
            return None
        else:
            state[key] = _part(value, parameter, start, end).clone()
    value, gradient = (_part(tensor, parameter, start, end).clone() for tensor in (parameter, grad))
    return Piece(parameter, group, start, end, value, gradient, state)


@torch.no_grad()
def _part(tensor: torch.Tensor, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
    local = local_parts(tensor.detach())[0]
    if tensor.shape != parameter.shape:
        return local.reshape(-1) if local.ndim else local
    return local.reshape(-1)[start:end]


def stepped(optimizer: Optimizer, pieces: list[Piece], *, exact: bool = False) -> list[dict[str, torch.Tensor]]:
    """Take the step again; return of each piece the parameter (key ``""``) and the optimizer's state, by key.

    ``exact``: in float64 on the CPU.
    """

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        if not exact:
            return value.clone()
        return value.to("cpu", torch.float64 if value.is_floating_point() else value.dtype, copy=True)

    twin = object.__new__(type(optimizer))
    twin.__dict__ = dict(optimizer.__dict__)
    twin.state, twin.param_groups = type(optimizer.state)(dict), []
    made = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [piece for piece in pieces if piece.group == number]
        parameters = []
        for piece in mine:
            parameter = nn.Parameter(moved(piece.value), requires_grad=piece.parameter.requires_grad)
            parameter.grad = moved(piece.grad)
            if piece.state:
                twin.state[parameter] = {key: moved(value) for key, value in piece.state.items()}
            parameters.append(parameter)
            made.append((piece, parameter))
        if mine:
            options = {key: moved(value) for key, value in group.items() if key != "params"}
            if exact:
                options |= {key: False for key in ("foreach", "fused", "capturable") if key in options}
            twin.param_groups.append({"params": parameters, **options})
    step: Any = type(optimizer).step
    step.__wrapped__(twin)  # what torch's hooks are wrapped around
    results = {id(piece): parameter for piece, parameter in made}
    return [_result(twin, results[id(piece)]) for piece in pieces]


def _result(twin: Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    state = {key: value for key, value in twin.state[parameter].items() if isinstance(value, torch.Tensor)}
    return {"": parameter.detach(), **state}
