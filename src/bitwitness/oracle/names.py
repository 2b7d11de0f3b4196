"""One name for what goes by several: kernels of one operator, in-place forms, and what other tools call it."""

from __future__ import annotations

from functools import lru_cache

_SAME = {
    "addmm": "linear",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "native_batch_norm": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "miopen_batch_norm": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "cudnn_batch_norm_backward": "batch_norm_backward",
    "miopen_batch_norm_backward": "batch_norm_backward",
    "native_group_norm": "group_norm",
    "native_dropout": "dropout",
    "bernoulli": "dropout",
    "convolution": "conv",
    "conv1d": "conv",
    "conv2d": "conv",
    "conv3d": "conv",
    "safe_softmax": "softmax",
    "scaled_dot_product_attention": "attention",
    "bmm": "matmul",
    "mm": "matmul",
    "nll_loss_forward": "nll_loss",
    "iadd": "add",
    "radd": "add",
    "imul": "mul",
    "rmul": "mul",
    "truediv": "div",
    "rsub": "sub",
}
CONTRACTIONS = ("linear", "matmul", "baddbmm", "addbmm", "addmv", "mv", "dot", "einsum")
"""Common names of what sums products, but for convolutions."""
PRODUCTS = (*CONTRACTIONS, "conv")
CONSTANT = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
"""What reads no value of a tensor, but its shape alone."""
_RNG = ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial", "exponential", "random", "poisson", "rrelu")


@lru_cache(maxsize=4096)
def canonical(op: str) -> str:
    """Return the common name of an operator."""
    # Underscores mark in-place and private forms; a cast's belongs to its name.
    name = op.strip("_") if op != "_to_copy" else op
    if name.startswith(("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")):
        return "attention_backward" if "backward" in name else "attention"
    return _SAME.get(name, name)


def is_random(op: str) -> bool:
    """Return whether an operator draws random numbers."""
    # A dropout's backward reads the mask that was drawn before.
    return op.strip("_").removeprefix("native_").startswith(_RNG) and "backward" not in op
