"""Each sensor declares how it proves that it sees: a fault made for the purpose, on numbers made for the purpose.

To join, a sensor puts `self_test` on one function in its own file::

    @self_test("mine", "what it sees, in a few words")
    def _proof() -> str:
        return seen(clean=MySensor().look(GOOD), faulty=MySensor().look(BAD))

Nothing of the training is touched: own numbers, own generators, no global random state, a few milliseconds. The guard runs
those of the sensors that are on when it begins (`guard.selftest.prove`); one without is called unproven in the coverage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bitwitness.capture.light import LightStep
from bitwitness.finding import Finding

Proof = Callable[[], str]
"""Returns an empty text where the sensor saw the fault and nothing else, else what went wrong."""

NAMES = tuple(f"p{i}" for i in range(12))
"""Of the parameters of a made-up model."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How one sensor proves that it sees; ``sees``: what, in words."""

    name: str
    sees: str
    run: Proof


SELF_TESTS: dict[str, SelfTest] = {}
"""Those of all sensors that are imported, by name."""


def self_test(name: str, sees: str) -> Callable[[Proof], Proof]:
    """Declare a function as a sensor's self-test.

    Raises
    ------
    ValueError
        If another function is declared for that name.

    """

    def declare(proof: Proof) -> Proof:
        known = SELF_TESTS.get(name)
        if known is not None and known.run.__qualname__ + known.run.__module__ != proof.__qualname__ + proof.__module__:
            raise ValueError(
                f"sensor {name!r} has a self-test already, in {known.run.__module__}; give this one another name"
            )
        SELF_TESTS[name] = SelfTest(name, sees, proof)
        return proof

    return declare


def seen(clean: Sequence[Finding], faulty: Sequence[Finding]) -> str:
    """Return the result of a proof: what was said of clean numbers, and of the same with a fault."""
    if clean:
        return f"false alarm on clean numbers: {clean[0].message}"
    return "" if faulty else "did not see the fault that was made for it"


def made_light(step: int, rank: int = 0, *, spoiled: float = 1.0) -> LightStep:
    """Return a made-up step of `NAMES`; the fourth gradient is multiplied by ``spoiled``."""
    noise = np.random.default_rng((step, rank)).normal(0.0, 0.1, len(NAMES))
    l2 = np.exp(noise)
    l2[3] *= spoiled
    return LightStep(step, rank, NAMES, l2, 0.1 * l2)
