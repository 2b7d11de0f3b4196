"""Faults in a training of one process: each trial is a fork of a guarded training that has settled, and is thrown away.

What a fork starts from is the same for all trials of one *stand* of the training; a fork without a fault says what its
gradients, its update and its weights some steps later would have been.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from detection.apart import flat, forked, relative_error, unwatched
from detection.collect import HARMFUL
from detection.faults import survey
from detection.persistent import LIMIT
from detection.subjects import CONTEXT, TEXT
from torch import nn

from bitwitness import Finding, Guard, Note, TrainingStopped
from bitwitness.demo.model import batch
from bitwitness.stats.digest import bit_hashes
from bitwitness.testing import FaultyDevice
from corruption.cells import WATCHFUL, Cell
from corruption.heard import listen
from corruption.references import CHECKSUM, References, is_product, their_checksum
from corruption.strikes import COMPUTED, STATE, as_fault, draw, strike_state

_SETTLED = 40
_AFTER = 3  # steps of a trial whose fault does no harm, or is over
_MORE = 9  # steps after a first suspicion: a lone flipped bit is proven by eight quiet ones
_STAND = 12  # trials that start from the same weights
_DEADLINE = 120  # seconds a trial may take


class Training:
    """One guarded training, with the reference schemes beside it."""

    def __init__(self, cell: Cell, mode: str, seed: int) -> None:
        torch.manual_seed(seed)
        subject = self.subject = cell.subject
        self.model = subject.model()
        self.optimizer = subject.optimizer(list(self.model.parameters()))
        self.generator = torch.Generator().manual_seed(seed)
        self.text = TEXT(1 << 20)
        self.steps = 0
        self.references = References(self.model)
        self.references.__enter__()
        self.guard = Guard(self.model, self.optimizer, act="protect", self_test=False, **settings(mode)).start()
        assert self.guard.reporter is not None
        self.guard.reporter.say = lambda _text: None  # type: ignore[method-assign]

    def loss(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Run a forward on a new batch."""
        with self.subject.precision():
            value: torch.Tensor = self.model(*batch(self.text, generator or self.generator, self.subject.size, CONTEXT))
        return value

    def backward(self, around: AbstractContextManager[Any] | None = None) -> tuple[list[torch.Tensor], float]:
        """Run a forward and a backward, the latter inside ``around``; return copies of the gradients, and the loss."""
        loss = self.loss()
        with around or nullcontext():
            loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self.model.parameters()]
        return grads, float(loss.detach())

    def finish(self) -> None:
        """Use the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.subject.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def step(self, around: AbstractContextManager[Any] | None = None) -> tuple[list[torch.Tensor], list[str]]:
        """Train a step; return its gradients, and which reference schemes spoke."""
        grads, loss = self.backward(around)
        told = self.references.ask(self.steps, grads, loss)
        self.finish()
        return grads, told

    def flat(self) -> torch.Tensor:
        """Return all parameters as one float64 vector."""
        return flat(self.model.parameters())

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Compute something that is none of the training's."""
        with unwatched(self.guard, self.model, self.optimizer, self.generator):
            yield
            self.references.forget()

    def digest(self) -> list[int]:
        """Return the bits of parameters and buffers, hashed."""
        held = [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]
        return bit_hashes(held).tolist()  # type: ignore[no-any-return]


def settings(mode: str) -> dict[str, Any]:
    """Return the guard's settings: everything on every step, or the defaults."""
    return {"deep_every": 1} if mode == WATCHFUL else {}


def clean(training: Training) -> dict[str, Any]:
    """Train on without a fault: the first step's gradient and update, and the bits after some steps."""
    before = training.flat()
    grads, _ = training.step()
    update = training.flat() - before
    for _ in range(_AFTER - 1):
        training.step()
    return {"gradient": flat(grads), "update": update, "digest": training.digest()}


