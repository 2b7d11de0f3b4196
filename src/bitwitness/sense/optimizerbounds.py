"""What Adam's moments cannot be, whatever the gradients were.

m = (1 - b1) sum b1^k g_k and v = (1 - b2) sum b2^k g_k^2, so that by Cauchy and Schwarz
|m| <= sqrt(v) (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) where b1^2 < b2 (7.3 sqrt(v) for 0.9 and 0.999). He et al. (ISCA 2023)
found that faults which outlast a step are those that leave such traces in an optimizer's history.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_SLACK = 4.0  # betas that a schedule moves, or a checkpoint had otherwise; and rounding
_SMALLEST = 1e-15  # squares of smaller gradients are lost to float32


def out_of_bounds(
    first: torch.Tensor | None, second: torch.Tensor | None, group: dict[str, Any]
) -> tuple[str, str] | None:
    """Return which moment cannot be, ``exp_avg`` or ``exp_avg_sq``, and why; None if both can. Waits for the device.

    Parameters
    ----------
    first, second
        The moments, [N]; None where the optimizer keeps none.
    group
        The options of the optimizer for this parameter.

    """
    if second is None or not second.is_floating_point() or second.dtype.itemsize < 4:
        return None  # in a narrow dtype a small share of a small square is lost, and the second moment falls behind
    if bool((second < 0).any()):
        return "exp_avg_sq", f"a mean of squares is {float(second.min()):.6g}"
    betas = group.get("betas")
    if first is None or not isinstance(betas, tuple | list) or not all(isinstance(beta, float) for beta in betas):
        return None
    b1, b2 = betas
    if not 0 <= b1 < 1 or not 0 < b2 < 1 or b1 * b1 >= b2:
        return None
    factor = _SLACK * (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
    excess = first.abs() - factor * second.sqrt()
    if bool((excess > _SMALLEST).any()):
        worst = int(excess.argmax())
        squares = float(second[worst])
        what = f"a mean of gradients is {float(first[worst]):.6g} where the mean of their squares is {squares:.6g}"
        return "exp_avg", f"{what}: no gradients lead there"
    return None
