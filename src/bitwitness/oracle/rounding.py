"""A function run in float64 with rounding put back at random, operator by operator: what healthy kernels may differ by.

This is Monte Carlo arithmetic (Parker, "Monte Carlo arithmetic", UCLA CSD-970002, 1997) at the granularity of torch's
operators. Run without noise, it gives the function's float64 value. Run with noise, each operator reads its inputs off by a
rounding of the precision in which kernels compute (float32 for half types), and leaves its result off by a rounding of the
dtype in which the device would keep it; the spread over several runs says how much rounding moves each element, through every
amplification that the function has. An operator that is written in simpler ones (`oracle.takenapart`) is run as these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import FLOAT8, HALF, is_inexact, unit_roundoff
from bitwitness.oracle.eligible import draws, is_unique
from bitwitness.oracle.float64 import each_argument, wide_dtype, widened
from bitwitness.oracle.kept import KeptDtypes, is_marked, kept_as, roundoff
from bitwitness.oracle.noise import Noise
from bitwitness.oracle.opclass import (
    CORRECTLY_ROUNDED,
    EXACT,
    RESAMPLING,
    SPECIAL,
    SUM,
    adds_in_place,
    asked_dtype,
    class_of,
    growth,
    is_elementary,
    is_transform,
    is_view,
    sums_products,
    sums_wide,
)
from bitwitness.oracle.quantised import is_quantisation, quantised, read_off
from bitwitness.oracle.scaled import is_scaled_product
from bitwitness.oracle.takenapart import parts_of
from bitwitness.oracle.unrounded import Unrounded
from bitwitness.oracle.writtenout import written_out
from bitwitness.tap.compat import OpOverload, TorchDispatchMode, current_node
from bitwitness.tap.operators import tensors_in

_ROUNDINGS = 4.0
"""Roundings that an elementary function's approximation may leave: two units in the last place, as CUDA's are documented."""
_SPECIAL_ROUNDINGS = 16.0
"""The same of a special function's."""
_TAPS, _TWIDDLES = 64.0, 4.0
"""Roundings of weights, in units of the largest result, that a resampler's, a transform's, terms may leave as they cancel."""
_TENSOR_CORE = 2.0**-13
"""Rounding of sums of float8 products where they are added up fast: in some 14 bits (DeepSeek-V3, arXiv 2412.19437, 3.3.2)."""


