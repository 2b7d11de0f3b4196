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

from bitwitness.replay.run import Execution, ReplayError
from bitwitness.tap.capture import ForwardRecord, StepRecord
from bitwitness.tap.gradients import queue_after_backward
from bitwitness.tap.randomness import randomness_kept
from bitwitness.tap.structure import fresh, map_tensors, tensors_of


def write_back(parameters: list[nn.Parameter], good: list[torch.Tensor | None]) -> None:
    """Overwrite the gradients in place (references that a clipping function already took stay valid)."""
    with torch.no_grad():
        for parameter, grad in zip(parameters, good, strict=True):
            if parameter.grad is not None and grad is not None:
                parameter.grad.copy_(grad)
            elif parameter.grad is not grad:
                parameter.grad = grad


def heal_alone(root: nn.Module, parameters: list[nn.Parameter], good: Execution) -> None:
    """Keep a verified replay's gradients and buffers."""
    if good.grads is None or good.buffers is None:
        raise ReplayError("the replay did not keep its gradients")
    write_back(parameters, good.grads)
    set_buffers(root, good.buffers)


def set_buffers(root: nn.Module, values: list[torch.Tensor]) -> None:
    """Set the root's buffers, in order, in place."""
    with torch.no_grad():
        for buffer, value in zip(root.buffers(), values, strict=True):
            buffer.copy_(value)


def heal_together(
    wrapper: nn.Module,
    root: nn.Module,
    parameters: list[nn.Parameter],
    record: StepRecord,
    device: torch.device,
    describe: Callable[[], None],
) -> None:
    """Run the step again through the DistributedDataParallel wrapper and keep the gradients it reduces.

    ``describe`` is called when all local gradients of a synchronising backward are there and none is reduced yet.

    Every rank must call this at the same time. Afterwards each ``p.grad`` is the tensor it was, with healed values,
    and buffers are as the healed forward left them; the random state is untouched.
    """
    held = [p.grad for p in parameters]
    for parameter, grad in zip(parameters, held, strict=True):
        parameter.grad = torch.zeros_like(grad) if record.zero_start and grad is not None else None
    with randomness_kept(device), torch.enable_grad():
        for group in record.passes():
            _run_pass(wrapper, root, group, device, describe)
    for parameter, grad in zip(parameters, held, strict=True):
        new = parameter.grad
        if grad is not None and new is not None:
            with torch.no_grad():
                grad.copy_(new)
            parameter.grad = grad


def _run_pass(
    wrapper: nn.Module,
    root: nn.Module,
    group: list[ForwardRecord],
    device: torch.device,
    describe: Callable[[], None],
) -> None:
    results: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    syncs = group[-1].sync or not hasattr(wrapper, "no_sync")
    with nullcontext() if syncs else wrapper.no_sync():  # type: ignore[operator]
        for record in group:
            set_buffers(root, record.buffers)
            record.random.restore(device)
            args, kwargs = map_tensors(record.args, fresh), map_tensors(record.kwargs, fresh)
            with record.autocast.context():
                result = wrapper(*args, **kwargs)
            values = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
            for value, grad in zip(values, record.output_grads, strict=True):
                if grad is not None:
                    results.append(value)
                    grads.append(grad)
        if syncs:
            # The first hook of this backward: queued before the wrapper queues its own final callback.
            aliases = [value.view_as(value) for value in results]
            aliases[0].register_hook(lambda _: queue_after_backward(describe))
            results = aliases
        torch.autograd.backward(results, grads)
