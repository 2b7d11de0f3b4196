"""What is known of operators: which put in a given constant, which accumulate, which only move or overwrite."""

from __future__ import annotations

import math
from typing import Any, Literal

from bitwitness.tap.compat import OpOverload

Mode = Literal["compute", "accumulate", "all", "aicore_overflow", "atomic_overflow"]
"""Which operators to look at; the last two are the reference systems' names of the first two."""

CONSTANTS = frozenset({
    "fill", "fill_", "full", "full_like", "new_full", "scalar_tensor", "masked_fill", "masked_fill_", "where",
    "index_fill", "index_fill_", "constant_pad_nd", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_",
    "nan_to_num", "nan_to_num_",
})  # fmt: skip
"""They put in the infinity (or the NaN) that the model's author gives them: masks, mostly."""

BOUNDED = frozenset({
    "bernoulli", "bernoulli_", "cos", "erf", "hardsigmoid", "rand", "rand_like", "randint", "randint_like", "random_",
    "sigmoid", "sigmoid_", "sign", "sin", "tanh", "tanh_",
})  # fmt: skip
"""They give nothing but finite numbers, whatever finite ones they are given: no script makes them overflow."""

_OVERWRITING = frozenset({
    "copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_",
    "geometric_", "cauchy_", "arange_out", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip

_ACCUMULATING = frozenset({
    "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "index_reduce",
    "index_reduce_", "embedding_dense_backward", "_embedding_bag_dense_backward", "embedding_bag", "segment_reduce",
    "bincount", "histc", "all_reduce", "reduce_scatter", "accumulate_grad", "put_", "_sparse_sum",
})  # fmt: skip
_ACCUMULATING_IF_ASKED = frozenset({"index_put", "index_put_", "_index_put_impl_", "put", "put_"})

MATRIX_PRODUCTS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "addmv", "dot", "convolution", "conv2d", "_scaled_mm",
    "mkldnn_rnn_layer", "mkldnn_linear", "_trilinear", "einsum",
})  # fmt: skip

CASTS = frozenset({"_to_copy", "to", "copy_", "copy"})
SOFTMAX = frozenset({"_softmax", "_log_softmax", "softmax", "log_softmax", "logsumexp", "_safe_softmax"})
ATTENTION = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
})  # fmt: skip

READ_IN_PART = ("embedding", "index", "gather", "take", "_embedding")
"""How the names of operators begin that read some entries of a tensor only: the others may be bad for long."""


def puts_in(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call puts in a non-finite constant of its caller's."""
    if op not in CONSTANTS:
        return False
    given = [*args, *kwargs.values()]
    numbers = [value for value in given if isinstance(value, float)]
    numbers += [n for value in given if isinstance(value, list | tuple) for n in value if isinstance(n, float)]
    return any(not math.isfinite(number) for number in numbers)


def overwritten(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors that a call writes without reading them."""
    found: set[int] = set()
    whole = func.overloadpacket.__name__ in _OVERWRITING
    for position, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write:
            continue
        if argument.kwarg_only:
            value = kwargs.get(argument.name)
        elif whole and position < len(args):
            value = args[position]
        else:
            continue
        found.update(id(item) for item in (value if isinstance(value, list | tuple) else [value]))
    return found


def accumulates(op: str, phase: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call adds many values into one place, as the vendors' atomic additions do."""
    if op in _ACCUMULATING_IF_ASKED:
        return True in args or bool(kwargs.get("accumulate"))
    return op in _ACCUMULATING or phase in ("grad", "comm")


def wanted(mode: Mode, *, accumulating: bool) -> bool:
    """Tell whether a mode looks at an operator of that kind."""
    return mode == "all" or (mode in ("accumulate", "atomic_overflow")) == accumulating
