"""How close operators come to the ends of a narrow dtype: overflow seen coming, saturation, underflow.

Looks at float16, bfloat16 and float8 results on sampled steps, on their device, and reads all of it at once when the step is
complete. Where a device saturates (``INF_NAN_MODE_ENABLE=0``), an overflow leaves no Inf behind but the dtype's largest
number; that, and a result near it from ordinary inputs, counts as an overflow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bitwitness.finding import Finding, Severity
from bitwitness.nonfinite.dtypes import dtype_name, wider
from bitwitness.nonfinite.flags import measurable
from bitwitness.nonfinite.messages import SENSOR
from bitwitness.nonfinite.taint import Key, key_of
from bitwitness.nonfinite.watch import watched
from bitwitness.site import Site
from bitwitness.stats.local import local_values
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.frames import Line, current_line, line_text
from bitwitness.tap.operators import OpCall, tensors_in
from bitwitness.tap.turns import Turns, is_small

_SAMPLE = 1024  # elements of each result whose size is looked at one by one
_RISING = 0.125  # of the largest number: from here on a rise is told
_RISE = 4.0  # times what it was on the first sampled step
_RISES = 3  # sampled steps over which it must have risen
_IDLE_AFTER = 3  # sampled steps without any narrow result
_WIDE_RANGE = 1e38
"""Largest number from which a dtype has float32's range: what comes near its end does so slowly, or everywhere."""
_TURNS = 4
"""Of operators with such results one in so many is measured on a sampled step, by turns."""
_APART = 8
"""Steps between two on which any large one is: to read a result takes a good part of the time that it takes to make it."""
_CASTS = ("_to_copy", "copy_")


