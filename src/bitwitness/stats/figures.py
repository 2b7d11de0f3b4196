"""The statistics of many tensors at once, in few calls and, on an accelerator, without waiting: what a series is made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.numerics import HALF
from bitwitness.stats import reader
from bitwitness.stats.host import to_device
from bitwitness.stats.launches import Launches
from bitwitness.stats.local import as_reals, local_values
from bitwitness.stats.parts import Read, read
from bitwitness.stats.summary import stats_of

COLUMNS = ("nan", "inf", "zeros", "min", "max", "sum", "l2")
"""What `figures_of` tells of each tensor."""

_SMALL = 4096  # elements; below it tensors of one length are measured as rows of a matrix
_LEAST, _MOST = 1e-15, 1e18  # largest magnitudes whose squares float32 can add up
_UNCOUNTED = -1.0
_PLAIN = (torch.float32, torch.float64, *HALF)
_WIDE_DEVICES = ("cpu", "cuda")  # that have float64


@torch.no_grad()
def figures_of(tensors: Sequence[Tensor], *, zeros: bool = False) -> Tensor:
    """Return each tensor's figures.

    Parameters
    ----------
    tensors
        Of any dtypes that have numbers, on any devices. Of a DTensor the local shard is read, of a sparse one the values.
    zeros
        Count zeros, too, which costs as much as the rest.

    Returns
    -------
    Tensor
        [N, 7] with `COLUMNS`, float64 (float32 where an accelerator has none), on the first accelerator that holds one of the
        tensors, else on the CPU. ``inf``: both signs; ``zeros``: -1 where not counted; ``min`` to ``l2`` are of the finite
        values, and ``min`` and ``max`` NaN where there are none. On an accelerator without Triton, where nothing may wait to
        look again, the last four are NaN as soon as one value is not finite.

    Raises
    ------
    UsageError
        For a meta or quantized tensor.

    """
    values = [as_reals(local_values(tensor)) for tensor in tensors]
    home = next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        by_device[value.device].append(index)
    wide = torch.float64 if home.type in _WIDE_DEVICES else torch.float32
    if len(by_device) == 1:
        return _on_one([*values], home, zeros=zeros).to(wide)
    result = torch.empty(len(values), len(COLUMNS), dtype=wide, device=home)
    for device, members in by_device.items():
        found = _on_one([values[index] for index in members], device, zeros=zeros)
        result[torch.tensor(members, device=home)] = found.to(home, wide)
    return result


def _on_one(values: list[Tensor], device: torch.device, *, zeros: bool) -> Tensor:
    if device.type != "cpu":
        return _fused(values, zeros=zeros)
    rows = _compiled(values, zeros=zeros) or _by_rows(values, zeros=zeros)
    table = [rows[i] if i in rows else _alone(value, zeros=zeros) for i, value in enumerate(values)]
    return torch.tensor(table, dtype=torch.float64).view(-1, len(COLUMNS))


# -- on a CPU ----------------------------------------------------------------------------------------------------


def _compiled(values: list[Tensor], *, zeros: bool) -> dict[int, list[float]]:
    """Measure what the compiled reader takes."""
    compiled = reader.built()
    if compiled is None:
        return {}
    members = [index for index, value in enumerate(values) if compiled.takes(value)]
    found = compiled.read_all([values[index] for index in members], zeros=zeros)
    return {index: row_of(values[index], one, zeros=zeros) for index, one in zip(members, found, strict=True)}


def _by_rows(values: list[Tensor], *, zeros: bool) -> dict[int, list[float]]:
    """Measure small tensors, those of one length together: alone each costs what some calls cost, ten times over."""
    alike: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        if 0 < value.numel() < _SMALL and value.dtype in _PLAIN:
            alike[value.numel(), value.dtype].append(index)
    found: dict[int, list[float]] = {}
    for members in alike.values():
        if len(members) > 1:
            matrix = torch.stack([values[index].reshape(-1) for index in members]).double()
            low, high = matrix.amin(1), matrix.amax(1)  # each is several times faster than both by aminmax
            empty = (matrix == 0).sum(1).double() if zeros else torch.full_like(low, _UNCOUNTED)
            none = torch.zeros_like(low)
            columns = [none, none, empty, low, high, matrix.sum(1), torch.linalg.vector_norm(matrix, dim=1)]
            for index, row in zip(members, torch.stack(columns, 1).tolist(), strict=True):
                found[index] = row if math.isfinite(row[-1]) else _exactly(values[index], zeros=zeros)
    return found


def _alone(values: Tensor, *, zeros: bool = False) -> list[float]:
    """Return one tensor's figures on the CPU."""
    if values.dtype not in _PLAIN or not values.numel():
        return _exactly(values, zeros=zeros)
    return row_of(values, read(values, zeros=zeros), zeros=zeros)


