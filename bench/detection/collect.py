"""One training with several ranks' batches a step, and drawn faults tried on its steps.

Ranks are batches of one process here: what a sensor is given of a rank is its local gradient, which is the same. Nothing of a
trial outlives it: gradients, weights, buffers and random state are put back, so that the training itself is clean.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwitness.capture.looks import ModuleLooks
from bitwitness.capture.norms import NormTap
from bitwitness.finding import Severity
from bitwitness.inject.patterns import corrupt
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.stats import features_of, marks_of
from bitwitness.tap.collector import GradientCollector
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OperatorTap
from bitwitness.testing import Fault, FaultyDevice, from_mapping
from detection.faults import CLASSES, draw, survey
from detection.subjects import TEXT, Batch, Subject

HARMFUL = 1.0
BAND = 0.1  # from here to HARMFUL: reported apart
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "flash_attention")


_ARRAYS = ("l2", "absmax", "loss", "v1", "looks", "weights")


@dataclass
class Seen:
    """What the sensors are given of one rank in one step.

    Sizes [P] of its local gradients, V1's taps, the loss, figures of modules' results [2, 4, M], marks of the weights [2, P].
    """

    l2: np.ndarray[Any, Any]
    absmax: np.ndarray[Any, Any]
    loss: float
    v1: np.ndarray[Any, Any]
    looks: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]


@dataclass
class Part:
    """What one training and its trials gave."""

    subject: str
    ranks: int
    names: list[str]
    v1_sites: list[str]
    modules: list[str]
    clean: list[list[Seen]] = field(default_factory=list)  # by step, by rank
    trials: list[dict[str, Any]] = field(default_factory=list)
    struck: list[Seen] = field(default_factory=list)  # beside trials


class Bench:
    """One subject in training."""

    def __init__(self, subject: Subject, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.subject = subject
        self.model = subject.model()
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = subject.optimizer(list(self.model.parameters()))
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.ranks = ranks
        self.seed = seed
        self.text = TEXT(1 << 20)
        self.step = 0
        self.collector = GradientCollector()
        self.norms = NormTap(self.model, self.collector)
        self.looks = ModuleLooks(self.model)
        self.marks = self.weigh()

    def weigh(self) -> torch.Tensor:
        """Return the marks of the weights, as the guard reads them when a step begins."""
        return marks_of([p.detach() for p in self.parameters.values()], torch.device("cpu"))

    def loss(self, rank: int, batch: Batch) -> torch.Tensor:
        """Run a rank's forward, its random state its own."""
        torch.manual_seed(1_000_003 * self.seed + 97 * self.step + rank)
        with self.subject.precision():
            result: torch.Tensor = self.model(*batch)
        return result

    def gradient(self, rank: int, batch: Batch) -> tuple[list[torch.Tensor], float]:
        """Return a rank's local gradient and loss; buffers are left as they were."""
        self.collector.drain()
        self.looks.take(torch.device("cpu"))
        self.marks = self.weigh()
        before = [buffer.clone() for buffer in self.model.buffers()]
        self.model.zero_grad()
        self.looks.forward_begins()
        loss = self.loss(rank, batch)
        self.looks.forward_ended()
        loss.backward()
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(value)
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.model.parameters()], float(
            loss.detach()
        )

    def seen(self, grads: list[torch.Tensor], loss: float) -> tuple[Seen, list[str]]:
        """Describe a local gradient as the guard does."""
        sites, values = self.collector.drain()
        features = features_of(grads, hashed=False)
        keys, table = self.looks.take(torch.device("cpu"))
        looks = self.looks.looks(keys, table.double().numpy(), 1.0).figures
        described = Seen(
            features.l2.numpy(), features.absmax.numpy(), loss, values.float().numpy(), looks, self.marks.numpy()
        )
        return described, [str(site) for site in sites]


def collect(
    subject: Subject,
    *,
    ranks: int,
    steps: int,
    first: int,
    trials: int,
    seed: int,
    classes: Sequence[tuple[str, str]] = CLASSES,
) -> Part:
    """Train ``steps`` steps; from step ``first`` on, try ``trials`` faults in all, drawn from ``classes``."""
    bench = Bench(subject, ranks, seed)
    rng = random.Random(seed)
    places = survey(
        bench.model, lambda: bench.loss(0, subject.batches(1, torch.Generator().manual_seed(0), bench.text)[0])
    )
    due = sorted(rng.randrange(first, steps) for _ in range(trials))
    part = Part(subject.name, ranks, list(bench.parameters), [], list(bench.looks.paths))
    with bench.norms:
        for step in range(steps):
            bench.step = step
            batches = subject.batches(ranks, bench.generator, bench.text)
            grads = []
            row = []
            for rank, batch in enumerate(batches):
                grad, loss = bench.gradient(rank, batch)
                seen, part.v1_sites = bench.seen(grad, loss)
                grads.append(grad)
                row.append(seen)
            part.clean.append(row)
            while due and due[0] == step:
                due.pop(0)
                _try(bench, part, draw(rng, places, classes), grads, batches, rng)
            _advance(bench, grads, batches)
    return part


def _advance(bench: Bench, grads: list[list[torch.Tensor]], batches: list[Batch]) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(bench.model.parameters()):
            parameter.grad = torch.stack([grad[index] for grad in grads]).mean(0)
        # buffers move on as rank 0's would (DistributedDataParallel broadcasts them)
        bench.loss(0, batches[0])
    nn.utils.clip_grad_norm_(bench.model.parameters(), bench.subject.clip)
    bench.optimizer.step()


