"""Which tensors a device computes in an operator call, and which it sends and receives in a collective.

A view is computed by nobody: to corrupt it would be to corrupt the memory that it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bitwitness.capture.structure import map_tensors
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.operators import OpCall, tensors_in

COLLECTIVES = ("c10d", "_c10d_functional")

_ALLOCATES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_SHOWS = {"_unsafe_view", "resize_as_", "set_", "record_stream"}  # views that the schema does not call views
_MOVES_NOTHING = {"barrier", "monitored_barrier_", "check_for_nan", "wait_tensor", "_wrap_tensor_autograd"}
_WITHOUT_COMPUTING = _ALLOCATES | _SHOWS | _MOVES_NOTHING
_SENDS_ONLY = frozenset({"send", "isend"})
_RECEIVES_ONLY = frozenset({"recv_", "recv_any_source_", "irecv"})


def computes(func: OpOverload) -> bool:
    """Tell whether an operator computes or moves values, rather than allocating or showing memory."""
    if func.overloadpacket.__name__ in _WITHOUT_COMPUTING or torch.Tag.inplace_view in func.tags:
        return False
    return not any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def is_collective(func: OpOverload) -> bool:
    """Tell whether an operator communicates among ranks."""
    return func.namespace in COLLECTIVES


def computed(call: OpCall) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the call computed, each with its slot.

    Results that share memory with an argument that the operator does not write are left out. An operator that
    returns nothing (``_foreach_add_``, fused optimizers) computed the arguments that it writes.
    """
    written = _written(call)
    if not call.outputs:
        for index, tensor in enumerate(written):
            yield f"out{index}", tensor
        return
    own = {_memory(tensor) for tensor in written}
    shown = {_memory(tensor) for tensor in tensors_in((*call.args, *call.kwargs.values()))} - own
    for index, tensor in enumerate(call.outputs):
        if _memory(tensor) not in shown:
            yield f"out{index}", tensor


def delivered(call: OpCall) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a collective brought to this rank, each with its slot, once it has arrived."""
    if call.op in _SENDS_ONLY:
        return
    if call.func.namespace == "c10d":
        _wait(call.result)
        received = [value for name, value in _arguments(call) if name.startswith(("output", "tensor"))]
    else:
        received = [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in call.outputs]
    for index, tensor in enumerate(tensors_in(received)):
        yield f"out{index}", tensor


def change_contribution(call: OpCall, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Let ``change(slot, tensor)`` replace what this rank is about to send; None keeps it.

    Memory that the collective only reads keeps its bits; memory that it also writes is changed in place.
    """
    if call.op in _RECEIVES_ONLY:
        return
    count = 0

    def replaced(tensor: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        nonlocal count
        changed = change(f"in{count}", tensor)
        count += 1
        if changed is None:
            return tensor
        return tensor.copy_(changed) if in_place else changed

    writes = {argument.name for argument in call.func._schema.arguments if _is_written(argument)}
    args = list(call.args)
    for position, (name, value) in enumerate(_arguments(call)):
        if name.startswith(("input", "tensor")) and position < len(args):
            in_place = name in writes or (name.startswith("tensor") and call.op not in _SENDS_ONLY)
            args[position] = map_tensors(value, partial(replaced, in_place=in_place))
    call.args = tuple(args)


def _arguments(call: OpCall) -> Iterator[tuple[str, Any]]:
    """Yield the given arguments by name; positional ones first, in their order."""
    for argument, value in zip(call.func._schema.arguments, call.args, strict=False):
        yield argument.name, value
    yield from call.kwargs.items()


def _written(call: OpCall) -> tuple[torch.Tensor, ...]:
    names = {argument.name for argument in call.func._schema.arguments if _is_written(argument)}
    return tensors_in([value for name, value in _arguments(call) if name in names])


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _memory(tensor: torch.Tensor) -> int:
    """Return what tensors that share memory have in common; sparse ones have no storage and share none."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _wait(result: Any) -> None:
    """Wait for the work that a c10d operator returned, alone or beside its tensors."""
    for item in result if isinstance(result, tuple) else (result,):
        if isinstance(item, torch.ScriptObject):
            torch.distributed.Work.unbox(item).wait()


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a parameter or state on this rank; hardware bumps no version counter."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.data
