"""What a script itself hands to `torch.distributed`'s collectives, and what they give back.

The reductions inside DistributedDataParallel and FSDP2 are not called from Python; gradients before and after them tell.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from bitwitness.monitor.activations import Fail
from bitwitness.monitor.sheet import Sheet
from bitwitness.tap.ownwork import in_own_work, in_replay, own_work
from bitwitness.tap.patching import replaced
from bitwitness.tap.slots import named_tensors

_WRITES = {
    "all_reduce": (0,),
    "reduce": (0,),
    "broadcast": (0,),
    "all_gather": (0,),
    "all_gather_into_tensor": (0,),
    "reduce_scatter": (0,),
    "reduce_scatter_tensor": (0,),
    "all_to_all": (0,),
    "all_to_all_single": (0,),
    "recv": (0,),
    "send": (),
}
"""Collectives, and which of their arguments they write to; those that they only write to are not looked at before."""
_READS = ("all_reduce", "reduce", "broadcast", "send")
"""Those whose first argument is an input."""


class Communication:
    """Looks at collectives' tensors for the steps that are looked at.

    Parameters
    ----------
    wanted
        Whether they are asked for; else it is only noted that they have written.
    fail
        Told of an error; they are not looked at any more then.

    """

    def __init__(self, *, wanted: bool, fail: Fail) -> None:
        self._wanted = wanted
        self._fail = fail
        self._stack = ExitStack()
        self._sheet: Sheet | None = None
        self._calls: Counter[str] = Counter()

    def attach(self, sheet: Sheet) -> None:
        """Look at the collectives of a step."""
        module: Any = sys.modules.get("torch.distributed")
        if module is None or not module.is_available() or not module.is_initialized():
            return
        self._sheet = sheet
        self._calls.clear()
        for name in _WRITES:
            self._stack.enter_context(replaced(module, name, functools.partial(self._wrapped, name)))

    def detach(self) -> None:
        """Look no more."""
        self._stack.close()
        self._sheet = None

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            sheet = self._sheet
            if sheet is None or in_own_work() or in_replay() or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            call = f"{name}#{self._calls[name]}"
            self._calls[name] += 1
            given = [*args, *kwargs.values()]
            self._see(sheet, call, "in", given if name in _READS else given[1:])
            result = original(*args, **kwargs)
            sheet.forget()
            if result is None:  # else it is on its way, and nobody knows when it will have arrived
                self._see(sheet, call, "out", [given[i] for i in _WRITES[name] if i < len(given)])
            return result

        return collective

    def _see(self, sheet: Sheet, call: str, way: str, values: list[Any]) -> None:
        if not self._wanted:
            return
        try:
            with own_work(), torch.no_grad():
                for number, value in enumerate(values):
                    for slot, tensor in named_tensors(value, f"{way}{number}"):
                        sheet.measure("comm", call, slot, tensor)
        except Exception as error:
            self._wanted = False
            self._fail("collectives", error)
