"""The sensor ``optimizer``: a step recomputed for a share of the parameters, by turns, and bounds on what optimizers keep.

Two executions of one code on the same numbers are equal, but for last bits where a part begins or ends elsewhere.
Where it is not, the step is recomputed twice more and in float64, which tell whether the training's own was wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from bitwitness.finding import Finding, Severity
from bitwitness.sense.held import Name
from bitwitness.sense.optimizerbounds import out_of_bounds
from bitwitness.sense.optimizertwin import Piece, piece_of, stepped, unfit
from bitwitness.stats.local import local_parts

_SHARE = 16  # one in so many elements is recomputed, which costs about an eighth of the optimizer's step
_MOST, _LEAST = 1 << 20, 1 << 12  # elements
_PIECES = 32
_PROVEN = 2  # checks that came out equal before one that does not is believed
_ROUNDINGS = 16.0  # units in the last place, of all that enters: another kernel at a part's edges
_OF_UPDATE = 1e-3
_FLOAT64_SLACK = 64.0, 1e-2  # the same, of a step in float64: a step in float32 rounds some ten times


@dataclass(slots=True)
class _Turn:
    """Where the next check of an optimizer begins, and how many came out equal."""

    parameter: int = 0
    element: int = 0
    equal: int = 0


@dataclass(slots=True)
class _Wrong:
    piece: Piece
    key: str
    element: int
    numbers: dict[str, float] = field(default_factory=dict)


class OptimizerSensor:
    """Recomputes optimizers' steps on one rank."""

    name = "optimizer"

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        """Why steps could not be recomputed, and how many."""
        self.steps = self.elements = self.of = 0
        """Steps that were recomputed, the elements, and of how many in these steps."""
        self.equal = self.near = 0
        """Pieces that came out bit by bit, or within rounding."""
        self.notes: list[str] = []
        """What is to be said and proves nothing; to be taken."""
        self._turns = WeakIdKeyDictionary()
        self._pieces: tuple[Optimizer, list[Piece]] | None = None

    def before(self, optimizer: Optimizer) -> None:
        """Keep the numbers that the next share of an optimizer's step starts from."""
        self._pieces = None
        if reason := unfit(optimizer):
            self.left_out[reason] += 1
            return
        pieces = self._next(optimizer)
        if pieces:
            self._pieces = optimizer, pieces

    def after(self, optimizer: Optimizer, names: dict[int, str], step: int, rank: int) -> list[Finding]:
        """Recompute the step; return what is proven wrong. ``names``: of parameters, by identity."""
        kept, self._pieces = self._pieces, None
        if kept is None or kept[0] is not optimizer:
            return []
        pieces = kept[1]
        try:
            again = stepped(optimizer, pieces)
        except Exception as error:
            self.left_out[f"{type(optimizer).__name__} cannot be run again: {type(error).__name__}: {error}"] += 1
            return []
        self.steps += 1
        self.elements += sum(len(piece.value) for piece in pieces)
        wrong = self._compare(optimizer, pieces, again)
        turn: _Turn = self._turns[optimizer]
        if wrong is None:
            turn.equal += 1
            return self._bounds(optimizer, pieces, names, step, rank)
        return self._question(optimizer, pieces, again, wrong, turn.equal, names, step, rank)

    def _next(self, optimizer: Optimizer) -> list[Piece]:
        """Return the pieces whose turn it is."""
        every = [(p, number) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
        lengths = [local_parts(p.detach())[0].numel() for p, _ in every]
        total = sum(lengths)
        self.of += total
        left = min(_MOST, max(_LEAST, total // _SHARE))
        turn = self._turns.setdefault(optimizer, _Turn())
        pieces: list[Piece] = []
        for _ in range(min(len(every), 4 * _PIECES)):
            turn.parameter %= len(every)
            (parameter, group), length = every[turn.parameter], lengths[turn.parameter]
            start, end = turn.element, min(length, turn.element + left)
            if end > start and (piece := piece_of(optimizer, parameter, group, start, end)) is not None:
                pieces.append(piece)
                left -= end - start
            turn.element = end
            if turn.element >= length:
                turn.parameter, turn.element = turn.parameter + 1, 0
            if left <= 0 or len(pieces) >= _PIECES:
                break
        return pieces

    def _compare(
        self, optimizer: Optimizer, pieces: list[Piece], again: list[dict[str, torch.Tensor]]
    ) -> _Wrong | None:
        """Return the first number that is further from its recomputation than rounding; waits for the device."""
        for piece, made in zip(pieces, again, strict=True):
            there = {key: piece.now(key, optimizer) for key in made}
            pairs = {key: (now, made[key]) for key, now in there.items() if now is not None}
            if all(torch.equal(now.view(-1), then.view(-1)) for now, then in pairs.values()):
                self.equal += 1
                continue
            for key, (now, then) in pairs.items():
                far = _far(now, then, _before(piece, key, then), _ROUNDINGS, _OF_UPDATE)
                if bool(far.any()):
                    return _Wrong(piece, key, int(far.nonzero()[0]))
            self.near += 1
        return None

    def _question(
        self,
        optimizer: Optimizer,
        pieces: list[Piece],
        again: list[dict[str, torch.Tensor]],
        wrong: _Wrong,
        equal: int,
        names: dict[int, str],
        step: int,
        rank: int,
    ) -> list[Finding]:
        """Tell by two more recomputations and one in float64 whether the training's own step was wrong."""
        place = pieces.index(wrong.piece)
        others = [stepped(optimizer, pieces)[place][wrong.key] for _ in range(2)]
        then = again[place][wrong.key]
        exact = stepped(optimizer, [wrong.piece], exact=True)[0][wrong.key].reshape(-1)
        now = wrong.piece.now(wrong.key, optimizer)
        assert now is not None  # noqa: S101 - it was there a moment ago
        here, old = (
            value.reshape(-1)[wrong.element : wrong.element + 1].cpu()
            for value in (now, _before(wrong.piece, wrong.key, then))
        )
        made = then.reshape(-1)[wrong.element : wrong.element + 1].cpu()
        truth = exact[wrong.element : wrong.element + 1]
        eps = torch.finfo(now.dtype).eps if now.is_floating_point() else 0.0
        agree = all(torch.equal(then, other) for other in others)
        right = not bool(_far(made.double(), truth, old.double(), *_FLOAT64_SLACK, eps=eps).any())
        off = bool(_far(here.double(), truth, old.double(), *_FLOAT64_SLACK, eps=eps).any())
        name = Name(names.get(id(wrong.piece.parameter), "(unknown)"), wrong.key)
        element = _index(wrong.piece, wrong.element)
        numbers = {"stepped_to": here.item(), "recomputed": made.item(), "float64": truth.item(), "from": old.item()}
        what = f"the step of {type(optimizer).__name__} left {here.item():.9g} in {name}, element {element}"
        if not (agree and right and off and equal >= _PROVEN):
            why = (
                "these differ"
                if not agree
                else "float64 does not settle it"
                if equal >= _PROVEN
                else "none had agreed before"
            )
            self.notes.append(f"optimizer: inconclusive: {what}, and a recomputation gives {made.item():.9g}; {why}")
            return []
        message = f"{what}, where three recomputations from the same numbers give {made.item():.9g}"
        evidence: dict[str, Any] = {"element": element, **numbers, "checks_equal_before": equal}
        return [Finding(self.name, name.site.at(rank=rank, step=step), Severity.ERROR, message, evidence, step, rank)]

    def _bounds(
        self, optimizer: Optimizer, pieces: list[Piece], names: dict[int, str], step: int, rank: int
    ) -> list[Finding]:
        found = []
        for piece in pieces:
            state = {key: piece.now(key, optimizer) for key in ("exp_avg", "exp_avg_sq")}
            told = out_of_bounds(state["exp_avg"], state["exp_avg_sq"], optimizer.param_groups[piece.group])
            if told is not None:
                key, what = told
                name = Name(names.get(id(piece.parameter), "(unknown)"), key)
                site = name.site.at(rank=rank, step=step)
                found.append(Finding(self.name, site, Severity.WARNING, f"{name}: {what}", {}, step, rank))
        return found


def _before(piece: Piece, key: str, like: torch.Tensor) -> torch.Tensor:
    """Return what was there before the step; zeros of what was not."""
    value = piece.value if not key else piece.state.get(key)
    return value if isinstance(value, torch.Tensor) else torch.zeros_like(like)


def _far(
    now: torch.Tensor, then: torch.Tensor, old: torch.Tensor, roundings: float, share: float, eps: float | None = None
) -> torch.Tensor:
    """Return which elements are further apart than rounding; bool [N]. NaN beside a number is far, beside NaN not."""
    if not now.is_floating_point():
        return (now != then).reshape(-1)
    eps = torch.finfo(now.dtype).eps if eps is None else eps
    a, b, c = (x.double().reshape(-1) for x in (now, then, old))
    allowed = roundings * eps * (b.abs() + c.abs()) + share * (b - c).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(same | ((a - b).abs() <= allowed))


def _index(piece: Piece, element: int) -> list[int]:
    shape = tuple(local_parts(piece.parameter.detach())[0].shape)
    return [int(i) for i in torch.unravel_index(torch.tensor(piece.start + element), shape)] if shape else []
