"""Every way to write a training loop: the same bits under guard, one fault found or its limit named, and the words for it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import bitwitness as bw
from bitwitness.testing import EVERY_STEP, FaultyDevice, from_mapping

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

import loops

ALWAYS = EVERY_STEP
EDITED = "the script changes gradients between its backward and their use"
IN_BACKWARD = "an optimizer runs inside the backward"
CREATE_GRAPH = "backward ran with create_graph: second derivatives are not replayed"
SITE = "*mid/mm:backward"

WORKS = {
    loops.zero_before_backward: SITE,
    loops.zero_in_place_before_backward: SITE,
    loops.none_by_hand: SITE,
    loops.skipped_where_not_finite: SITE,
    loops.adversarial: "2/mm:backward",
    loops.closure: SITE,
    loops.reentrant_checkpointing: SITE,
    loops.checkpointing: SITE,
    loops.muon_beside_adamw: SITE,
    loops.foreach: SITE,
    loops.one_by_one: SITE,
    loops.fused: SITE,
    loops.scaler_that_skips: SITE,
    loops.evaluation_between: SITE,
    loops.moving_average: SITE,
    loops.sparse_gradients: "down/mm:backward",
    loops.frozen_unused_shared: "*mid/mm:backward",
    loops.spectral_norm: SITE,
    loops.custom_function: SITE,
    loops.loader_workers: SITE,
    loops.clipped_twice_and_norm_asked: SITE,
}
NAMED = {
    loops.edited_gradients: EDITED,
    loops.replaced_gradients: EDITED,
    loops.optimizer_in_backward: IN_BACKWARD,
    loops.gradient_penalty: CREATE_GRAPH,
}
FAULT = {"kind": "multiply", "factor": 1e6, "pattern": "all", "steps": [8], "times": 1}


def name(value) -> str:
    return getattr(value, "__name__", "")


def guarded(loop, **settings) -> tuple[list[str], list[bw.Guard]]:
    guards: list[bw.Guard] = []

    def watch(model, optimizers):
        guards.append(bw.Guard(model, optimizers, **settings))
        return guards[-1]

    return loop(watch), guards


@pytest.mark.parametrize("loop", [*WORKS, *NAMED, loops.quietly_edited_gradients], ids=name)
def test_the_bits_are_the_same_though_every_step_is_questioned(loop) -> None:
    clean = loop(lambda *_: nullcontext())
    lines, guards = guarded(loop, deep_every=2, **ALWAYS)
    assert lines == clean
    for guard in guards:
        table = guard.coverage()
        assert table["failures"] == {}
        assert table["steps"]["held"] >= loops.STEPS
        told = [
            verdict
            for verdict in table["verdicts"]
            if not any(word in verdict for word in ("inconclusive", "software"))
        ]
        assert told == []
        limited = loop in NAMED or loop in (loops.scaler_that_skips, loops.quietly_edited_gradients)
        assert limited or table["dismissed"] >= loops.STEPS - 4


@pytest.mark.parametrize("loop", WORKS, ids=name)
def test_a_transient_is_convicted(loop) -> None:
    fault = {**FAULT, "site": WORKS[loop]}
    if loop is loops.scaler_that_skips:
        fault |= {"factor": 1e-3, "steps": [14]}  # what overflows is the scaler's business
    if loop is loops.adversarial:
        fault["steps"] = [9]  # the device counts both optimizers' steps: this is one of the discriminator's own
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        _, guards = guarded(loop, act="observe", deep_every=0, trend={"warmup": 4}, self_test=False)
    assert len(device.fired) == 1
    verdicts = [verdict for guard in guards for verdict in guard.coverage()["verdicts"]]
    assert any("transient_hardware [0]" in verdict for verdict in verdicts), (verdicts, device.fired)
    assert sum("hardware" in verdict for verdict in verdicts) == 1


@pytest.mark.parametrize("loop", NAMED, ids=name)
def test_what_cannot_be_replayed_is_sensed_and_named(loop, capsys) -> None:
    site = "2/mm:backward" if loop is loops.gradient_penalty else SITE
    fault = {**FAULT, "site": site}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        _, (guard,) = guarded(loop, deep_every=0, trend={"warmup": 4}, self_test=False)
    assert len(device.fired) == 1
    table = guard.coverage()
    assert table["left_open"]
    assert table["verdicts"] == []  # nothing speaks against anybody
    assert any(NAMED[loop] in gap for gap in table["not_covered"])
    assert NAMED[loop] in capsys.readouterr().err
