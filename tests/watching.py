"""Running operators under the `checksum` sensor, as a deep step does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bitwitness import Finding
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.tap.inplace import functional_tap
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall


def watched(
    run: Callable[[], object], spoil: Callable[[OpCall], None] | None = None
) -> tuple[list[Finding], dict[str, int]]:
    """Run under the sensor; return what it found, and how often it checked which operator."""
    sensor = ChecksumSensor(rows_one_in=1)

    def look(call: OpCall) -> None:
        if spoil is not None:
            spoil(call)
        sensor(call)

    with functional_tap(ModuleTracker(), look, sensor.select):
        run()
    return sensor.drain(0, 0), {op: count for op, (count, _) in sensor.checked_calls.items()}


def suspected(run: Callable[[], object]) -> list[str]:
    """Return what the sensor said of a healthy run."""
    return [one.message for one in watched(run)[0] if one.sensor == "checksum"]


def found_in(run: Callable[[], object], op: str, slot: int, spoil: Callable[[torch.Tensor], object]) -> Finding:
    """Return what was found first when one result of an operator's first call is spoilt; fail if nothing was."""
    done: list[str] = []

    def struck(call: OpCall) -> None:
        if op in (call.op, call.at) and not done:
            done.append(str(call.site()).split("@")[0])
            with torch.no_grad():
                spoil(call.outputs[slot].detach())

    found = [one for one in watched(run, struck)[0] if one.sensor == "checksum"]
    assert done, f"{op} did not run"
    assert found, f"{op}.out{slot}: nothing was found"
    assert str(found[0].site).startswith(done[0])
    return found[0]
