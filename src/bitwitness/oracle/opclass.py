"""What kind of operator this is, for what it may round: nothing, once, or along a sum.

The classes follow the error analysis of Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed.: an *exact* operator
moves or selects what is there, or answers by comparing; a *correctly rounded* one gives the number of its dtype that is nearest
to the true result (IEEE 754's operations); the others round on their way, *summing* ones more with every term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.kernels import named_arguments
from bitwitness.oracle.names import PRODUCTS, canonical
from bitwitness.oracle.opnames import CORRECTLY_ROUNDED_NAMES, ELEMENTARY, EXACT_NAMES, SPECIAL_NAMES, WIDE_SUMS
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.operators import tensors_in

EXACT, CORRECTLY_ROUNDED, ELEMENTWISE, SPECIAL, SUM, SOLVER, RESAMPLING, OTHER = (
    "exact",
    "correctly rounded",
    "elementwise",
    "special function",
    "sum",
    "solver",
    "resampling",
    "other",
)

_OF_TWO = ("abs", "sgn", "sign", "angle")
"""What is exact of a real number, and makes one of the two numbers of a complex one."""
_OF_FOUR = ("div", "mul", "reciprocal", "square", "true_divide")
"""What rounds on its way where its numbers are complex, though it rounds once where they are real."""


def is_view(func: OpOverload) -> bool:
    """Whether an operator returns a view of what it was given."""
    return not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)


def asked_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the floating dtype that a call asks for; not float64, which is what a tensor that was made wide asks for, too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex):
            real = value.to_real() if value.is_complex else value
            return None if real is torch.float64 else real
    return None


def class_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kept: torch.dtype) -> str:
    """Return the class of a call, one of the constants above; ``kept``: the dtype of its result."""
    found = _class_of(func)
    if found == CORRECTLY_ROUNDED:
        if _scales_by_two(func, args):
            return EXACT
        if _is_complex(func, _OF_FOUR, args):
            return ELEMENTWISE
        # A scaled sum has a product to round, too; a quotient that is truncated, a quotient; and a number that float32 does
        # not hold, which a script wrote, is rounded before.
        plain = kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None
        return found if plain and not any(_is_rounded(a, torch.float32) for a in args) else ELEMENTWISE
    if found == EXACT and any(_is_rounded(a, kept) for a in args):
        return CORRECTLY_ROUNDED
    if found == EXACT and (_is_complex(func, _OF_TWO, args) or _accumulates(func, args, kwargs)):
        return OTHER
    return found


def _is_complex(func: OpOverload, names: Sequence[str], args: Sequence[Any]) -> bool:
    """Whether a call is of one of these operators, and of complex numbers."""
    return func.overloadpacket.__name__.strip("_") in names and any(t.is_complex() for t in tensors_in(args))


def _scales_by_two(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a call multiplies or divides by a power of two that is written in the script."""
    if func.overloadpacket.__name__.strip("_") not in ("mul", "div") or len(args) < 2 or isinstance(args[1], Tensor):
        return False
    return isinstance(args[1], int | float) and abs(math.frexp(args[1])[0]) == 0.5


