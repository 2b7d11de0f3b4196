"""Results that are right in more than one form: a factorisation is judged by what it must multiply to, not by its signs.

The residuals are those of LAPACK's own tests: ``|A - U S V^H| <= c n u |A|``, ``|U^H U - I| <= c n u`` (Anderson et al.,
"LAPACK Users' Guide", 3rd ed., chapter 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.oracle.float64 import widened

_ROOM = 30.0
"""The c of the bounds, as LAPACK's tests have it."""

Residual = Callable[[Tensor, Sequence[Tensor]], list[tuple[str, Tensor, Tensor]]]
"""Returns what must be equal, in words and wide: from the matrix and the results."""


def residual_of(operators: Sequence[str], given: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
    """Return what is wrong with a factorisation; empty where nothing is, None where it is none that is known here.

    Parameters
    ----------
    operators
        Names of the operators that make it, of which the last that is known here tells which one it is.
    given
        The call's tensors; the first is the matrix, ``[..., M, N]``.
    outputs
        What was returned, in the device's dtype.

    """
    known = next((_KNOWN[name] for name in reversed(operators) if name in _KNOWN), None)
    if known is None or not given or given[0].dim() < 2 or not given[0].numel():
        return None
    matrix = widened(given[0].detach())
    try:
        claims = known(matrix, [widened(t.detach()) for t in outputs])
    except (RuntimeError, IndexError, ValueError):  # other outputs than such an operator has by itself
        return None
    size = max(1.0, float(max(matrix.shape[-2:])))
    room = _ROOM * size * unit_roundoff(given[0].dtype)
    for said, left, right in claims:
        scale = float(right.abs().max()) if right.numel() else 0.0
        off = float((left - right).abs().max()) if left.numel() else 0.0
        if not off <= room * max(scale, torch.finfo(torch.float32).tiny):
            return f"{said} is off by {off:.3g}; expected no more than {room * scale:.3g}"
    return ""


def _unit(matrix: Tensor) -> tuple[str, Tensor, Tensor]:
    product = matrix.mH @ matrix
    return "the product of its vectors with one another", product, torch.eye(product.shape[-1], dtype=product.dtype)


def _svd(a: Tensor, results: Sequence[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    u, s, v = results
    values = ("the singular values", s, torch.linalg.svdvals(a))
    if not v.numel() or not u.numel():
        return [values]
    k = s.shape[-1]
    forms = [
        (u[..., :k] * s.unsqueeze(-2)) @ w for w in (v[..., :k, :], v[..., :k].mH) if w.shape[-2:] == (k, a.shape[-1])
    ]
    best = min(forms, key=lambda form: float((form - a).abs().max()))
    return [values, ("U S V^H", best, a), _unit(u[..., :k])]


def _qr(a: Tensor, results: Sequence[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    q, r = results
    return [("Q R", q @ r, a), _unit(q)]


def _eigh(a: Tensor, results: Sequence[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    values, vectors = results
    # one triangle is read: which one, only the call's arguments tell
    triangles = torch.tril(a) + torch.tril(a, -1).mH, torch.triu(a) + torch.triu(a, 1).mH
    whole = min(triangles, key=lambda t: float((torch.linalg.eigvalsh(t).to(values.dtype) - values).abs().max()))
    eigen = ("the eigenvalues", values, torch.linalg.eigvalsh(whole).to(values.dtype))
    return [eigen, ("A V - V L", whole @ vectors, vectors * values.unsqueeze(-2)), _unit(vectors)]


def _eig(a: Tensor, results: Sequence[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    values, vectors = results
    return [("A V - V L", a.to(vectors.dtype) @ vectors, vectors * values.unsqueeze(-2))]


_KNOWN: dict[str, Residual] = {
    "_linalg_svd": _svd,
    "linalg_svd": _svd,
    "linalg_qr": _qr,
    "_linalg_eigh": _eigh,
    "linalg_eigh": _eigh,
    "linalg_eig": _eig,
}
