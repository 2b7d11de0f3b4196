"""What a guard has learned of a training, kept beside a checkpoint so that a restart need not learn it again."""

from __future__ import annotations

from typing import Any

import torch

from bitwitness.errors import UsageError
from bitwitness.guard.guardwatch import GuardWatch

_VERSION = 3  # of what `learned` returns; another one is refused, since histories would be read as other things


def learned(watch: GuardWatch) -> dict[str, Any]:
    """Return the histories of the light sensors, the model's own spread and the step; tensors and plain values only."""
    sensors, experiments = watch.sensors, watch.investigation.experiments
    return {
        "version": _VERSION,
        "parameters": list(sensors.names),
        "step": watch.session.step,
        "number": watch.reader.root.record.number,
        "experiments": experiments.state(),
        "histories": {
            name: {
                key: value if isinstance(value, float) else torch.from_numpy(value)
                for key, value in history.state().items()
            }
            for name, history in sensors.histories.items()
        },
    }


def relearn(watch: GuardWatch, state: dict[str, Any]) -> None:
    """Take over what `learned` gave.

    Raises
    ------
    UsageError
        If it is of another version or another model.

    """
    if state.get("version") != _VERSION:
        raise UsageError(
            f"this guard state has version {state.get('version')!r}, expected {_VERSION}; start without it"
        )
    names, known = list(watch.sensors.names), list(state.get("parameters", []))
    if names != known:
        odd = next((pair for pair in zip(known, names, strict=False) if pair[0] != pair[1]), ("(end)", "(end)"))
        raise UsageError(
            f"this guard state is of a model with {len(known)} parameters, this one has {len(names)}; the first that differs "
            f"is {odd[0]!r} there and {odd[1]!r} here; start without it"
        )
    for name, history in watch.sensors.histories.items():
        saved = state["histories"].get(name)
        if saved is not None and len(saved["mean"]) == len(history.mean):  # as many modules are looked at as then
            history.load({k: v if isinstance(v, float) else v.numpy() for k, v in saved.items()})
    experiments = watch.investigation.experiments
    experiments.load(state["experiments"])
    watch.session.clock.go_on_with(int(state["step"]) + 1)
    watch.reader.root.record.number = int(state["number"])
    watch.reader.root.record.looked_at = True
