"""What a function that runs in float64 sees of dtypes: those that the device would have, so that it casts as it does there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bitwitness.oracle.kept import kept_as
from bitwitness.oracle.rounding import Rounding
from bitwitness.tap.compat import unheard
from bitwitness.tap.operators import tensors_in

_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_DEVICES = ("cpu", "cuda", "xpu", "npu")


class DeviceDtypes(TorchFunctionMode):
    """Answers ``x.dtype`` with the dtype in which the device keeps ``x``, and tells a `Rounding` where autocast is on.

    Autocast leaves float64 alone, and below it nobody can tell that it is on. Gradients of what is kept in a half type are cast
    to it on the device, which float64 does not show either.
    """

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _DTYPE:  # a wrapper that is made anew each time
            with unheard():
                return self._rounding.kept_dtype(args[0])
        kwargs = kwargs or {}
        before = self._rounding.autocast
        self._rounding.autocast = autocast_dtype()
        try:
            found = func(*args, **kwargs)
        finally:
            self._rounding.autocast = before
        if not isinstance(found, Tensor):
            return found
        found = self._kept(func, args, kwargs, found)
        with unheard():
            self._rounding.watch_gradient(found)
        return found

    @staticmethod
    def _kept(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], found: Tensor) -> Tensor:
        """Return a result with the dtype that a script asked for: float64, which is what all has here; torch's default."""
        with unheard():
            if not found.is_floating_point():
                return found
            given = tensors_in([*args, *kwargs.values()])
            if func is Tensor.double or torch.float64 in (*args, *kwargs.values()):
                mine = found.view_as(found) if any(found is t for t in given) else found
                return kept_as(mine, torch.float64)
            made = not given and not any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
            return kept_as(found, torch.float32) if made else found


def autocast_dtype() -> torch.dtype | None:
    """Return to which dtype autocast has products computed here, on any device; None where it is off."""
    for kind in _DEVICES:
        try:
            if torch.is_autocast_enabled(kind):
                return torch.get_autocast_dtype(kind)
        except RuntimeError:  # this torch knows no such device
            continue
    return None