def trial(training: Training, drawn: dict[str, Any], seed: int, expected: dict[str, Any]) -> dict[str, Any]:
    """Train on with a fault, in a process that is thrown away."""
    found: dict[str, Any] = {"harm": 0.0, "struck": False, "steps": None, "as_clean": None, "references": {}}
    findings: list[Finding | Note] = []
    reporter = training.guard.reporter
    assert reporter is not None
    listen(training.guard, findings.append)
    reporter.verdicts.clear()
    if is_product(drawn):
        with training.unwatched():
            fault = as_fault(drawn, site=drawn["where"])
            if their_checksum(training.model, training.loss, fault, seed):
                found["references"][CHECKSUM] = 1
    faults = [as_fault(drawn, site=drawn["where"])] if drawn["place"] in COMPUTED else []
    device, recomputed = FaultyDevice(faults, seed=seed, model=training.model), drawn["place"] == "recomputed"
    if drawn["place"] in STATE:
        found["struck"] = strike_state(training.model, training.optimizer, drawn, seed)
    before, began = training.flat(), training.steps
    limit, step = _AFTER, 0
    try:
        with nullcontext() if recomputed else device:
            while step < limit:
                step += 1
                grads, loss = training.backward(device if recomputed and step == 1 else None)
                if step == 1:  # at once: a step that is stopped at has no end
                    found["harm"] = relative_error(expected["gradient"], flat(grads))
                for name in training.references.ask(training.steps, grads, loss):
                    found["references"].setdefault(name, step)
                training.finish()
                if step == 1:
                    limit = _limit(training, drawn, before, expected, found)
                if findings and found["steps"] is None:
                    found["steps"] = step
                    limit = min(limit, step + _MORE)
    except TrainingStopped:
        found["steps"] = found["steps"] or step
    found["struck"] |= any(firing.changed for firing in device.fired)
    found["as_clean"] = training.steps - began == _AFTER and training.digest() == expected["digest"]
    told_of = [f"{said.site}: {said.message}" for said in findings]
    found["sensors"] = sorted({finding.sensor for finding in findings})
    found["verdicts"] = [
        {"cause": str(v.cause), "ranks": list(v.ranks), "action": str(v.action), "why": v.message}
        for v in reporter.verdicts
    ]
    found["named"] = any(_where(drawn) in text for text in [*told_of, *(v["why"] for v in found["verdicts"])])
    return found


def _limit(
    training: Training, drawn: dict[str, Any], before: torch.Tensor, expected: dict[str, Any], found: dict[str, Any]
) -> int:
    """Return how many steps a trial lasts; of a struck optimizer state the harm is what it does to the first update."""
    if drawn["place"] == "optimizer state":
        found["harm"] = relative_error(expected["update"], training.flat() - before)
    if drawn["place"] in STATE:
        return LIMIT if found["harm"] > HARMFUL else 1 + _MORE
    return LIMIT if drawn["class"] != "transient" and found["harm"] > HARMFUL else _AFTER


def _where(drawn: dict[str, Any]) -> str:
    where: str = drawn["where"]
    return where.partition("#")[0] if drawn["place"] in COMPUTED else where


def campaign(cell: Cell, mode: str, seed: int, numbers: range) -> Iterator[dict[str, Any]]:
    """Yield an account of each trial; ``numbers`` are those of this cell and mode."""
    training = Training(cell, mode, seed)
    for _ in range(_SETTLED):
        training.step()
    with training.unwatched():
        places = survey(training.model, lambda: training.loss(torch.Generator().manual_seed(0)))
    wanted = wanted_of(training)
    stand, expected = -1, {}
    for number in numbers:
        if number // _STAND != stand:
            stand = number // _STAND
            training.step()
            expected = forked(training.guard, partial(clean, training), seconds=_DEADLINE)
        rng = random.Random(f"{seed} {cell.name} {mode} {number}")
        drawn = draw(rng, places, training.model, wanted)
        at = rng.randrange(1 << 30)
        found = forked(training.guard, partial(trial, training, drawn, at, expected), seconds=_DEADLINE)
        yield {"number": number, "cell": cell.name, "dtype": cell.dtype, "parallelism": cell.parallelism, "mode": mode,
               "rank": 0, **drawn, **found}  # fmt: skip
    training.guard.close()


def wanted_of(training: Training) -> list[str]:
    """Return the places that this training has."""
    places = ["forward", "backward", "forward", "backward", "weight", "optimizer state"]
    if any(b.is_floating_point() for b in training.model.buffers()):
        places.append("buffer")
    if any(type(m).__name__ == "Checkpointed" for m in training.model.modules()):
        places.append("recomputed")
    return places