class Rounding(TorchDispatchMode):
    """Runs what is inside in float64, with random roundings where a ``generator`` is given.

    Parameters
    ----------
    dtype
        In which the device keeps what is not known otherwise: the coarsest of the function's inputs.
    generator
        Draws the roundings; None for none.
    only
        The device keeps all of it in this dtype, whatever a function casts to.
    stepwise
        Kernels keep their intermediate results in their dtype, too, instead of float32; sums are added up in float32 still.

    Attributes
    ----------
    operators
        The operators that ran, views aside.
    forward
        Those of them that autograd did not run.
    draws
        Whether one of them drew random numbers.
    is_unique
        Whether each of them has only one right result.
    quantised
        Float8 types to which something was cast.
    autocast
        To which dtype autocast has products computed now (`oracle.shown` tells it).

    """

    def __init__(
        self,
        dtype: torch.dtype,
        generator: torch.Generator | None = None,
        *,
        stepwise: bool = False,
        only: torch.dtype | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[OpOverload] = []
        self.forward: list[OpOverload] = []
        self.draws = False
        self.is_unique = True
        self.quantised: set[torch.dtype] = set()
        self.autocast: torch.dtype | None = None
        self._kept = KeptDtypes(dtype, only)
        self._noise = None if generator is None else Noise(generator)
        self._stepwise = stepwise
        self._whole: list[tuple[OpOverload, torch.dtype]] = []
        """Operators of which the parts run now, the outermost first, and in which dtype their results are kept."""
        self._unrounded = Unrounded()
        self._hooks: list[Any] = []

    def clean(self, tensor: Tensor) -> Tensor:
        """Return a result before it was rounded itself: what its operator made of what it read."""
        found = self._unrounded.of(tensor)
        return tensor if found is None else found

    def release(self) -> None:
        """Let go of all tensors: they would keep this, and this them, for ever."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._unrounded.clear()

    def kept_dtype(self, tensor: Tensor) -> torch.dtype:
        """Return in which dtype the device keeps a tensor."""
        return self._kept.shown(tensor)

    def watch_gradient(self, tensor: Tensor) -> None:
        """Have the gradient of a tensor that the device keeps in a narrow type kept in it, too, as autograd casts it there."""
        if tensor.requires_grad and tensor.is_floating_point() and (kept := self._kept.of(tensor)) in (*HALF, *FLOAT8):

            def cast(gradient: Tensor) -> Tensor:
                if roundoff(self._kept.of(gradient)) >= roundoff(kept):
                    return gradient
                if kept in FLOAT8:
                    return self._quantised(gradient, self._kept.of(gradient), kept)
                found = gradient.view_as(gradient) if self._noise is None else self._noise.rounded(gradient, kept)
                return kept_as(found, kept)

            self._hooks.append(tensor.register_hook(cast))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if is_view(func):
            return self._view(func, args, kwargs)
        self._note(func, args, kwargs)
        if formula := written_out(func, self._kept.of):
            return self._written_out(func, formula, args, kwargs)
        asked, noise = asked_dtype(args, kwargs), self._noise
        asked = asked if asked in FLOAT8 else self._kept.only or asked
        kept = asked or self._kept.coarsest(tensors_in([*args, *kwargs.values()]))
        if noise is not None and asked is None and not self._whole:
            if self.autocast is not None and sums_products(func):
                kept = max(kept, self.autocast, key=roundoff)
            args, kwargs = self._cast(args, kept, noise), self._cast(kwargs, kept, noise)
        if is_quantisation(func, kept):
            return self._quantised(widened(args[0]), self._kept.of(args[0]), kept)
        return self._computed(func, args, kwargs, self._inner(kept) if self._whole else kept)

    def _computed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], kept: torch.dtype) -> Any:
        """Run an operator in float64, with noise where there is some; its result is kept in ``kept`` on the device."""
        noise = self._noise
        given = widened(args), widened(kwargs)
        kind = class_of(func, args, kwargs, kept)
        if kept in FLOAT8 and kind != EXACT:  # which computes nothing
            kept = torch.float32
        if noise is None or kind == EXACT:
            return self._marked(func(*given[0], **given[1]), kept)
        if all(func is not whole for whole, _ in self._whole) and (
            parts := parts_of(func, kind, *given, stepwise=self._stepwise)
        ):
            return self._in_parts(func, parts, given, kept)
        return self._rounding(func, kind, given, kept, noise)

    def _note(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not self._whole:
            self.operators.append(func)
            self.forward += [func] if current_node() is None else []
            self.draws = self.draws or draws(func, args, kwargs)
            self.is_unique = self.is_unique and is_unique(func)

    def _view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        source = next((a for a in args if isinstance(a, Tensor)), None)
        if source is not None:
            self._marked(result, self._kept.of(source))
            if isinstance(result, Tensor) and (clean := self._unrounded.of(source)) is not None:
                self._unrounded.remember(result, func(clean, *args[1:], **kwargs))
        return result

    def _quantised(self, wide: Tensor, read: torch.dtype, kept: torch.dtype) -> Tensor:
        """Return what a cast to float8 leaves of numbers that are ``read`` in their dtype; with noise, of its neighbours."""
        self.quantised.add(kept)
        return self._stored(wide if self._noise is None else read_off(self._noise, wide, read), kept)

    def _written_out(
        self, func: OpOverload, formula: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        kept = asked_dtype(args, kwargs) or self._kept.of(args[0])
        if self._noise is not None:
            return self._in_parts(func, formula, (args, kwargs), kept)
        return self._each(formula(*args, **kwargs), lambda t: self._stored(t, kept))

    def _in_parts(self, func: OpOverload, parts: Callable[..., Any], given: Any, kept: torch.dtype) -> Any:
        self._whole.append((func, kept))
        try:
            with self, torch.no_grad():
                result = parts(*given[0], **given[1])
        finally:
            self._whole.pop()
        return self._each(result, lambda t: self._stored(t, kept))

    def _rounding(self, func: OpOverload, kind: str, given: Any, kept: torch.dtype, noise: Noise) -> Any:
        """Run an operator on inputs that are off by what it may lose inside, and round what it returns."""
        written = {
            i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        }
        sums = sums_wide(func, kind) and not any(adds_in_place(whole) for whole, _ in self._whole)
        internal = self._internal(kept, wide=not self._stepwise or sums or is_elementary(func))
        if kind != CORRECTLY_ROUNDED:
            share = max(internal * growth(func, kind, given[0], given[1]), self._factors(kind))
            args = tuple(a if i in written else noise.arguments(a, share) for i, a in enumerate(given[0]))
            given = args, {k: v if func._schema.is_mutable else noise.arguments(v, share) for k, v in given[1].items()}
        result = func(*given[0], **given[1])

        def finished(tensor: Tensor) -> Tensor:
            wide = tensor.to(wide_dtype(tensor.dtype))
            clean = wide
            if kind != CORRECTLY_ROUNDED:
                roundings = _SPECIAL_ROUNDINGS if kind == SPECIAL else _ROUNDINGS
                clean = noise.moved(wide, roundings * internal * growth(func, kind, given[0], given[1], wide))
            taps = _TAPS if kind == RESAMPLING else _TWIDDLES * is_transform(func)
            if taps and clean.numel():  # its weights are off, which may cancel
                clean = noise.moved_by_largest(clean, internal * taps)
            if func._schema.is_mutable and any(tensor is given[0][i] for i in written if i < len(given[0])):
                clean = clean.clone()
                tensor.copy_(noise.rounded(clean, kept))
                return self._unrounded.remember(kept_as(tensor, kept), clean, written=True)
            return self._stored(clean, kept)

        return self._each(result, finished)

    @staticmethod
    def _internal(kept: torch.dtype, *, wide: bool) -> float:
        """Return the unit roundoff of the precision in which kernels compute for a dtype."""
        own = roundoff(kept)
        return min(own, unit_roundoff(torch.float32)) if wide else own

    def _inner(self, kept: torch.dtype) -> torch.dtype:
        """Return in which dtype a kernel keeps what it computes on its way to a result in ``kept``."""
        return torch.float32 if kept in FLOAT8 or (kept in HALF and not self._stepwise) else kept

    def _factors(self, kind: str) -> float:
        """Return how far factors of a product are off: in attention, probabilities are rounded to be multiplied."""
        if not self._whole or kind != SUM:
            return 0.0
        whole, dtype = self._whole[0]
        if is_scaled_product(whole):
            return _TENSOR_CORE if self._stepwise else 0.0
        return roundoff(dtype) if "attention" in whole.overloadpacket.__name__ else 0.0

    def _cast(self, values: Any, kept: torch.dtype, noise: Noise) -> Any:
        """Return arguments with those rounded to ``kept`` that are kept in a wider dtype: the device reads them cast."""

        def cast(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
                return value
            return noise.rounded(value, kept) if roundoff(self._kept.of(value)) < roundoff(kept) else value

        return each_argument(values, cast)

    def _marked(self, result: Any, kept: torch.dtype) -> Any:
        def marked(tensor: Tensor) -> Tensor:
            wide = tensor.to(wide_dtype(tensor.dtype))
            if is_marked(wide):  # what comes back as it was given stays what it is
                return wide
            return kept_as(wide, kept)

        return self._each(result, marked)

    def _each(self, result: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a result with each of its floating tensors changed."""
        if isinstance(result, Tensor):
            return change(result) if is_inexact(result) else result
        if isinstance(result, list | tuple):
            found = [self._each(one, change) for one in result]
            return found if isinstance(result, list) else tuple(found)  # a named one takes its parts otherwise
        return result

    def _stored(self, clean: Tensor, kept: torch.dtype) -> Tensor:
        """Return a result as the device keeps it, and remember what it was before."""
        if kept in FLOAT8:
            found = quantised(clean, kept)
        else:  # another tensor than its clean one, in any case
            found = clean.clone() if self._noise is None else self._noise.rounded(clean, kept)
        return self._unrounded.remember(kept_as(found, kept), clean)
