"""The operators of one replay in order: a bit hash of what each computed, and one of them kept whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bitwitness.stats import bit_hash
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.frames import current_line, line_text
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

_MOVES = ("fsdp", "c10d", "_c10d_functional")


def moves_between_ranks(func: OpOverload) -> bool:
    """Tell whether an operator brings what other ranks computed: it differs from rank to rank, and is no computation."""
    return func.namespace in _MOVES


def computes(func: OpOverload) -> bool:
    """Tell whether an operator computes its result, rather than returning a view of its input or raw memory."""
    if moves_between_ranks(func):
        return False
    returns = func._schema.returns
    if not returns or "empty" in func.overloadpacket.__name__:
        return False
    info = returns[0].alias_info
    return info is None or info.is_write


@dataclass(slots=True)
class OperatorTrace:
    """What one replay's operators computed, in order.

    ``hashes``: one int64 0-d tensor an operator (all its outputs together), on its device; ``sites``: their printable
    sites. The operator numbered ``keep`` is kept whole in ``kept``, with the user's line that called it (for a backward
    operator: the line of the forward operator that it belongs to) in ``line``.
    """

    keep: int | None = None
    hashes: list[torch.Tensor] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    kept: OpCall | None = None
    line: str = ""
    _tracker: ModuleTracker = field(default_factory=ModuleTracker)
    _lines: dict[int, str] = field(default_factory=dict)

    def tap(self) -> OperatorTap:
        """Return the dispatch mode that records; enter it around each forward and each backward."""
        return OperatorTap(self._tracker, self._see, computes, before=self._keep_inputs)

    def _keep_inputs(self, call: OpCall) -> None:
        if self.keep is None:
            return
        if call.phase == "forward":
            self._lines.setdefault(self._tracker.node(), line_text(current_line()))
        if len(self.hashes) == self.keep:
            # in-place operators overwrite their inputs, so these are copied before it runs
            self.kept = OpCall(
                call.func,
                copied(call.args),
                copied(call.kwargs),
                None,
                call.op,
                call.module,
                call.phase,
                call.call,
            )
            # a forward operator without gradients has no node of its own, but the one before it has
            here = call.phase == "forward"
            self.line = line_text(current_line()) if here else self._lines.get(self._tracker.node(), "")

    def _see(self, call: OpCall) -> None:
        outputs = call.outputs
        if self.keep is not None:
            if len(self.hashes) == self.keep and self.kept is not None:
                self.kept.result = copied(call.result)
            self.hashes.append(torch.zeros((), dtype=torch.int64))
            return
        total = torch.zeros((), dtype=torch.int64)
        for position, tensor in enumerate(outputs):
            if not tensor.is_floating_point():
                continue  # a kernel's work space may be raw memory
            digest = bit_hash(tensor.detach())
            total = total.to(digest.device) * 31 + digest + position
        self.hashes.append(total)
        self.sites.append(call.site().short)


def copied(value: Any) -> Any:
    """Return an operator's arguments or results with copies of the tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value