def _try(
    bench: Bench,
    part: Part,
    trial: dict[str, Any],
    clean: list[list[torch.Tensor]],
    batches: list[Batch],
    rng: random.Random,
) -> None:
    rank, seed = rng.randrange(bench.ranks), rng.randrange(1 << 30)
    grads, loss, changed = _strike(bench, trial, rank, seed, clean[rank], batches[rank])
    if not changed:
        return
    seen, _ = bench.seen(grads, loss)
    if not len(seen.v1):  # the model did not run: only the gradient in memory was struck
        seen.v1 = part.clean[-1][rank].v1
        seen.looks, seen.weights = part.clean[-1][rank].looks, part.clean[-1][rank].weights
    if not np.isfinite(loss):
        seen.loss = loss
    good = torch.cat([g.flatten() for g in clean[rank]]).double()
    bad = torch.cat([g.flatten() for g in grads]).double()
    harm = float((bad - good).norm() / good.norm())
    trial |= {"rank": rank, "step": bench.step, "seed": seed, "harm": harm if np.isfinite(harm) else float("inf")}
    trial["product"] = trial["place"] in ("forward", "backward") and any(op in trial["where"] for op in PRODUCTS)
    if trial["harm"] > BAND and trial["place"] in ("forward", "backward"):
        trial |= _checksums(bench, trial, rank, seed, batches[rank])
    part.trials.append(trial)
    part.struck.append(seen)


def _fault(trial: dict[str, Any], **more: Any) -> Fault:
    return from_mapping({"fault": [{**trial["fault"], **more}]})[0]


def _strike(
    bench: Bench, trial: dict[str, Any], rank: int, seed: int, clean: list[torch.Tensor], batch: Batch
) -> tuple[list[torch.Tensor], float, bool]:
    """Return the gradient that the fault leaves, the loss, and whether any bit was changed."""
    where, generator = trial["where"], np.random.default_rng(seed)
    if trial["place"] == "gradient":
        index = list(bench.parameters).index(where)
        struck = corrupt(clean[index], _fault(trial), generator)
        bench.collector.drain()
        return (
            [*clean[:index], clean[index] if struck is None else struck, *clean[index + 1 :]],
            0.0,
            struck is not None,
        )
    if trial["place"] == "weight":
        parameter = bench.parameters[where]
        kept = parameter.detach().clone()
        struck = corrupt(kept, _fault(trial), generator)
        if struck is None:
            return clean, 0.0, False
        try:
            parameter.data.copy_(struck)
            return *bench.gradient(rank, batch), True
        finally:
            parameter.data.copy_(kept)
    if trial["place"] == "activation gradient":
        return _strike_activation_gradient(bench, trial, rank, generator, batch)
    device = FaultyDevice([_fault(trial, site=where, times=1)], seed=seed, model=bench.model)
    with device:
        grads, loss = bench.gradient(rank, batch)
    return grads, loss, any(firing.changed for firing in device.fired)


def _strike_activation_gradient(
    bench: Bench, trial: dict[str, Any], rank: int, generator: np.random.Generator, batch: Batch
) -> tuple[list[torch.Tensor], float, bool]:
    changed = False

    def strike(grad: torch.Tensor) -> torch.Tensor | None:
        nonlocal changed
        struck = None if changed else corrupt(grad, _fault(trial), generator)
        changed = changed or struck is not None
        return struck

    def watch(_module: nn.Module, _args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(strike)

    handle = bench.model.get_submodule(trial["where"]).register_forward_hook(watch)
    try:
        grads, loss = bench.gradient(rank, batch)
    finally:
        handle.remove()
    return grads, loss, changed


def _checksums(bench: Bench, trial: dict[str, Any], rank: int, seed: int, batch: Batch) -> dict[str, bool]:
    """Try the checksum of a deep step, and the reference's, on the very same fault."""
    found = {}
    for name, scheme in (("checksum", "signs"), ("reference checksum", "reference")):
        sensor, tracker = ChecksumSensor(scheme), ModuleTracker()  # type: ignore[arg-type]
        with FaultyDevice([_fault(trial, site=trial["where"], times=1)], seed=seed, model=bench.model):
            bench.model.zero_grad()
            with OperatorTap(tracker, sensor, sensor.select):
                bench.loss(rank, batch).backward()
        found[name] = any(finding.severity is Severity.ERROR for finding in sensor.drain(bench.step, rank))
    return found


def save(part: Part, path: Any) -> None:
    """Write a part, whole or not at all."""
    flat = [seen for row in part.clean for seen in row] + part.struck
    temporary = path.with_suffix(".tmp.npz")
    np.savez_compressed(
        temporary,
        l2=np.stack([s.l2 for s in flat]),
        absmax=np.stack([s.absmax for s in flat]),
        v1=np.stack([s.v1 for s in flat]),
        looks=np.stack([s.looks for s in flat]),
        weights=np.stack([s.weights for s in flat]),
        loss=np.array([s.loss for s in flat]),
        about=json.dumps(
            {"subject": part.subject, "ranks": part.ranks, "names": part.names, "v1_sites": part.v1_sites,
             "modules": part.modules,
             "steps": len(part.clean), "trials": part.trials}
        ),
    )  # fmt: skip
    temporary.replace(path)


def load(path: Any) -> Part:
    """Read a part."""
    with np.load(path) as data:
        about = json.loads(str(data["about"]))
        flat = [
            Seen(l2, absmax, float(loss), v1, looks, weights)
            for l2, absmax, loss, v1, looks, weights in zip(*(data[name] for name in _ARRAYS), strict=True)
        ]
    ranks, steps = about["ranks"], about["steps"]
    clean = [flat[step * ranks : (step + 1) * ranks] for step in range(steps)]
    return Part(
        about["subject"],
        ranks,
        about["names"],
        about["v1_sites"],
        about["modules"],
        clean,
        about["trials"],
        flat[steps * ranks :],
    )
