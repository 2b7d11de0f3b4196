"""What the guard relies on proves that it sees before a training begins: every sensor, and the moments of a step.

Sensors declare their own self-tests (`sense.selftest`); here they are run, with those that are no single sensor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.capture.ambient import hooks_of_saving
from bitwitness.guard.keptgradients import lost_alone
from bitwitness.judge.replicas import find_desync
from bitwitness.nonfinite.approach import ApproachSensor
from bitwitness.ranks.alone import Alone
from bitwitness.sense.held import Name, read
from bitwitness.sense.optimizerbounds import out_of_bounds
from bitwitness.sense.seal import Seal
from bitwitness.sense.selftest import SELF_TESTS, self_test
from bitwitness.stats import bit_hash
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.moments import BackwardCall, StepListener, StepMoments
from bitwitness.tap.operators import OperatorTap

SEEN = "seen"
UNPROVEN = "has no self-test: nobody knows whether it sees"
MOMENTS = "moments"


def prove(names: Iterable[str] | None = None, *, step: bool = False) -> dict[str, str]:
    """Let sensors, and the moments that all rest on, prove that they see.

    Parameters
    ----------
    names
        The sensors; all that declare a self-test by default.
    step
        Prove the moments on a whole training step of one number. It runs a real optimizer, which other global hooks of the
        process would hear of, so it is left out where a training is about to begin.

    Returns
    -------
    By name ``seen``, or what went wrong.

    """
    proofs: dict[str, Callable[[], str]] = {MOMENTS: partial(_moments, step=step)}
    results = {}
    for name in SELF_TESTS if names is None else names:
        if name in SELF_TESTS:
            proofs[name] = SELF_TESTS[name].run
        else:
            results[name] = UNPROVEN
    for name, proof in proofs.items():
        try:
            with _saved_plainly():
                results[name] = proof() or SEEN
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


@contextmanager
def _saved_plainly() -> Iterator[None]:
    """Let tensors be saved as they are: a script that keeps them its own way may be inside of that when a guard begins."""
    if hooks_of_saving() is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def failed(results: dict[str, str]) -> dict[str, str]:
    """Return those that did not see their fault, with the reason."""
    return {name: reason for name, reason in results.items() if reason not in (SEEN, UNPROVEN)}


def explained() -> dict[str, str]:
    """Return what each self-test proves, in words, by name."""
    return {test.name: test.sees for test in SELF_TESTS.values()} | {
        MOMENTS: "backward, clipping, unscaling and optimizer steps are noticed"
    }


class _TwoRanks(Alone):
    """Two ranks in one process, of which the other sends what it is told."""

    def __init__(self, other: torch.Tensor) -> None:
        super().__init__()
        self.size, self._other = 2, other
        self._told = [bit_hash(other).reshape(1), other]

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.maximum(values, torch.cat([self._other, ~self._other]))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        other = self._told.pop(0)
        return torch.stack([values, other[: len(values)]])


@self_test("replicas", "parameters and buffers that differ between ranks, bit by bit, on deep steps")
def _replicas() -> str:
    ours = torch.tensor([7, 11], dtype=torch.int64)
    if find_desync(_TwoRanks(ours.clone()), ["a", "b"], ours) is not None:
        return "false alarm on equal bits"
    found = find_desync(_TwoRanks(ours ^ torch.tensor([1, 0])), ["a", "b"], ours)
    return "" if found is not None and found.name == "a" else "did not see a bit that differs"


@self_test("approach", "results of narrow dtypes that come close to overflow, on deep steps")
def _approach() -> str:
    told = []
    for size in (1.0, 300.0):
        sensor = ApproachSensor(0.5)
        x = torch.full((4, 4), size, dtype=torch.float16)
        with torch.no_grad(), OperatorTap(ModuleTracker(), sensor, sensor.select):
            torch.mul(x, 200.0)
        told.append(sensor.drain(0, 0, scaled=False))
    if told[0]:
        return f"false alarm on small numbers: {told[0][0].message}"
    return "" if told[1] else "did not see a result of 60,000 in float16"


@self_test("seal", "a bit of a parameter or of optimizer state that changes between steps")
def _seal() -> str:
    values = torch.linspace(0.0, 1.0, 3000, dtype=torch.float32)  # whatever the script's default is
    tensors = {Name("p"): values}
    seal = Seal(tensors)
    if seal.broken(read(tensors)):
        return "false alarm on numbers that nobody changed"
    values.data.view(torch.int32)[1234] ^= 1 << 20
    told = [broken.evidence().get("element") for broken in seal.broken(read(tensors))]
    return "" if told == [[1234]] else f"did not locate the bit that was flipped for it, but {told}"


@self_test("gradients", "a gradient that changes between its backward and its use, on deep steps")
def _gradients() -> str:
    # by rank: what it was given, and how many tensors have changed since
    if lost_alone([[7, 1], [7, 1]]):
        return "false alarm on a change that all ranks made"
    found = lost_alone([[7, 0], [7, 1], [7, 0], [9, 1]])
    return "" if found == (1,) else f"took ranks {found} for the one that has lost something: 1"


@self_test("optimizer", "moments of gradients that cannot be; by turns, updates that come out otherwise")
def _optimizer() -> str:
    """See that moments are judged. A recomputation proves itself on the training's first steps, or accuses nobody."""
    first, second = torch.zeros(4, dtype=torch.float32), torch.tensor([0.0, 1.0, 1.0, -1.0], dtype=torch.float32)
    seen = out_of_bounds(first, second, {"betas": (0.9, 0.999)})
    return "" if seen is not None else "did not see a mean of squares below zero"


class _Listener(StepListener):
    """Notes which moments it was told of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        del call
        self.told.append("backward")
        yield

    def clipping(self, gradients: list[torch.Tensor]) -> None:
        del gradients
        self.told.append("clip")

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        del optimizer
        self.told.append("unscale" if scaler else "step")

    def closure_ended(self, optimizer: Optimizer) -> None:
        self.gradients_ready(optimizer=optimizer)

    def zeroed(self, owner: Optimizer | torch.nn.Module) -> None:
        del owner
        self.told.append("zeroed")

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        del optimizer
        self.told.append("stepped")

    def scaler_updated(self, scaler: GradScaler) -> None:
        del scaler
        self.told.append("update")


def _moments(*, step: bool) -> str:
    """See that every moment is told."""
    listener = _Listener()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0)
    with torch.enable_grad(), StepMoments(listener):
        scaler.scale((parameter * parameter).sum()).backward()
        if step:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        torch.nn.utils.clip_grad_value_([parameter], 1.0)
        if step:
            scaler.step(optimizer)
            scaler.update()
    wanted = {"backward", "clip"} | ({"unscale", "step", "stepped", "update"} if step else set())
    missing = wanted - set(listener.told)
    return f"torch {torch.__version__} no longer tells of: {', '.join(sorted(missing))}" if missing else ""
