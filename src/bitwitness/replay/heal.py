"""Putting right what a transient fault spoiled: raw gradients and buffers of the step at hand, in place.

One process alone copies the verified replay's gradients over the spoiled ones. Under DistributedDataParallel a corrupt
local gradient is inside every rank's reduced gradient, so all ranks run the step once more through the wrapper, in
lockstep, micro-batch by micro-batch with the same ``no_sync`` pattern, and keep what that reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from bitwitness.replay.errors import ReplayError
from bitwitness.replay.run import Execution, Replayer
from bitwitness.tap.capture import Pass, StepRecord
from bitwitness.tap.compiled import distributed
from bitwitness.tap.gradients import queue_after_backward
from bitwitness.tap.randomness import randomness_kept

_STATELESS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


def write_back(parameters: list[nn.Parameter], good: list[torch.Tensor | None]) -> None:
    """Overwrite the gradients in place (references that a clipping function already took stay valid)."""
    with torch.no_grad():
        for parameter, grad in zip(parameters, good, strict=True):
            if parameter.grad is not None and grad is not None:
                parameter.grad.copy_(grad)
            elif parameter.grad is not grad:
                parameter.grad = grad


def heal_alone(replayer: Replayer, parameters: list[nn.Parameter], good: Execution) -> None:
    """Keep a verified replay's gradients, buffers, and what else its forwards left behind."""
    if good.grads is None or good.buffers is None:
        raise ReplayError("the replay did not keep its gradients")
    write_back(parameters, good.grads)
    replayer.keeper.put(good.buffers)
    if good.state is not None:
        good.state.restore()


def stateful_reduction(wrapper: nn.Module) -> str | None:
    """Return why gradients cannot be reduced once more: a communication hook may keep what it has left over from each step."""
    reducing = distributed(wrapper)
    for hook, _state in getattr(reducing, "_comm_hooks", ()):
        if getattr(hook, "__module__", "") != _STATELESS or not getattr(hook, "__name__", "").endswith("_hook"):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            return f"the communication hook {name} reduces the gradients, and may keep something from each time"
    return None


def heal_together(
    replayer: Replayer,
    wrapper: nn.Module,
    record: StepRecord,
    describe: Callable[[], None],
    parameters: list[nn.Parameter],
) -> None:
    """Run the step again through the DistributedDataParallel wrapper and keep the gradients it reduces.

    ``describe`` is called when all local gradients of a synchronising backward are there and none is reduced yet.

    Every rank must call this at the same time. Afterwards each ``p.grad`` is the tensor it was, with healed values,
    and buffers are as the healed forward left them; the random state is untouched.
    """
    held = [p.grad for p in parameters]
    for parameter, grad in zip(parameters, held, strict=True):
        parameter.grad = torch.zeros_like(grad) if record.zero_start and grad is not None else None
    try:
        with randomness_kept(replayer.device), torch.enable_grad():
            for group in record.passes():
                _run_pass(replayer, wrapper, group, describe)
    finally:
        for parameter, grad in zip(parameters, held, strict=True):
            new = parameter.grad
            if grad is not None and new is not None:
                with torch.no_grad():
                    grad.copy_(new)
                parameter.grad = grad


def _run_pass(replayer: Replayer, wrapper: nn.Module, group: Pass, describe: Callable[[], None]) -> None:
    syncs = group.sync or not hasattr(wrapper, "no_sync")
    with nullcontext() if syncs else wrapper.no_sync():  # type: ignore[operator]
        found = replayer.starts_through(wrapper, group)
        roots = found.roots
        if syncs:
            # The first hook of this backward: queued before the wrapper queues its own final callback.
            roots = [root.view_as(root) for root in roots]
            roots[0].register_hook(lambda _: queue_after_backward(describe))
        torch.autograd.backward(roots, found.grads)
