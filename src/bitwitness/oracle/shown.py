"""What a function that runs in float64 sees of dtypes: those that the device would have, so that it casts as it does there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bitwitness.numerics import is_inexact
from bitwitness.oracle.float64 import wide_dtype
from bitwitness.oracle.kept import kept_as
from bitwitness.oracle.rounding import Rounding
from bitwitness.tap.compat import tree_map, unheard
from bitwitness.tap.operators import tensors_in

_GETTER = "__get__"
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_RMS_NORMS = (torch.rms_norm, torch.nn.functional.rms_norm)
_EPS_AT = 3
_DEVICES = ("cpu", "cuda", "xpu", "npu")


class DeviceDtypes(TorchFunctionMode):
    """Answers ``x.dtype`` with the dtype in which the device keeps ``x``, and tells a `Rounding` where autocast is on.

    Autocast leaves float64 alone, and below it nobody can tell that it is on. Gradients of what is kept in a half type are cast
    to it on the device, which float64 does not show either.
    """

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding
        self._brought: dict[int, tuple[Tensor, Tensor]] = {}
        """What a function brings along, a module's weights, say, with its float64 copy."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _DTYPE:  # a wrapper that is made anew each time
            with unheard():
                return self._rounding.kept_dtype(args[0])
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != _GETTER:
            with unheard():
                args, kwargs = tree_map(self._wide, (args, kwargs))
        if func in _RMS_NORMS:
            args, kwargs = self._with_eps(args, kwargs)
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

    def _wide(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_inexact(value) or wide_dtype(value.dtype) is value.dtype:
            return value
        if id(value) not in self._brought:
            copy = value.detach().to("cpu", wide_dtype(value.dtype)).requires_grad_(value.requires_grad)
            self._brought[id(value)] = value, kept_as(copy, value.dtype)
        return self._brought[id(value)][1]

    def _with_eps(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of an RMS norm with the epsilon that the device would take: float32's, or float64's own."""
        if (len(args) > _EPS_AT and args[_EPS_AT] is not None) or kwargs.get("eps") is not None:
            return args, kwargs
        given = args[0] if args else kwargs["input"]
        with unheard():
            kept = self._rounding.kept_dtype(given)
        eps = torch.finfo(torch.float64 if kept is torch.float64 else torch.float32).eps
        return args[:_EPS_AT], {**kwargs, "eps": eps}

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
