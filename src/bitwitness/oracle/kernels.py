"""Operators that an accelerator alone has, or one dtype, written in what float64 has: so that it can be asked of them, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.attention import attention, attention_backward
from bitwitness.oracle.recurrent import lstm_layer, lstm_layer_backward
from bitwitness.tap.compat import OpOverload

Named = Mapping[str, Any]
Kernel = Callable[[Named], tuple[Tensor, ...]]
"""Computes an operator's results, the first ones at least, from its arguments by the names of its schema."""


def named_arguments(func: OpOverload, args: Sequence[Any], kwargs: Named) -> dict[str, Any]:
    """Return a call's arguments by the schema's names, defaults included."""
    arguments = func._schema.arguments
    named = {a.name: a.default_value for a in arguments if a.has_default_value()}
    named.update({a.name: value for a, value in zip(arguments, args, strict=False)})
    named.update(kwargs)
    return named


def kernel_of(func: OpOverload) -> Kernel | None:
    """Return what computes an accelerator's operator on the CPU; None for one that the CPU has itself, or that is not known."""
    return _KERNELS.get(func.overloadpacket.__name__) if func.namespace == "aten" else None


def _batch_norm(named: Named) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.native_batch_norm(
        named["input"],
        named["weight"],
        named["bias"],
        _copied(named["running_mean"]),
        _copied(named["running_var"]),
        named["training"],
        named["exponential_average_factor"],
        named["epsilon"],
    )
    return found[:1]


def _batch_norm_backward(named: Named) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        named["grad_output"],
        named["input"],
        named["weight"],
        _copied(named["running_mean"]),
        _copied(named["running_var"]),
        named["save_mean"],
        named["save_var"],  # the reciprocal of the deviation, in spite of its name
        True,  # noqa: FBT003 - it is called in training only
        named["epsilon"],
        [True, True, True],
    )
    return found


def _copied(statistics: Tensor | None) -> Tensor | None:
    """Copy running statistics, which the operator updates."""
    return None if statistics is None else statistics.clone()


_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(_ATTENTIONS, attention),
    **dict.fromkeys([f"{name}_backward" for name in _ATTENTIONS], attention_backward),
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "miopen_batch_norm_backward": _batch_norm_backward,
    "mkldnn_rnn_layer": lstm_layer,
    "mkldnn_rnn_layer_backward": lstm_layer_backward,
}
