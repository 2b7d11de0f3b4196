"""Tell which mutants are none, how far the others are off, and how many there are of which kind.

    cd bench; python -m mutants.check [PART OF A NAME …]

A mutant whose results and gradients have the right one's bits is none. The others are held against float64: how many times
as far off as the right function is the wrong one, at worst over results and
gradients, by the root mean square and by the largest error in units of the last place (a last unit counts as error, too)?
Those below ``CLOSE`` are printed, to be read once more: they may be hard, or they may be within a kernel's freedom.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from . import Mutant, mutants
from .numerics import widened

CLOSE = 4.0
Tensor = torch.Tensor


def ran(function: Callable[..., Any], inputs: tuple[Any, ...], seed: int = 5) -> list[Tensor]:
    """Return the result and the gradients of those inputs that take one."""
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*leaves)
    if not out.requires_grad:
        return [out.detach()]
    outer = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    taken = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(out, taken, outer, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, taken, strict=True))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Tell whether all values agree: one NaN is as good as another, and so is a zero."""
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(one, other, strict=True))


def distance(found: Tensor, true: Tensor) -> float:
    """Return the root mean square of the errors; infinite where one is a number and the other isn't."""
    found, true = found.double(), true.double()
    off = torch.where((found == true) | (found.isnan() & true.isnan()), 0.0, found - true)
    return float("inf") if not off.isfinite().all() else float(off.square().mean().sqrt())


def units(found: Tensor, true: Tensor) -> float:
    """Return the largest error in units of each value's last place."""
    if not found.is_floating_point():
        return float((found != true).any())
    eps, tiny = torch.finfo(found.dtype).eps, torch.finfo(found.dtype).tiny
    found, true = found.double(), true.double()
    off = torch.where((found == true) | (found.isnan() & true.isnan()), 0.0, (found - true).abs())
    return float((off / (eps * true.abs().clamp(min=tiny))).nan_to_num(nan=float("inf")).max())


def ratio(wrong: list[Tensor], right: list[Tensor], true: list[Tensor]) -> float:
    """Return how many times farther off the wrong one is."""
    worst = 0.0
    for bad, good, value in zip(wrong, right, true, strict=True):
        eps = torch.finfo(good.dtype).eps if good.is_floating_point() else 0.0
        unit = float(value.double().nan_to_num(0, 0, 0).square().mean().sqrt()) * eps / 4
        base = distance(good, value)
        own = distance(bad, value if base < float("inf") else good)
        worst = max(worst, own / max(base if base < float("inf") else unit, unit, 1e-300))
        base = units(good, value)
        worst = max(worst, units(bad, value) / max(base if base < float("inf") else 1.0, 0.5))
    return worst


def examine(mutant: Mutant) -> tuple[bool, float]:
    """Return whether the bits agree, and how far off the wrong one is."""
    inputs = mutant.inputs()
    right, wrong = ran(mutant.right, inputs), ran(mutant.wrong, mutant.inputs())
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(right, wrong, strict=True)):
        raise ValueError(f"{mutant.name}: shapes or dtypes differ: {[(a.shape, a.dtype) for a in (*right, *wrong)]}.")
    wide = tuple(
        x.requires_grad_(y.requires_grad)
        for x, y in zip(widened(tuple(x.detach() for x in inputs), torch.float64), inputs, strict=True)
    )
    return same(right, wrong), ratio(wrong, right, ran(mutant.right, wide))


def main(parts: list[str]) -> int:
    """Examine all; return how many are no mutants or fail."""
    found = [m for m in mutants() if not parts or any(part in m.name for part in parts)]
    none, close = [], []
    begun = time.perf_counter()
    for mutant in found:
        try:
            agree, times = examine(mutant)
        except Exception as error:
            none.append(mutant.name)
            print(f"FAILS {mutant.name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        if agree:
            none.append(mutant.name)
            print(f"NO MUTANT {mutant.name}")
        elif times < CLOSE or parts:
            close.append((times, mutant.name))
    for times, name in sorted(close):
        print(f"{times:8.2f} times the right one's error: {name}")
    columns = {
        "faults": [m.fault for m in found],
        "operators": [m.operator for m in found],
        "dtypes": [m.name.split("/")[-1] for m in found],
    }
    for title, column in columns.items():
        counts = Counter(column).most_common()
        print(f"\n{len(counts)} {title}: " + ", ".join(f"{name} {count}" for name, count in counts))
    print(f"\n{len(found)} mutants, {len(none)} of them none, {time.perf_counter() - begun:.0f} s")
    return len(none)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]) > 0)
