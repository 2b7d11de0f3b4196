"""The `collective` sensor: on deep steps, what each collective gave to this rank, against what the ranks put in.

all-reduce        the same bits on all ranks, and sums conserved within rounding (`sense.conserved`); MAX and MIN not below
                  (above) what a rank gave
broadcast         the same bits on all ranks, and on the one that sent as before
all-gather        the same bits on all ranks, and each rank's own piece as it was sent
reduce-scatter    sums conserved within rounding, piece by piece
all-to-all        every piece as it was sent, by its hash

This file notes words of each call, on its device; `sense.exchanged` compares them once, when the step's gradients are complete.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitwitness.sense.conserved import Projector, bits_of, may_overflow, piece_length, same_integers, sums, tolerance
from bitwitness.sense.selftest import self_test
from bitwitness.stats import bit_hash
from bitwitness.stats.digest import joined
from bitwitness.tap.exchange import Exchange

_SUMS = ("sum", "avg")
_KEPT_EACH, _KEPT_ALL = 16 << 20, 64 << 20  # bytes of what went in and came out, kept to name the element that is wrong


@dataclass(slots=True, eq=False)
class Noted:
    """What was noted of one call, without its tensors.

    ``word``: int64 0-d, what must be equal on all members, if anything; ``given_ints`` and ``given_floats``: this rank's share
    of what must add up; ``got``: what it must add up to, from ``at`` on; ``own``: hashes that must be equal here;
    ``kept``: what went in and came out.
    """

    op: str
    group: tuple[int, ...]
    rank: int
    index: int
    reduction: str = ""
    dtype: torch.dtype = torch.float32
    numel: int = 0
    length: int = 0
    root: int = -1
    word: Tensor | None = None
    given_ints: Tensor | None = None
    given_floats: Tensor | None = None
    squares: Tensor | None = None
    got: Tensor | None = None
    at: int = 0
    own: list[Tensor] = field(default_factory=list)
    kept: tuple[Tensor, ...] = ()
    over: bool = False

    @property
    def signature(self) -> str:
        """What is the same on all members of one and the same call."""
        alike = self.op in ("all_reduce", "broadcast", "reduce_scatter")
        return f"{self.op} {self.reduction} {self.root} {self.dtype} {self.numel if alike else ''}"

    @property
    def sends(self) -> bool:
        """Whether it is this rank's that a broadcast gives to all."""
        return self.op == "broadcast" and self.root == self.rank

    @property
    def ints(self) -> int:
        """How many integers must add up."""
        return 0 if self.given_ints is None else self.given_ints.numel()

    @property
    def floats(self) -> int:
        """How many floating numbers must add up, and as many squares."""
        return 0 if self.given_floats is None else self.given_floats.numel()

    def wrong(self, ints: Tensor, floats: Tensor, squares: Tensor) -> int:
        """Return which sum over the ranks this rank's result contradicts, counted from 1; 0 for none.

        ``ints`` int64 [ints], ``floats`` and ``squares`` float64 [floats]: summed over the ranks.
        """
        if len(self.own) == 2 and not torch.equal(*self.own):
            return 1
        if self.got is None:
            return 0
        size, part = len(self.group), slice(self.at, self.at + self.got.numel())
        if self.ints:
            bits = bits_of(self.dtype) if self.reduction else 64
            return int(not same_integers(self.got, ints[part], bits))
        exact = floats[part] / (size if self.reduction == "avg" else 1)
        allowed = tolerance(squares[part], size, self.length, self.dtype)
        bad = ~((self.got - exact).abs() <= allowed) & ~may_overflow(squares[part], size, self.dtype)
        return int(bad.nonzero()[0]) + 1 if bool(bad.any()) else 0


