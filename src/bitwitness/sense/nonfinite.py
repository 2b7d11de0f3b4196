"""NaN and Inf in the loss and in local gradients."""

from __future__ import annotations

import numpy as np

from bitwitness.finding import Finding, Severity
from bitwitness.sense.light import LightStep
from bitwitness.site import Site

_NAMED = 3


class NonfiniteSensor:
    """Suspects any NaN or Inf in the loss or a gradient.

    Under a gradient scaler an overflow is how the scale is found, and the scaler skips the step: that is said at level
    info and only becomes a suspicion after ``patience`` steps in a row.
    """

    name = "nonfinite"

    def __init__(self, *, patience: int = 8) -> None:
        self._patience = patience
        self._in_a_row = 0

    def look(self, light: LightStep) -> list[Finding]:
        """Return what is not finite in this step."""
        bad = np.flatnonzero(~np.isfinite(light.absmax))
        bad_losses = [loss for loss in light.losses if not np.isfinite(loss)]
        if not bad.size and not bad_losses:
            self._in_a_row = 0
            return []
        self._in_a_row += 1
        quiet = light.scaled and self._in_a_row < self._patience
        severity = Severity.INFO if quiet else Severity.ERROR
        what = [f"gradient of {light.names[i]}" for i in bad[:_NAMED]] + (["loss"] if bad_losses else [])
        more = f" and {bad.size - _NAMED} more gradients" if bad.size > _NAMED else ""
        site = light.site(int(bad[0])) if bad.size else Site(".", "loss", 0, "forward", "out0")
        message = f"not finite: {', '.join(what)}{more}" + (" (under a gradient scaler)" if light.scaled else "")
        evidence = {"gradients": int(bad.size), "losses": bad_losses, "steps_in_a_row": self._in_a_row}
        return [Finding(self.name, site, severity, message, evidence, light.step, light.rank)]
