"""Records operators: their true inputs and outputs, forward, backward and recomputed; collectives, too."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch

from bitwitness.oracle.limits import factor_precision
from bitwitness.oracle.names import PRODUCTS, canonical
from bitwitness.record.log import Fail, Log, NodeValue
from bitwitness.site import Site, site_at
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.frames import Stacks
from bitwitness.tap.modules import ModuleTracker, in_backward
from bitwitness.tap.operators import OpCall, OperatorTap, tensors_in
from bitwitness.tap.ownwork import OWN, in_replay
from bitwitness.tap.trace import computes, moves_between_ranks

_SCRATCH = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention", "_fused_sdp")
_RUNNING = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_RAW = torch.uint8
"""The dtype of a recurrent kernel's reserve: raw memory, not all of it written."""
_OVERWRITES = frozenset({
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    "zero_",
})  # fmt: skip
"""What lies in their first argument does not matter to them."""
_ON_THEIR_WAY = ("c10d", "_c10d_functional")
"""Namespaces of collectives whose results may not have arrived yet; a ``wait_tensor`` delivers them."""
_RUNNING_ARGS = slice(3, 5)
"""Where those have the running mean and variance, which their kernels write without torch counting it."""


def recorded(func: OpOverload) -> bool:
    """Tell whether an operator is recorded: what computes, and what moves values between ranks; no views, and no memory."""
    if moves_between_ranks(func):
        return "wrap_tensor" not in func.overloadpacket.__name__  # what is on its way is not read
    returns = func._schema.returns
    if func.overloadpacket.__name__ == "set_":  # gives a tensor other memory, as where one is unpickled
        return False
    if not returns:  # changes its arguments
        return any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        )
    return computes(func)


class OperatorRecorder:
    """Adds the rows of each operator that runs while its tap is on.

    Parameters
    ----------
    log
        Takes the rows.
    tracker
        Names the modules of the recorded root.
    stacks
        Numbers the lines that call operators; None to leave them out.
    fail
        Told of an error; operators are not recorded any more then.

    """

    def __init__(self, log: Log, tracker: ModuleTracker, stacks: Stacks | None, fail: Fail) -> None:
        self._log = log
        self._tracker = tracker
        self._stacks = stacks
        self._fail = fail
        self._inputs: list[NodeValue] = []
        self._lines: dict[int, int] = {}
        self._broken = False

    def tap(self) -> OperatorTap:
        """Return the dispatch mode that records while it is on."""
        return OperatorTap(self._tracker, self._after, recorded, before=self._before)

    # -- before it runs: in-place operators overwrite their inputs -------------------------------------------------

    def _before(self, call: OpCall) -> None:
        if not self._is_ours(call):
            return
        try:
            self._inputs = []
            outs = _is_out(call.func)
            position = 0
            for i, value in enumerate((*call.args, *call.kwargs.values())):
                tensors = tensors_in(value)
                if (i < len(outs) and outs[i]) or (i == 0 and (call.op in _OVERWRITES or call.op == "wait_tensor")):
                    position += len(tensors)
                    continue  # memory for a result
                for tensor in tensors:
                    self._see_input(call, tensor, position)
                    position += 1
        except Exception as error:
            self._give_up(error)

    def _is_ours(self, call: OpCall) -> bool:
        """Tell whether an operator is the model's: not our own work, another model's, or a reducer's copying."""
        if self._broken or call.module == OWN or in_replay() or not self._tracker.in_focus:
            return False
        return not self._log.backward or in_backward() or moves_between_ranks(call.func)

    def _see_input(self, call: OpCall, tensor: torch.Tensor, position: int) -> None:
        if tensor.dtype is _RAW and "rnn" in call.op:
            return
        entry = self._log.see(_site(call, f"in{position}"), tensor)
        if entry is not None:
            self._inputs.append(entry)

    def _after(self, call: OpCall) -> None:
        if not self._is_ours(call):
            return
        try:
            self._add(call)
        except Exception as error:
            self._give_up(error)

    def _add(self, call: OpCall) -> None:
        log, func = self._log, call.func
        node = log.node()
        moved = moves_between_ranks(func)
        kind = "collective" if moved else "op"
        stack = self._line(call)
        args: str | None = arguments_text(func, call.args, call.kwargs, _precision(call))
        for entry in self._inputs:
            log.add(entry, node, kind, args=args, stack=stack)
            args = None
        changed = _running(call)
        written = _written(call)
        log.values.changed((*changed, *written))
        outputs = call.outputs
        if call.op == "wait_tensor":
            log.values.changed(outputs)
        elif moved and func.namespace in _ON_THEIR_WAY:
            outputs = ()
            for tensor in (received := _received(call)):
                log.values.made(tensor, node)
            log.values.changed(received)
        shown = [(f"out{i}", t) for i, t in enumerate(outputs) if not _is_scratch(call.op, i, t)]
        for slot, tensor in [*shown, *((f"running{i}", t) for i, t in enumerate(changed))]:
            log.values.made(tensor, node)
            result = log.see(_site(call, slot), tensor, overwritten=bool(written))
            if result is not None:
                log.add(result, node, kind, args=args, stack=stack)
                args = None

    def _line(self, call: OpCall) -> int:
        """Return the stack of the line that called an operator; of torch's backward, that of the forward one it belongs to."""
        if self._stacks is None:
            return -1
        if call.phase == "backward":
            own = self._stacks.within_backward()
            return own if own >= 0 else self._lines.get(self._tracker.node(), -1)
        stack = self._stacks.current()
        self._lines[self._tracker.node()] = stack
        return stack

    def new_step(self) -> None:
        """Forget the lines of the step before."""
        self._lines.clear()

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        self._fail("operators", error)


