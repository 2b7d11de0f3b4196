"""Which operators a deep step called, how often and how large, checked or not: counted as they run, never assumed.

What is counted is the model's forward and the backward, where the operator tap is on. Views and allocations compute nothing
and are left out. Work is in floating-point operations where torch counts them (products, attention, convolutions, recurrent
layers, by `sense.flops`); of any other operator each element of the result counts as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from bitwitness.inject.outputs import computes, is_collective
from bitwitness.oracle.names import CONTRACTIONS, canonical, is_random
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.operators import tensors_in

COLLECTIVE = "collectives"
_KINDS = {
    "convolutions": "conv slow_conv mkldnn_convolution cudnn_convolution thnn_conv",
    "recurrent layers": "mkldnn_rnn cudnn_rnn miopen_rnn thnn_fused_lstm thnn_fused_gru",
    "pooling and resampling": "avg_pool max_pool adaptive_ upsample grid_sampler fractional_max",
    "normalisation": "layer_norm batch_norm group_norm fused_rms_norm rms_norm instance_norm",
    "softmax and losses": "softmax log_softmax nll_loss mse_loss binary_cross smooth_l1 huber kl_div",
    "embedding and indexing": "embedding index gather scatter select slice masked_ take put where",
    "reductions": "sum mean amax amin max min argmax var std cumsum linalg_vector_norm norm",
    "copies, casts and constants": "to_copy clone copy cat stack fill zero ones full arange local_scalar new_",
}
"""Kinds by how the names of their operators begin, underscores aside; the first that fits."""

_COUNTED = ("calls", "checked", "again", "operations", "operations_checked")
"""What is counted of each kind."""


@lru_cache(maxsize=4096)
def kind_of(func: OpOverload) -> str | None:
    """Return what kind of operator this is, in words; None for what computes nothing."""
    if is_collective(func):
        return COLLECTIVE
    if not computes(func):
        return None
    op = func.overloadpacket.__name__
    name, bare = canonical(op), op.strip("_").removeprefix("native_").removeprefix("foreach_")
    if name.startswith("attention"):
        return "attention"
    if name in CONTRACTIONS or bare.startswith(("addmm", "scaled_mm", "grouped_mm", "int_mm")):
        return "matrix products"
    if is_random(op):
        return "random numbers and dropout"
    for kind, beginnings in _KINDS.items():
        if bare.startswith(tuple(beginnings.split())):
            return kind
    return "element-wise operators" if torch.Tag.pointwise in func.tags or "backward" in bare else "other operators"


class Census:
    """Counts the calls of deep steps."""

    def __init__(self) -> None:
        self._seen: dict[OpOverload, list[int]] = {}  # calls, elements: hashing an overload is most of what this costs

    def __call__(self, func: OpOverload, result: Any) -> None:
        """Count one call; nothing is read of its numbers."""
        seen = self._seen.get(func)
        if seen is None:
            seen = self._seen[func] = [0, 0]
        seen[0] += 1
        with suppress(Exception):  # a tensor of the script's own class, say: this runs inside its training
            if isinstance(result, torch.Tensor):
                seen[1] += result.numel()
            elif isinstance(result, tuple | list) and (tensors := tensors_in(result)):
                seen[1] += tensors[0].numel()

    def collectives(self) -> dict[str, int]:
        """Return the collectives that were called on deep steps, by name."""
        found: Counter[str] = Counter()
        for func, (count, _) in self._seen.items():
            if is_collective(func) and computes_or_sends(func):
                found[func.overloadpacket.__name__.strip("_")] += count
        return dict(found)

    def table(
        self, flops: Mapping[str, int], checked: Mapping[str, tuple[int, int]], again: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return calls and work, in all and by kind, ready for JSON.

        Parameters
        ----------
        flops
            Floating-point operations by operator, of those that carry any.
        checked
            Calls that some sensor checked, by operator, and their floating-point operations, or elements where none count.
        again
            Other calls, by operator, that were computed again: a fault that repeats itself does not show so.

        """
        names = Counter[str]()
        kinds: dict[str, dict[str, Any]] = {}
        work = Counter[str]()
        whose: dict[str, str] = {}
        for func, (count, elements) in self._seen.items():
            kind = kind_of(func)
            if kind is None or kind == COLLECTIVE:
                continue
            op = func.overloadpacket.__name__
            names[op] += count
            whose[op] = kind
            work[op] = flops.get(op, 0) or work[op] + elements
        for op, count in names.items():
            row = kinds.setdefault(whose[op], {**dict.fromkeys(_COUNTED, 0), "ops": {}, "never": {}})
            calls, done = checked.get(op, (0, 0))
            row["calls"] += count
            row["checked"] += calls
            row["again"] += min(again.get(op, 0), max(count - calls, 0))
            row["operations"] += work[op]
            row["operations_checked"] += done
            row["ops"][op] = count
            if not calls and not again.get(op, 0):
                row["never"][op] = count
        rows = dict(sorted(kinds.items(), key=lambda pair: -pair[1]["operations"]))
        return {
            "calls": sum(row["calls"] for row in rows.values()),
            "calls_checked": sum(row["checked"] for row in rows.values()),
            "operations": sum(row["operations"] for row in rows.values()),
            "operations_checked": sum(row["operations_checked"] for row in rows.values()),
            "kinds": rows,
        }


def computes_or_sends(func: OpOverload) -> bool:
    """Tell whether a collective moves numbers, rather than waiting."""
    return func.overloadpacket.__name__ not in ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")
