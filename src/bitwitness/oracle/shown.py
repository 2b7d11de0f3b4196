"""What a function that runs in float64 sees of dtypes: those that the device would have, so that it casts as it does there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bitwitness.oracle.rounding import Rounding
from bitwitness.tap.compat import unheard

_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_DEVICES = ("cpu", "cuda", "xpu", "npu")


class DeviceDtypes(TorchFunctionMode):
    """Answers ``x.dtype`` with the dtype in which the device keeps ``x``, and tells a `Rounding` where autocast is on.

    Autocast leaves float64 alone, and below it nobody can tell that it is on.
    """

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DTYPE:
            with unheard():
                return self._rounding.kept_dtype(args[0])
        before = self._rounding.autocast
        self._rounding.autocast = autocast_dtype()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._rounding.autocast = before


def autocast_dtype() -> torch.dtype | None:
    """Return to which dtype autocast has products computed here, on any device; None where it is off."""
    for kind in _DEVICES:
        try:
            if torch.is_autocast_enabled(kind):
                return torch.get_autocast_dtype(kind)
        except RuntimeError:  # this torch knows no such device
            continue
    return None