def _is_rounded(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number is none of a dtype."""
    if isinstance(value, Tensor):  # a number among tensors comes as one without dimensions
        value = value.item() if value.dim() == 0 and value.is_floating_point() else 0.0
    return isinstance(value, float) and math.isfinite(value) and float(torch.tensor(value, dtype=dtype)) != value


def _accumulates(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call that writes into places adds what meets there."""
    name = func.overloadpacket.__name__.strip("_")
    if not name.startswith(("index_put", "unsafe_index_put", "put", "scatter", "unsafe_masked_index_put")):
        return False
    named = named_arguments(func, args, kwargs)
    return bool(named.get("accumulate")) or named.get("reduce") is not None


_PLACES = 4.0
"""Roundings for each row of a solver's matrix, or place on a resampler's side."""
_SOLVERS = ("linalg_", "cholesky", "lu_", "triangular_solve", "inverse", "ormqr")
_NO_SOLVERS = ("linalg_cross", "linalg_vector_norm", "linalg_vecdot", "linalg_diagonal")
_RESAMPLERS = ("upsample", "grid_sampler", "affine_grid")


@lru_cache(maxsize=4096)
def _class_of(func: OpOverload) -> str:
    name = func.overloadpacket.__name__
    if name in ("add", "sub", "add_", "sub_", "rsub"):
        return CORRECTLY_ROUNDED
    bare = name.strip("_").removeprefix("special_").removeprefix("foreach_")
    if name.endswith("_backward") and bare not in EXACT_NAMES and not bare.startswith((*_RESAMPLERS, "convolution")):
        return ELEMENTWISE if torch.Tag.pointwise in func.tags else OTHER
    if bare in EXACT_NAMES:
        return EXACT
    if bare in CORRECTLY_ROUNDED_NAMES:
        return CORRECTLY_ROUNDED
    if bare in SPECIAL_NAMES:
        return SPECIAL
    if canonical(name) in PRODUCTS or name == "convolution_backward":
        return SUM
    if bare.startswith(_SOLVERS) and bare not in _NO_SOLVERS:
        return SOLVER
    if bare.startswith(_RESAMPLERS) and "nearest" not in bare:
        return RESAMPLING
    # torch's own parts of operators, ``prims``, bear no tags
    return ELEMENTWISE if torch.Tag.pointwise in func.tags or bare in ELEMENTARY else OTHER


def growth(
    func: OpOverload, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor | None = None
) -> float:
    """Return by how much rounding adds up in an operator, in units of one rounding; ``result`` where it is known.

    Errors of a sum grow like the square root of its number of terms (Higham and Mary, "A new approach to probabilistic
    rounding error analysis", 2019); half of it, for kernels add up in several lanes. A solver's grow with the size of its
    matrix (Higham, chapters 9 and 10), a resampler's with the coordinates that it computes.
    """
    inputs = tensors_in(args)
    sides = [n for t in inputs for n in t.shape[-2:]]
    if kind in (SOLVER, RESAMPLING):
        return _PLACES * max([1.0, *map(float, sides)])
    if kind in (EXACT, CORRECTLY_ROUNDED, ELEMENTWISE, SPECIAL):
        return 1.0
    terms = _depth(inputs) if kind == SUM else _reduced(func, args, kwargs)
    if kind == OTHER and result is not None and result.numel():
        terms = max(terms, max((t.numel() for t in inputs), default=1) / result.numel())
    return max(1.0, math.sqrt(terms) / 2)


def _depth(inputs: Sequence[Tensor]) -> float:
    """Return how many products an element of a product sums: a matrix's last dimension, all of a filter."""
    return float(
        max((max(t.shape[-1] if t.dim() else 1, t[:1].numel() if t.dim() > 2 else 1) for t in inputs), default=1)
    )


def adds_in_place(func: OpOverload) -> bool:
    """Whether kernels of an operator are known to add up in the dtype of their result: so do norms' backwards on a CPU."""
    name: str = func.overloadpacket.__name__
    return name.endswith("_norm_backward") or name.startswith("nll_loss")


def is_transform(func: OpOverload) -> bool:
    """Whether an operator is a Fourier transform, whose factors are rounded whatever it is given, zeros and ones, too."""
    return func.namespace == "aten" and func.overloadpacket.__name__.startswith("_fft_")


def is_elementary(func: OpOverload) -> bool:
    """Whether an operator is one elementary function, which has no intermediate results that could be rounded."""
    return func.overloadpacket.__name__.strip("_").removeprefix("special_") in ELEMENTARY


def is_one_function(operators: Sequence[OpOverload]) -> bool:
    """Whether all that rounds among operators is one elementary function, whose approximation is bounded."""
    rounding = [f for f in operators if _class_of(f) != EXACT]
    return len(rounding) == 1 and is_elementary(rounding[0])


def sums_wide(func: OpOverload, kind: str) -> bool:
    """Whether every kernel of an operator adds up in float32, whatever the dtype of what it adds."""
    return kind == SUM or func.overloadpacket.__name__ in WIDE_SUMS


def _reduced(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return how many elements a reduction puts together, as far as its arguments tell: those of its dimensions, or all."""
    named = named_arguments(func, args, kwargs)
    source = next((a for a in args if isinstance(a, Tensor)), None)
    if source is None or not source.dim():
        return 1.0
    dims = named.get("dim", named.get("dims"))
    if dims is None:
        return float(source.numel()) if "dim" in named else float(max(source.shape))
    dims = [dims] if isinstance(dims, int) else list(dims)
    return float(math.prod(source.shape[d] for d in dims)) if dims else float(source.numel())


def only_rounds_correctly(operators: Sequence[OpOverload]) -> bool:
    """Whether each of these operators is exact or correctly rounded."""
    return all(_class_of(f) in (EXACT, CORRECTLY_ROUNDED) for f in operators)


def is_elementwise(operators: Sequence[OpOverload]) -> bool:
    """Whether all of these operators make each number of one number of each input."""
    return all(_class_of(f) in (EXACT, CORRECTLY_ROUNDED, ELEMENTWISE, SPECIAL) for f in operators)


def is_pointwise(operators: Sequence[OpOverload]) -> bool:
    """Whether they are, and no more than one of them rounds: nothing gets lost on the way."""
    return is_elementwise(operators) and sum(_class_of(f) != EXACT for f in operators) <= 1


def has_products(operators: Sequence[OpOverload]) -> bool:
    """Whether a sum of products is among operators: a zero of it may be left out, or make a NaN of another."""
    return any(_class_of(f) == SOLVER or sums_products(f) or "fft" in f.overloadpacket.__name__ for f in operators)


def sums_products(func: OpOverload) -> bool:
    """Whether autocast has an operator computed in its lower precision: products, convolutions, attention."""
    return _class_of(func) == SUM or "attention" in func.overloadpacket.__name__


_LINEAR = frozenset(("sum", "add", "sub", "neg", "convolution", "convolution_backward", "zeros", "zeros_like", "mul"))


def is_linear(operators: Sequence[OpOverload]) -> bool:
    """Whether all that rounds among operators sums or multiplies: of small integers the result is exact."""
    rounding = [f for f in operators if _class_of(f) != EXACT]
    names = {f.overloadpacket.__name__.strip("_") for f in rounding}
    return bool(rounding) and all(n in _LINEAR or canonical(n) in PRODUCTS for n in names)