class CollectiveSensor:
    """Handlers for `tap.exchanges.ExchangeTap`; `drain` gives what they noted."""

    def __init__(self) -> None:
        self._projector = Projector()
        self._noted: list[Noted] = []
        self._kept = 0
        self.seen: Counter[str] = Counter()
        """Collectives that were noted, by what they are."""

    def began(self, exchange: Exchange) -> None:
        """Note what this rank puts in."""
        first = exchange.sent[0] if exchange.sent else torch.empty(0)
        noted = Noted(exchange.op, exchange.group, exchange.rank, exchange.index, exchange.reduction)
        noted.dtype, noted.numel, noted.root = first.dtype, sum(t.numel() for t in exchange.sent), exchange.root
        exchange.noted["words"] = noted
        self._noted.append(noted)
        self.seen[exchange.op] += 1
        if exchange.op == "all_gather":
            noted.own.append(bit_hash(first))
        elif exchange.op == "all_to_all":
            pieces = _pieces(exchange.sent, len(exchange.group), exchange.sizes_sent)
            noted.given_ints = torch.stack([bit_hash(piece) * (2 * noted.rank + 3) for piece in pieces])
        elif exchange.op == "all_reduce":
            self._give(noted, [first])
        elif exchange.op == "reduce_scatter":
            self._give(noted, _pieces(exchange.sent, len(exchange.group)))
        elif noted.sends:
            noted.own.append(_word(exchange.sent))

    def _give(self, noted: Noted, tensors: list[Tensor]) -> None:
        """Note the sums of what enters a reduction: of one tensor by pieces, of several by tensor."""
        if noted.reduction not in _SUMS or not sums(noted.dtype) or not noted.numel:
            if noted.reduction in ("max", "min") and len(tensors) == 1:
                self._keep(noted, tensors[0])
            return
        longest = max(t.numel() for t in tensors)
        noted.length = piece_length(longest) if len(tensors) == 1 else longest
        if not noted.dtype.is_floating_point:
            noted.given_ints = torch.cat([self._projector.project(t, noted.length) for t in tensors])
            return
        pairs = [self._projector.project_and_square(t, noted.length) for t in tensors]
        noted.given_floats = torch.cat([one for one, _ in pairs])
        noted.squares = torch.cat([one for _, one in pairs])
        if len(tensors) == 1:
            self._keep(noted, tensors[0])

    def _keep(self, noted: Noted, tensor: Tensor) -> None:
        size = 2 * tensor.nbytes
        if size <= _KEPT_EACH and self._kept + size <= _KEPT_ALL:
            self._kept += size
            noted.kept = (tensor.detach().reshape(-1).clone(),)

    def ended(self, exchange: Exchange) -> None:
        """Note what this rank received."""
        noted: Noted = exchange.noted["words"]
        received, size = exchange.received, len(exchange.group)
        if exchange.op in ("all_reduce", "broadcast", "all_gather"):
            noted.word = _word(received)
        if noted.word is not None and noted.sends:
            noted.own.append(noted.word)
        if exchange.op == "all_gather":
            noted.own.append(bit_hash(_pieces(received, size)[noted.rank]))
        elif exchange.op == "all_to_all":
            hashes = [bit_hash(piece) for piece in _pieces(received, size, exchange.sizes_received)]
            noted.got = torch.stack([one * (2 * k + 3) for k, one in enumerate(hashes)]).sum().reshape(1)
            noted.at = noted.rank
        elif noted.given_ints is not None or noted.given_floats is not None:
            noted.got = self._projector.project(received[0], noted.length)
            noted.at = noted.rank if exchange.op == "reduce_scatter" else 0
        if noted.kept:
            noted.kept = (*noted.kept, received[0].detach().reshape(-1).clone())
            if noted.reduction in ("max", "min"):
                before, after = noted.kept
                beyond = (after < before) if noted.reduction == "max" else (after > before)
                hit = beyond.any()
                noted.own = [hit, torch.zeros_like(hit)]
                noted.kept = ()
        noted.over = True

    def drain(self) -> list[Noted]:
        """Return what was noted since the last time, on the host; waits for each device."""
        noted, self._noted, self._kept = self._noted, [], 0
        for call in noted:
            for name in ("word", "given_ints", "given_floats", "squares", "got"):
                value = getattr(call, name)
                if value is not None:
                    setattr(call, name, value.cpu())
            call.own = [value.cpu() for value in call.own]
        return noted


def _word(tensors: list[Tensor]) -> Tensor:
    """Return what is equal where all tensors have the same bits (int64 0-d, on their device)."""
    return bit_hash(tensors[0]) if len(tensors) == 1 else joined([bit_hash(tensor) for tensor in tensors])


def _pieces(tensors: list[Tensor], size: int, rows: list[int] | None = None) -> list[Tensor]:
    """Return one tensor for each rank of a group."""
    if len(tensors) == size and not rows:
        return tensors
    whole = tensors[0]
    if rows:
        return list(whole.split(rows))
    return list(whole.reshape(-1).split(max(1, whole.numel() // size)))[:size] if whole.numel() else [whole] * size


def described(noted: Noted) -> dict[str, Any]:
    """Return what a call was, for people and for JSON."""
    return {
        "op": noted.op,
        "reduction": noted.reduction,
        "group": list(noted.group),
        "call": noted.index,
        "dtype": str(noted.dtype).removeprefix("torch."),
        "elements": noted.numel,
    } | ({"root": noted.group[noted.root]} if noted.root >= 0 else {})


@self_test("collective", "what a collective gave a rank that the ranks did not put in, on deep steps")
def _proof() -> str:
    given = [torch.linspace(start, start + 1.0, 100, dtype=torch.float32) for start in (-1.0, 2.0)]

    def wrong(received: Tensor) -> int:
        sensors = [CollectiveSensor(), CollectiveSensor()]
        for rank, sensor in enumerate(sensors):
            exchange = Exchange("all_reduce", (0, 1), rank, 0, [given[rank]], [received], "sum")
            sensor.began(exchange)
            sensor.ended(exchange)
        mine, other = (sensor.drain()[0] for sensor in sensors)
        assert mine.given_floats is not None and other.given_floats is not None  # noqa: S101, PT018
        assert mine.squares is not None and other.squares is not None  # noqa: S101, PT018
        floats, squares = mine.given_floats + other.given_floats, mine.squares + other.squares
        return mine.wrong(torch.zeros(0, dtype=torch.int64), floats, squares)

    total = given[0] + given[1]
    if wrong(total):
        return "false alarm on a right sum"
    total[17] += 0.5
    return "" if wrong(total) else "did not see a wrong sum"