def narrow(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's dtype has fewer bits than float32."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


@dataclass(slots=True)
class _NarrowResult:
    """One narrow result of the step that is sampled."""

    site: Site
    dtype: torch.dtype
    line: Line
    inputs: list[int]


@dataclass(slots=True)
class OperatorClass:
    """What was seen of one operator in one dtype, over all sampled steps.

    ``largest``: share of the dtype's maximum that its results came to, by sampled step; ``where`` it was largest last;
    ``subnormal`` and ``underflow``: shares of the sampled results (zeros that were none before a cast).
    """

    largest: list[tuple[int, float]] = field(default_factory=list)
    where: str = ""
    subnormal: float = 0.0
    underflow: float = 0.0


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies anywhere: the zeros that forward-mode differentiation makes do not."""
    return type(tensor) is not torch.Tensor or tensor.data_ptr() != 0


class ApproachSensor:
    """Measures narrow results while its tap is on, and tells what is near the end of its range.

    Parameters
    ----------
    extreme
        Share of the largest number from which a finite result counts as an overflow.

    """

    def __init__(self, extreme: float) -> None:
        self._extreme = extreme
        self._seen: list[_NarrowResult] = []
        self._sizes: list[torch.Tensor] = []
        self._known: dict[int, dict[Key, int]] = {}
        self._said: set[tuple[str, str]] = set()
        self._idle = 0
        self._small, self._large = Turns(), Turns()
        self._latest: int | None = None
        self._large_due, self._large_since = True, 0
        self.classes: dict[tuple[str, str], OperatorClass] = {}

    @property
    def resting(self) -> bool:
        """Whether nothing narrow was seen for so long that it is not worth looking."""
        return self._idle >= _IDLE_AFTER

    def select(self, func: OpOverload) -> bool:
        """Tell whether an operator's results are looked at."""
        return not self.resting and watched(func)

    def __call__(self, call: OpCall) -> None:
        """Measure one operator's narrow results; nothing waits."""
        made = [t for t in call.outputs if measurable(t) and _has_memory(t)]
        used = tensors_in([*call.args, *call.kwargs.values()]) if any(map(narrow, made)) else ()
        given = [t for t in used if measurable(t) and _has_memory(t)]
        small = is_small([*made, *given])
        outputs = [t for t in made if narrow(t) and self._has_turn(t, small)] if "empty" not in call.op else []
        outputs = [t for t in outputs if not self._is_the_scripts(call, t)]
        given = given if outputs else []
        wide = next((t for t in given if not narrow(t)), None) if call.op in _CASTS else None
        inputs = [self._index(t, call) for t in given if narrow(t) or t is wide]
        for tensor in made:  # what was known of this memory is gone
            self._known.pop(tensor.untyped_storage().data_ptr(), None)
        line = current_line() if call.phase == "forward" else ("", 0, "")
        for position, tensor in enumerate(outputs):
            self._measure(tensor, _NarrowResult(call.site(f"out{position}"), tensor.dtype, line, inputs), wide)

    def _is_the_scripts(self, call: OpCall, result: torch.Tensor) -> bool:
        """Tell whether the script itself gives a number near the dtype's end, or all of them: a mask's, for one."""
        given = [*call.args, *call.kwargs.values()]
        end = self._extreme * torch.finfo(result.dtype).max
        return not tensors_in(given) or any(isinstance(value, int | float) and abs(value) >= end for value in given)

    def _has_turn(self, tensor: torch.Tensor, small: bool) -> bool:
        if torch.finfo(tensor.dtype).max < _WIDE_RANGE:
            return True
        if small:
            return self._small.has_one(_TURNS)
        return self._large_due and self._large.has_one(_TURNS)

    def _index(self, tensor: torch.Tensor, call: OpCall) -> int:
        key = key_of(tensor)
        known = self._known.get(key[0], {}).get(key)
        if known is None:
            self._measure(tensor, _NarrowResult(call.site("in0"), tensor.dtype, ("", 0, ""), []), None)
            known = len(self._seen) - 1
        return known

    def _measure(self, tensor: torch.Tensor, seen: _NarrowResult, wide: torch.Tensor | None) -> None:
        values = local_values(tensor.detach())
        sample = _sampled(values).float().abs()
        if values.dtype.itemsize == 1:
            values = values.float()
        low, high = torch.aminmax(values)
        tiny = torch.finfo(tensor.dtype).tiny
        subnormal = ((sample > 0) & (sample < tiny)).float().mean()
        lost = torch.zeros_like(subnormal)
        if wide is not None and wide.numel() == tensor.numel():
            lost = ((_sampled(wide.detach()) != 0) & (sample == 0)).float().mean()
        key = key_of(tensor)
        self._known.setdefault(key[0], {})[key] = len(self._seen)
        self._seen.append(seen)
        self._sizes.append(torch.stack([torch.maximum(high.float(), -low.float()), subnormal, lost]))

    # -- the end of a step ---------------------------------------------------------------------------------------

    def drain(self, step: int, rank: int, *, scaled: bool) -> list[Finding]:
        """Return what the sampled step showed; waits for the device once. ``scaled``: gradients carry a loss scale."""
        seen, sizes = self._seen, self._sizes
        self._seen, self._sizes, self._known = [], [], {}
        self._idle = 0 if seen else self._idle + self._large_due
        self._next_turns(step)
        if not seen:
            return []
        rows = torch.stack([size.to(sizes[0].device) for size in sizes]).tolist()
        shares = [row[0] / torch.finfo(one.dtype).max for one, row in zip(seen, rows, strict=True)]
        findings = []
        made: dict[tuple[str, str], list[int]] = {}
        for number, one in enumerate(seen):
            if not one.site.slot.startswith("out") or (scaled and one.site.phase == "backward"):
                continue
            made.setdefault((one.site.op, dtype_name(one.dtype)), []).append(number)
            finding = self._overflow(one, rows[number][0], [rows[i][0] for i in one.inputs])
            if finding is not None:
                message, evidence = finding
                site = one.site.at(rank=rank, step=step)
                findings.append(Finding(SENSOR, site, Severity.WARNING, message, evidence, step, rank))
        for key, numbers in made.items():
            findings += self._rise(key, numbers, seen, shares, rows, step, rank)
        return findings

    def _next_turns(self, step: int) -> None:
        """Let others have their turn; large ones on the next step, if it is as far on as this one was from the last."""
        pace = _APART if self._latest is None else max(1, step - self._latest)
        self._latest = step
        self._small.next_step()
        if self._large_due:
            self._large.next_step()
        self._large_since = pace if self._large_due else self._large_since + pace
        self._large_due = self._large_since >= _APART

    def _once(self, kind: str, one: _NarrowResult) -> bool:
        key = (kind, f"{one.site.module}/{one.site.op}")
        new = key not in self._said
        self._said.add(key)
        return new

    def _overflow(self, one: _NarrowResult, value: float, inputs: list[float]) -> tuple[str, Mapping[str, Any]] | None:
        """Tell of a result at or near the largest number, from inputs that are not."""
        most = torch.finfo(one.dtype).max
        share, full = value / most, value == most
        if not math.isfinite(share) or share < self._extreme or not all(math.isfinite(size) for size in inputs):
            return None
        # A cast of something larger saturates, too; what was at the largest number before does not begin here.
        if any(size == most for size in inputs) or (not full and any(size >= self._extreme * most for size in inputs)):
            return None
        if not self._once("saturated" if full else "extreme", one):
            return None
        name = dtype_name(one.dtype)
        what = "is saturated at" if full else "comes close to"
        where = f"module {one.site.module}, {line_text(one.line) or 'no line of yours'}"
        message = (
            f"{one.site.op} ({one.site.phase}) {what} {name}'s largest number: {value:.6g} of {most:.6g}, from ordinary "
            f"inputs; {where}. To do: {_advice(one.dtype)}"
        )
        kind = "saturated" if full else "extreme"
        return message, {"kind": kind, "value": value, "share": share, "line": line_text(one.line), "dtype": name}

    def _rise(
        self,
        key: tuple[str, str],
        numbers: list[int],
        seen: list[_NarrowResult],
        shares: list[float],
        rows: list[list[float]],
        step: int,
        rank: int,
    ) -> list[Finding]:
        """Take a step into an operator class's history; tell of a rise that leads to an overflow."""
        known = self.classes.setdefault(key, OperatorClass())
        top = max(numbers, key=lambda i: shares[i] if math.isfinite(shares[i]) else 0.0)
        known.largest = [*known.largest[-63:], (step, shares[top])]  # 64 points: a slope needs no more
        known.where = seen[top].site.short
        known.subnormal = sum(rows[i][1] for i in numbers) / len(numbers)
        known.underflow = sum(rows[i][2] for i in numbers) / len(numbers)
        history = [share for _, share in known.largest[-_RISES:]]
        first, last = known.largest[0][1], shares[top]
        rising = len(history) == _RISES and all(a < b for a, b in itertools.pairwise(history))
        rising &= math.isfinite(last) and last >= _RISING and first > 0 and last >= _RISE * first
        if not rising or last >= self._extreme or not self._once("rising", seen[top]):
            return []
        pace = math.log2(last / first) / max(1, step - known.largest[0][0])
        left = round(-math.log2(last) / pace)
        message = (
            f"{key[0]} comes to {last:.0%} of {key[1]}'s largest number in module {seen[top].site.module}, {last / first:.3g} "
            f"times what it was at step {known.largest[0][0]}; at this pace it overflows in about {left} steps"
        )
        site = seen[top].site.at(rank=rank, step=step)
        evidence = {
            "kind": "approach",
            "share": last,
            "since": known.largest[0][0],
            "steps_left": left,
            "dtype": key[1],
        }
        return [Finding(SENSOR, site, Severity.WARNING, message, evidence, step, rank)]

    def table(self) -> list[dict[str, Any]]:
        """Return what was seen of each operator class, those closest to their dtype's end first; ready for JSON."""
        rows = [
            {
                "op": op,
                "dtype": dtype,
                "share_of_maximum": max((share for _, share in known.largest if math.isfinite(share)), default=0.0),
                "where": known.where,
                "subnormal": known.subnormal,
                "underflow": known.underflow,
            }
            for (op, dtype), known in self.classes.items()
        ]
        return sorted(rows, key=lambda row: -float(str(row["share_of_maximum"])))


def _sampled(values: torch.Tensor) -> torch.Tensor:
    """Return some `_SAMPLE` elements, the same ones of tensors of one shape, and copy no others whatever the strides."""
    every = max(1, values.numel() // _SAMPLE)
    if values.is_contiguous():
        return values.reshape(-1)[::every]
    places = torch.arange(0, values.numel(), every, device=values.device)
    return values[torch.unravel_index(places, values.shape)]


def _advice(dtype: torch.dtype) -> str:
    """Name the dtypes that would help; bfloat16's range is float32's already."""
    names = [name for name in wider(dtype) if name != "float64"]
    first = f"run this operator in a wider dtype ({' or '.join(names)}), or " if names else ""
    return f"{first}make its inputs smaller"