def _site(call: OpCall, slot: str) -> Site:
    moved = moves_between_ranks(call.func)
    return site_at(call.module, call.op, call.call, "comm" if moved else call.phase, slot)


@cache
def _is_out(func: OpOverload) -> tuple[bool, ...]:
    """Tell of each argument whether it is memory for a result."""
    return tuple(bool(argument.is_out) for argument in func._schema.arguments)


def _is_scratch(op: str, position: int, tensor: torch.Tensor) -> bool:
    """Tell whether a result is a kernel's work space: raw memory, or random states."""
    if op.startswith(_SCRATCH):
        return position > 1 or not tensor.is_floating_point()
    return tensor.dtype is _RAW and "rnn" in op


def _written(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Return the arguments that an operator writes to."""
    if not call.func._schema.is_mutable:
        return ()
    arguments = call.func._schema.arguments
    values = [*call.args, *(call.kwargs[a.name] for a in arguments[len(call.args) :] if a.name in call.kwargs)]
    return tuple(
        tensor
        for argument, value in zip(arguments, values, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    )


def _received(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Return what an eager collective writes, which neither its schema says nor a version counts: its first argument."""
    return tensors_in(call.args[0]) if call.func.namespace == "c10d" and call.args and call.op != "send" else ()


def _running(call: OpCall) -> tuple[torch.Tensor, ...]:
    """Return the running statistics that a batch norm updates."""
    if not call.op.removeprefix("_").startswith(_RUNNING) or call.phase != "forward" or len(call.args) < 6:
        return ()
    training = call.args[5]
    return tensors_in(list(call.args[_RUNNING_ARGS])) if training is True else ()


# -- arguments ---------------------------------------------------------------------------------------------------


def _precision(call: OpCall) -> str:
    """Return to what a product's factors are rounded, in words that a row can hold; empty for nothing less than their dtype."""
    name = canonical(call.op.removesuffix("_backward"))
    outputs = call.outputs
    if name not in PRODUCTS or not outputs or outputs[0].device.type == "cpu":
        return ""  # a CPU's kernels round where they are faster for it, which no setting tells
    return factor_precision(outputs[0], convolution=name == "conv")


def arguments_text(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], precision: str = "") -> str:
    """Return an operator and its arguments as JSON, tensors as ``{"$": position}``: enough to run it again.

    ``precision``: to what it rounds what it reads (``tf32``), if to less than the dtype says.
    """
    counter = [0]
    body: dict[str, Any] = {
        "f": str(func),
        "a": [_plain(value, counter) for value in args],
        "k": {name: _plain(value, counter) for name, value in kwargs.items()},
    }
    if precision:
        body["p"] = precision
    return json.dumps(body, separators=(",", ":"))


def _plain(value: Any, counter: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        counter[0] += 1
        return {"$": counter[0] - 1}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else {"float": repr(value)}  # JSON has no infinities
    if isinstance(value, list | tuple):
        return [_plain(item, counter) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)[6:]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    return {"other": str(value) if isinstance(value, torch.layout | torch.memory_format) else type(value).__name__}
