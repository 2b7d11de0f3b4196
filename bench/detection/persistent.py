"""Persistent faults under a real guard at its default budget: how many steps until somebody suspects.

A training is guarded until it has settled. Each trial is a fork of it, on a device that from then on computes one drawn
operator wrongly, at the same element every time; it trains on until the first suspicion, at most `LIMIT` steps.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import nn

from bitwitness import Guard
from bitwitness.demo.model import batch
from bitwitness.testing import FaultyDevice, from_mapping
from detection.apart import flat, forked, relative_error, unwatched
from detection.faults import SORTS, draw, survey
from detection.subjects import CONTEXT, TEXT, Subject

LIMIT = 100
_SETTLED = 60
_CLASSES = tuple((place, sort) for place in ("forward", "backward") for sort in SORTS)


class Loop:
    """One guarded training."""

    def __init__(self, subject: Subject, seed: int) -> None:
        torch.manual_seed(seed)
        self.subject = subject
        self.model = subject.model()
        self.optimizer = subject.optimizer(list(self.model.parameters()))
        self.generator = torch.Generator().manual_seed(seed)
        self.text = TEXT(1 << 20)
        self.guard = Guard(self.model, self.optimizer, self_test=False)
        self.guard.__enter__()
        assert self.guard.reporter is not None
        self.guard.reporter.say = lambda _text: None  # type: ignore[method-assign]

    def backward(self) -> list[torch.Tensor]:
        """Run a forward and a backward on a new batch; return copies of the gradients."""
        with self.subject.precision():
            loss = self.model(*batch(self.text, self.generator, self.subject.size, CONTEXT))
        loss.backward()
        return [p.grad.detach().clone() for p in self.model.parameters() if p.grad is not None]

    def step(self) -> None:
        """Use the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), self.subject.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trial(loop: Loop, drawn: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train on with a fault, in this process, which is thrown away afterwards."""
    with unwatched(loop.guard, loop.model, loop.optimizer, loop.generator):
        clean = flat(loop.backward())
    fault = from_mapping({"fault": [{"element": seed % 4096, **drawn["fault"], "site": drawn["where"]}]})
    found: dict[str, Any] = {"harm": 0.0, "steps": None, "sensors": [], "verdicts": []}
    with FaultyDevice(fault, seed=seed, model=loop.model):
        for step in range(LIMIT):
            faulty = flat(loop.backward())
            if step == 0:
                found["harm"] = relative_error(clean, faulty)
                if not found["harm"] > 1.0:
                    return found
            loop.step()
            table = loop.guard.coverage()
            if table["suspicions"]:
                return found | {"steps": step + 1, "verdicts": table["verdicts"]}
    return found


def campaign(subjects: list[Subject], wanted: int, seed: int) -> list[dict[str, Any]]:
    """Return harmful persistent faults, at least ``wanted``, over all ``subjects``."""
    results: list[dict[str, Any]] = []
    each = -(-wanted // len(subjects))
    for number, subject in enumerate(subjects):
        rng = random.Random(seed + number)
        loop = Loop(subject, seed + number)
        for _ in range(_SETTLED):
            loop.backward()
            loop.step()
        places = survey(loop.model, lambda loop=loop: _loss(loop))
        loop.optimizer.zero_grad()
        harmful = 0
        for _ in range(60 * each):
            drawn = draw(rng, places, _CLASSES)
            found = {"harm": 0.0} | forked(loop.guard, partial(trial, loop, drawn, rng.randrange(1 << 30)))
            if found["harm"] > 1.0:
                harmful += 1
                results.append({"subject": subject.name, **drawn, **found})
            if harmful >= each:
                break
        loop.guard.close()
    return results


def _loss(loop: Loop) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    loop.guard.pause()
    with loop.subject.precision():
        loss: torch.Tensor = loop.model(*batch(loop.text, generator, loop.subject.size, CONTEXT))
    loop.guard.resume()
    return loss