def row_of(values: Tensor, found: Read | reader.Figures, *, zeros: bool) -> list[float]:
    """Return a tensor's row: of what was read of it where that tells, and else of another look at it."""
    largest = max(-found.low, found.high)
    finite = math.isfinite(found.squares) and math.isfinite(found.total)
    if not finite or not (_LEAST < largest < _MOST or largest == 0.0):
        return _exactly(values, zeros=zeros)
    none = values.numel() - (found.there or 0) if zeros else _UNCOUNTED
    return [0.0, 0.0, none, found.low, found.high, found.total, math.sqrt(found.squares)]


def _exactly(values: Tensor, *, zeros: bool) -> list[float]:
    """Measure what has NaN, Inf, extreme or no values, or a dtype of which the quick way takes no sums."""
    try:
        s = stats_of(values)
    except UsageError:  # a dtype that packs several numbers into an element
        return [0.0, 0.0, _UNCOUNTED, *[math.nan] * 4]
    inf = s.pos_inf + s.neg_inf
    finite = s.count - s.nan - inf
    total = s.mean * finite if finite else 0.0
    return [s.nan, inf, s.zeros if zeros else _UNCOUNTED, float(s.min), float(s.max), total, s.l2]


# -- on an accelerator -------------------------------------------------------------------------------------------


def _launched(values: list[Tensor], *, zeros: bool) -> Tensor | None:
    """Measure by a launch each; None where not all can be."""
    if not values or not all(map(Launches.takes, values)):
        return None
    device = values[0].device
    launches = Launches(device)
    if not all(launches.add(index, value, signed=False) for index, value in enumerate(values)):
        return None
    found = torch.cat([one.figures for one in launches.join()])
    return columns_of(found, [value.numel() for value in values] if zeros else None)


def columns_of(launched: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Return what was launched, [N, 9] with `bitwitness.stats.launches.FIGURES`, as [N, 7] with `COLUMNS`.

    ``counts``: how many values each tensor has, if zeros are counted.
    """
    nan, above, below, there, low, high, total, squares = launched[:, :8].unbind(1)
    low, high = (one.where(one.isfinite(), torch.nan) for one in (low, high))  # infinite where no value is finite
    empty = torch.full_like(there, _UNCOUNTED) if counts is None else to_device(counts, there.device) - there
    return torch.stack([nan, above + below, empty, low, high, total, squares.sqrt()], 1)


def _fused(values: list[Tensor], *, zeros: bool) -> Tensor:
    if (launched := _launched(values, zeros=zeros)) is not None:
        return launched
    wide = torch.float64 if values[0].device.type in _WIDE_DEVICES else torch.float32
    nothing = [i for i, value in enumerate(values) if not value.numel()]
    full = [value.float() if value.dtype not in _PLAIN else value for value in values if value.numel()]
    result = torch.zeros(len(values), len(COLUMNS), dtype=wide, device=values[0].device)
    if full:
        # a float16 norm would overflow where no value does; one that is float64 keeps its range
        double = [i for i, value in enumerate(full) if value.dtype == torch.float64]
        norms = torch._foreach_norm(full, 2, dtype=torch.float64 if len(double) == len(full) else torch.float32)
        extremes = [value.aminmax() for value in full]
        count = torch.full((len(full),), _UNCOUNTED, dtype=wide, device=values[0].device)
        if zeros:
            count = torch.stack([(value == 0).sum() for value in full]).to(wide)
        columns = [
            torch.stack([value.isnan().sum() for value in full]),
            torch.stack([value.isinf().sum() for value in full]),
            count,
            torch.stack([low.to(wide) for low, _ in extremes]),
            torch.stack([high.to(wide) for _, high in extremes]),
            torch.stack([value.sum(dtype=wide) for value in full]),
            torch.stack(norms),
        ]
        table = torch.stack([column.to(wide) for column in columns], 1)
        # of the finite ones nothing is known where one is not: to look again would be to wait
        table[:, 3:] = table[:, 3:].where((table[:, :2].sum(1, keepdim=True) == 0), torch.nan)
        if not nothing:
            return table
        result[[i for i, value in enumerate(values) if value.numel()]] = table
    for index in nothing:
        result[index, 3:5] = torch.nan
    return result
