"""NaN and Inf in the loss, in gradients before and after their reduction, and in buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bitwitness.capture.light import LightStep
from bitwitness.finding import Finding, Severity
from bitwitness.sense.selftest import made_light, seen, self_test
from bitwitness.site import Site

_NAMED = 3  # gradients, buffers and steps that a message names; the evidence counts all
_UNSCALED = 1.0
"""A loss scale that changes nothing: what overflows without any is no search for one."""


UNTRACED = "unused"
"""The kind of what is known to be not finite, and not by whose doing."""
_LOSS = Site(".", "loss", 0, "forward", "out0")


def unused_losses(bad: Sequence[tuple[int, float]], rank: int) -> Finding:
    """Return what is to be said of losses, by step and value, that are not finite and that the script let go unused."""
    values = dict(bad)
    steps = ", ".join(f"{step} ({value})" for step, value in list(values.items())[:_NAMED])
    more = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
    message = (
        f"the loss was not finite in step {steps}{more}, and the script let it go unused: 'bitwitness trace' names who "
        "made it"
    )
    evidence = {"kind": UNTRACED, "losses": bad[:_NAMED], "count": len(bad)}
    return Finding(NonfiniteSensor.name, _LOSS, Severity.ERROR, message, evidence, bad[0][0], rank)


def failed_on(step: int, value: float, rank: int) -> Finding:
    """Return what is to be said of a model's output that is not finite and that the script ended on."""
    message = (
        f"what the model returned was not finite ({value}), and the script failed before its backward: "
        "'bitwitness trace' names who made it"
    )
    evidence = {"kind": UNTRACED, "outputs": [value]}
    return Finding(
        NonfiniteSensor.name, Site(".", "output", 0, "forward", "out0"), Severity.ERROR, message, evidence, step, rank
    )


class NonfiniteSensor:
    """Suspects any NaN or Inf in the loss, a local gradient or a buffer.

    Under a gradient scaler an overflow is how the scale is found, and the scaler skips the step: that is said at level
    info and only becomes a suspicion after ``patience`` steps in a row, and, until the scaler has found its first scale, not
    while there is a scale left to be lowered (it may begin as high as the user says). So is a gradient that is finite here
    and not after the reduction: another rank's, or the reduction's own doing.
    """

    name = "nonfinite"

    def __init__(self, *, patience: int = 8) -> None:
        self._patience = patience
        self._in_a_row = 0
        self._found_scale = False
        self._scale = np.inf  # at the last step that was not finite

    def look(self, light: LightStep) -> list[Finding]:
        """Return what is not finite in this step."""
        bad = np.flatnonzero(~np.isfinite(light.absmax))
        bad_losses = [loss for loss in light.losses if not np.isfinite(loss)]
        what = [f"gradient of {light.names[i]}" for i in bad[:_NAMED]] + (["loss"] if bad_losses else [])
        more = f" and {bad.size - _NAMED} more gradients" if bad.size > _NAMED else ""
        what += [f"buffer {name}" for name in light.buffers[:_NAMED]]
        own = bool(what)  # what only the reduction brought here may be another rank's
        if light.reduced and not bad.size:
            what.append(f"{len(light.reduced)} gradients after their reduction ({light.reduced[0]})")
        if not what:
            self._in_a_row = 0
            self._found_scale = True
            return []
        self._in_a_row += 1
        scaled_only = not bad_losses and not light.buffers
        # Inf times zero, further down in the backward, is NaN: either may come of a scale that is too large.
        lowered = light.scale < self._scale
        searching = not self._found_scale and scaled_only and lowered and light.scale > _UNSCALED
        self._scale = light.scale
        quiet = not own or (light.scaled and (searching or self._in_a_row < self._patience))
        severity = Severity.INFO if quiet else Severity.ERROR
        message = f"not finite: {', '.join(what)}{more}" + (" (under a gradient scaler)" if light.scaled else "")
        evidence = {
            "gradients": int(bad.size),
            "losses": bad_losses,
            "buffers": list(light.buffers[:_NAMED]),
            "reduced": len(light.reduced),
            "steps_in_a_row": self._in_a_row,
        }
        return [Finding(self.name, self._site(light, bad), severity, message, evidence, light.step, light.rank)]

    def _site(self, light: LightStep, bad: NDArray[np.intp]) -> Site:
        if bad.size:
            return light.site(int(bad[0]))
        if any(not np.isfinite(loss) for loss in light.losses):
            return _LOSS
        if light.buffers:
            return Site.of_parameter(light.buffers[0], "param")
        return Site.of_parameter(light.reduced[0], "grad")


@self_test("nonfinite", "NaN and Inf in losses and gradients")
def _proof() -> str:
    sensor = NonfiniteSensor()
    return seen(sensor.look(made_light(0)), sensor.look(made_light(1, spoiled=float("nan"))))
