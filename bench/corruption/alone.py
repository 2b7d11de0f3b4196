"""Faults in a training of one process: each trial is a fork of a guarded training that has settled, and is thrown away.

What a fork starts from is the same for all trials of one *stand* of the training; a fork without a fault says what its
gradients, its update and its weights some steps later would have been.
"""

from __future__ import annotations

import gc
import io
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from detection.faults import survey
from detection.subjects import CONTEXT, TEXT
from torch import nn

from bitwitness import Guard, TrainingStopped
from bitwitness.demo.model import batch
from bitwitness.finding import Severity
from bitwitness.session.forked import lent_to_children
from bitwitness.stats.digest import bit_hashes
from bitwitness.testing import FaultyDevice
from corruption.cells import WATCHFUL, Cell
from corruption.references import CHECKSUM, PRODUCTS, References, their_checksum
from corruption.strikes import COMPUTED, STATE, as_fault, draw, strike_state

HARMFUL = 1.0
LIMIT = 100
"""Steps within which a fault that stays is to be seen at the default budget."""
_SETTLED = 40
_AFTER = 3  # steps of a trial whose fault does no harm, or is over
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
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).double()

    def digest(self) -> list[int]:
        """Return the bits of parameters and buffers, hashed."""
        held = [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]
        return bit_hashes(held).tolist()  # type: ignore[no-any-return]


def settings(mode: str) -> dict[str, Any]:
    """Return the guard's settings: everything on every step, or the defaults."""
    return {"deep_every": 1} if mode == WATCHFUL else {}


@contextmanager
def without_guard(training: Training) -> Iterator[None]:
    """Compute something that is none of the training's: its random state, batches and buffers are put back."""
    state, random_state = training.generator.get_state(), torch.get_rng_state()
    buffers = [b.clone() for b in training.model.buffers()]
    training.guard.pause()
    try:
        yield
    finally:
        training.optimizer.zero_grad()
        training.references.forget()
        with torch.no_grad():
            for buffer, value in zip(training.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        training.generator.set_state(state)
        torch.set_rng_state(random_state)
        training.guard.resume()


def clean(training: Training) -> dict[str, Any]:
    """Train on without a fault: the first step's gradient and update, and the bits after some steps."""
    before = training.flat()
    grads, _ = training.step()
    update = training.flat() - before
    for _ in range(_AFTER - 1):
        training.step()
    return {"gradient": torch.cat([g.flatten() for g in grads]).double(), "update": update, "digest": training.digest()}


def trial(training: Training, drawn: dict[str, Any], seed: int, expected: dict[str, Any]) -> dict[str, Any]:
    """Train on with a fault, in a process that is thrown away."""
    found: dict[str, Any] = {"harm": 0.0, "struck": False, "steps": None, "as_clean": None, "references": {}}
    findings, reporter = _listened(training)
    if drawn["place"] in COMPUTED and any(name in drawn["where"] for name in PRODUCTS):
        with without_guard(training):
            fault = as_fault(drawn, site=drawn["where"])
            if their_checksum(training.model, training.loss, fault, seed):
                found["references"][CHECKSUM] = 1
    faults = [as_fault(drawn, site=drawn["where"])] if drawn["place"] in COMPUTED else []
    device, recomputed = FaultyDevice(faults, seed=seed, model=training.model), drawn["place"] == "recomputed"
    if drawn["place"] in STATE:
        found["struck"] = strike_state(training.model, training.optimizer, drawn, seed)
    before = training.flat()
    limit, step = _AFTER, 0
    try:
        with nullcontext() if recomputed else device:
            while step < limit:
                grads, told = training.step(device if recomputed and not step else None)
                step += 1
                for name in told:
                    found["references"].setdefault(name, step)
                if step == 1:
                    found["harm"] = _harm(drawn, grads, training.flat() - before, expected)
                    stays = drawn["class"] != "transient" or drawn["place"] in STATE
                    limit = LIMIT if stays and found["harm"] > HARMFUL else _AFTER
                if findings and found["steps"] is None:
                    found["steps"] = step
                    limit = min(limit, step + _AFTER)
    except TrainingStopped:
        found["steps"] = found["steps"] or step + 1
    found["struck"] |= any(firing.changed for firing in device.fired)
    found["as_clean"] = step == _AFTER and training.digest() == expected["digest"]
    told_of = [f"{finding.sensor}: {finding.site}: {finding.message}" for finding in findings]
    found["sensors"] = sorted({finding.sensor for finding in findings})
    found["verdicts"] = [
        {"cause": str(v.cause), "ranks": list(v.ranks), "action": str(v.action), "why": v.message}
        for v in reporter.verdicts
    ]
    found["named"] = any(_where(drawn) in text for text in [*told_of, *(v["why"] for v in found["verdicts"])])
    return found


def _where(drawn: dict[str, Any]) -> str:
    where: str = drawn["where"]
    return where.partition("#")[0] if drawn["place"] in COMPUTED else where


def _listened(training: Training) -> tuple[list[Any], Any]:
    """Collect what the guard suspects from now on."""
    reporter, heard = training.guard.reporter, []
    assert reporter is not None
    told = reporter.finding

    def finding(said: Any) -> None:
        if said.severity is not Severity.INFO:
            heard.append(said)
        told(said)

    reporter.finding = finding  # type: ignore[method-assign]
    reporter.verdicts.clear()
    return heard, reporter


def _harm(drawn: dict[str, Any], grads: list[torch.Tensor], update: torch.Tensor, expected: dict[str, Any]) -> float:
    """Return the relative error of the first step's gradient; of a struck optimizer state, that of its update."""
    if drawn["place"] == "optimizer state":
        good, bad = expected["update"], update
    else:
        good, bad = expected["gradient"], torch.cat([g.flatten() for g in grads]).double()
    error = float((bad - good).norm() / good.norm())
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN


def forked(training: Training, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a fork of this process computes; ``lost`` where it ended without an answer."""
    read, write = os.pipe()
    with lent_to_children(training.guard.session):
        child = os.fork()
    if child == 0:
        try:
            gc.disable()
            signal.alarm(_DEADLINE)
            answer = io.BytesIO()
            torch.save(call(), answer)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer.getvalue())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return torch.load(io.BytesIO(text)) if text else {"lost": True}


def campaign(cell: Cell, mode: str, seed: int, numbers: range) -> Iterator[dict[str, Any]]:
    """Yield an account of each trial; ``numbers`` are those of this cell and mode."""
    training = Training(cell, mode, seed)
    for _ in range(_SETTLED):
        training.step()
    with without_guard(training):
        places = survey(training.model, lambda: training.loss(torch.Generator().manual_seed(0)))
    wanted = wanted_of(training)
    stand, expected = -1, {}
    for number in numbers:
        if number // _STAND != stand:
            stand = number // _STAND
            training.step()
            expected = forked(training, partial(clean, training))
        rng = random.Random(f"{seed} {cell.name} {mode} {number}")
        drawn = draw(rng, places, training.model, wanted)
        at = rng.randrange(1 << 30)
        found = forked(training, partial(trial, training, drawn, at, expected))
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
