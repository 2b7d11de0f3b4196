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

from bitwitness.capture.randomness import randomness_kept
from bitwitness.capture.step import Pass, StepRecord
from bitwitness.replay.conditions import shared_generators
from bitwitness.replay.errors import ReplayError
from bitwitness.replay.quiet import run_backward
from bitwitness.replay.run import Execution, Replayer
from bitwitness.tap.compat import keeping_versions, queue_after_backward
from bitwitness.tap.compiled import distributed

_STATELESS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


def write_back(
    parameters: list[nn.Parameter], good: list[torch.Tensor | None], left: frozenset[int] = frozenset()
) -> None:
    """Overwrite the gradients in place (references that a clipping function already took stay valid).

    ``left``: positions of those that are none of the step's, and stay.
    """
    with torch.no_grad():
        for index, (parameter, grad) in enumerate(zip(parameters, good, strict=True)):
            if index in left:
                continue
            if parameter.grad is not None and grad is not None:
                parameter.grad.copy_(grad)
            elif parameter.grad is not grad:
                parameter.grad = grad


def heal_alone(
    replayer: Replayer, parameters: list[nn.Parameter], record: StepRecord, good: Execution, *, keep_buffers: bool
) -> None:
    """Keep a verified replay's gradients, losses, buffers, and what else its forwards left behind.

    ``keep_buffers``: they stay as they are, `buffers_moved`.
    """
    if good.grads is None or good.buffers is None:
        raise ReplayError("the replay did not keep its gradients")
    write_back(parameters, good.grads, record.left)
    if good.whole:
        write_losses(record, good.losses)
    if not keep_buffers:
        replayer.keeper.put(good.buffers)
    if good.state is not None:
        good.state.restore()


def write_losses(record: StepRecord, values: list[torch.Tensor]) -> None:
    """Overwrite the losses that the backwards of a step began at, where the script still holds them: it may log them yet."""
    held = [ref() for group in record.passes() for ref in record.roots.get(group.number, ())]
    for tensor, value in zip(held, values, strict=False) if len(held) == len(values) else ():
        if tensor is not None and tensor.numel() == 1 and tensor.shape == value.shape and tensor.dtype == value.dtype:
            _overwrite(tensor, value)


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value where autograd is not to notice it: a graph of the script's may hold the tensor."""
    with torch.no_grad(), keeping_versions((tensor,)):
        tensor.detach().copy_(value)


def write_results(good: Execution) -> None:
    """Overwrite what the forwards returned, and what the script made of it for its loss, where it holds that unchanged.

    The next step may begin with it: a hidden state, a running mean of the losses.
    """
    for memory, value in good.results:
        memory.mend(value)
    for tensor, value in good.made:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.dtype == value.dtype
        if plain and not tensor.is_inference():
            _overwrite(tensor, value)


def buffers_moved(replayer: Replayer, record: StepRecord) -> bool:
    """Tell whether something else than the forwards that are run again has changed the buffers since they were left.

    An evaluation in training mode moves running statistics, say; these then stay as they are.
    """
    ran = [forward.number for group in record.passes() for forward in group.forwards]
    last = record.forwards[-1] if record.forwards else None
    return last is None or max(ran, default=-1) != last.number or last.versions != replayer.keeper.versions()


def stateful_reduction(wrapper: nn.Module) -> str | None:
    """Return why gradients cannot be reduced once more: a communication hook may keep what it has left over from each step."""
    reducing = distributed(wrapper)
    for hook, _state in getattr(reducing, "_comm_hooks", ()):
        if getattr(hook, "__module__", "") != _STATELESS or not getattr(hook, "__name__", "").endswith("_hook"):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            return (
                f"the communication hook {name} reduces the gradients, and may keep something from each time: from this step, "
                "too, which may spoil those that follow; go back to a checkpoint where they are not what they were"
            )
    return None


def heal_together(
    replayer: Replayer,
    wrapper: nn.Module,
    record: StepRecord,
    describe: Callable[[], None],
    parameters: list[nn.Parameter],
    *,
    keep_buffers: bool,
) -> None:
    """Run the step again through the DistributedDataParallel wrapper and keep the gradients it reduces.

    ``describe`` is called when all local gradients of a synchronising backward are there and none is reduced yet.

    Every rank must call this at the same time. Afterwards each ``p.grad`` is the tensor it was, with healed values, losses too,
    and buffers are as the healed forward left them, unless they are to be kept as they are (`buffers_moved`); the random
    state is untouched.
    """
    buffers = [t.detach().clone() for t in replayer.keeper.tensors()] if keep_buffers else []
    held = [p.grad for p in parameters]
    for parameter, grad in zip(parameters, held, strict=True):
        parameter.grad = torch.zeros_like(grad) if record.zero_start and grad is not None else None
    try:
        passes = record.passes()
        with randomness_kept(replayer.device, shared=shared_generators(passes)), torch.enable_grad():
            losses = [_run_pass(replayer, wrapper, group, describe) for group in passes]
        if all(loss is not None for loss in losses):
            write_losses(record, [root for loss in losses for root in loss or ()])
    finally:
        replayer.keeper.put(buffers)
        for index, (parameter, grad) in enumerate(zip(parameters, held, strict=True)):
            new = parameter.grad
            if index in record.left:
                parameter.grad = grad
            elif grad is not None and new is not None:
                with torch.no_grad():
                    grad.copy_(new)
                parameter.grad = grad


def _run_pass(
    replayer: Replayer, wrapper: nn.Module, group: Pass, describe: Callable[[], None]
) -> list[torch.Tensor] | None:
    """Run one pass; return the losses that it went back from, or None where it did not go through the loss code."""
    syncs = group.sync or not hasattr(wrapper, "no_sync")
    with nullcontext() if syncs else wrapper.no_sync():  # type: ignore[operator]
        found = replayer.starts_through(wrapper, group)
        roots = found.roots
        if syncs:
            # The first hook of this backward: queued before the wrapper queues its own final callback.
            roots = [root.view_as(root) for root in roots]
            roots[0].register_hook(lambda _: queue_after_backward(describe))
        run_backward(replayer.root, group.began, torch.autograd.backward, roots, found.grads)
    return [root.detach() for root in found.roots] if found.through else None
