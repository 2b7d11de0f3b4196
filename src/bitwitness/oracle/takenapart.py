"""Operators written in simpler ones: where a kernel rounds inside cannot be seen, where its formula rounds can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitwitness.oracle.attention import attention_backward_from_logsumexp, attention_with_logsumexp
from bitwitness.oracle.eligible import is_torchs
from bitwitness.oracle.kernels import named_arguments
from bitwitness.oracle.opclass import ELEMENTWISE, OTHER
from bitwitness.tap.compat import OpOverload, decompositions, on_cpu
from bitwitness.tap.operators import tensors_in

_WHOLE = frozenset(("cumsum", "cumprod", "logcumsumexp", "native_dropout", "sum", "mean", "prod", "var", "std"))
"""Operators whose decomposition says less than their class: of quadratic cost, or one that only calls them again."""
_BIASED = frozenset(("addmm", "addmv", "addr", "baddbmm", "addbmm"))
"""Products that are added to something."""
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_trusted: dict[OpOverload, bool] = {}
"""Whether an operator's parts gave what it gives, the one time that both were tried."""


def parts_of(
    func: OpOverload, kind: str, args: Sequence[Any], kwargs: dict[str, Any], *, stepwise: bool
) -> Callable[..., Any] | None:
    """Return a function of simpler operators that gives what ``func`` gives; None where there is none that does.

    Parameters
    ----------
    func, kind
        The operator, and its class.
    args, kwargs
        Arguments in float64, on which both are tried once for each operator: one that gives anything else is not used.
    stepwise
        Kernels may round on their way: a product that is scaled and added to something, too.

    """
    scaled = kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1
    biased = stepwise and scaled and func.overloadpacket.__name__ in _BIASED
    if (kind not in (ELEMENTWISE, OTHER) and not biased) or any(r.alias_info is not None for r in func._schema.returns):
        return None
    parts = _known(func)
    if parts is None:
        return None
    if func not in _trusted:
        try:
            _trusted[func] = not func._schema.is_mutable and _alike(func(*args, **kwargs), parts(*args, **kwargs))
        except Exception:  # a decomposition may refuse what the operator takes
            _trusted[func] = False
    return parts if _trusted[func] else None


def _known(func: OpOverload) -> Callable[..., Any] | None:
    name = func.overloadpacket.__name__
    if name in _WHOLE:
        return None
    if not is_torchs(func):  # what a script registers is written in torch's operators, if it is written in Python
        return on_cpu(func)
    if name in (_ATTENTION, f"{_ATTENTION}_backward"):
        formula = attention_with_logsumexp if name == _ATTENTION else attention_backward_from_logsumexp
        return lambda *args, **kwargs: formula(named_arguments(func, args, kwargs))
    found: Callable[..., Any] | None = decompositions().get(func)
    return found


def _alike(one: Any, other: Any) -> bool:
    a, b = tensors_in(one), tensors_in(other)
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-6, atol=1e-9, equal_nan=True)
        for x, y in zip(a, b, strict=True)
        if not x.is_complex()
    )
