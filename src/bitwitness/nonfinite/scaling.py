"""What a gradient scaler went through: when it lowered its scale, and who overflowed then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwitness.finding import Finding, Severity
from bitwitness.nonfinite.messages import SENSOR
from bitwitness.nonfinite.origin import Told
from bitwitness.site import Site


@dataclass(slots=True)
class ScaleLog:
    """Counts the steps on which a scaler's gradients overflowed, so that it lowers its scale and skips the step.

    ``patience``: drops in a row that are worth a finding. ``origins`` counts who overflowed, by site.
    """

    patience: int
    steps: int = 0
    drops: int = 0
    origins: Counter[str] = field(default_factory=Counter)
    _taken: int = 0
    _row: list[tuple[int, float, str]] = field(default_factory=list)

    def fine(self) -> None:
        """Note a step whose gradients were finite."""
        self.steps += 1
        self._taken += 1
        self._row.clear()

    def overflowed(self, step: int, scale: float, rank: int, told: Sequence[Told]) -> Finding | None:
        """Note a step that overflowed; return what is to be said after so many in a row."""
        self.steps += 1
        self.drops += 1
        who = next((f"{one.site} on rank {one.rank}" for one in told if one.own), "")
        self.origins.update([who] if who else [])
        self._row.append((step, scale, who))
        count = len(self._row)
        if count % self.patience or (count // self.patience) & (count // self.patience - 1):
            return None
        steps, scales, names = zip(*self._row, strict=True)
        blamed = Counter(name for name in names if name)
        first = next((one.site for one in told if one.own), None)
        site = Site.parse(first) if first else Site(".", "loss_scale", 0, "grad", "value")
        # Before any step was taken the scaler still looks for its scale: that is how it works.
        searching = not self._taken
        message = (
            f"the loss scale dropped {count} times in a row (steps {steps[0]} to {steps[-1]}, scales {scales[0]:.6g} to "
            f"{scales[-1]:.6g}); "
            + (f"overflowed: {', '.join(f'{name} ({n} times)' for name, n in blamed.most_common(3))}" if blamed else "")
            + (" (the scaler is still looking for its first scale)" if searching else "")
            + ". To do: run what overflows in bfloat16 or float32, or begin with a smaller scale"
        )
        evidence: dict[str, Any] = {
            "kind": "loss_scale_drops",
            "steps": list(steps),
            "scales": list(scales),
            "origins": [name for name in names if name],
        }
        severity = Severity.INFO if searching else Severity.WARNING
        return Finding(SENSOR, site.at(rank=rank, step=step), severity, message, evidence, step, rank)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for the report."""
        return {"steps": self.steps, "drops": self.drops, "origins": dict(self.origins.most_common(8))}

    def line(self) -> str:
        """Return the counts as one line."""
        who = ", ".join(f"{name} ({count})" for name, count in self.origins.most_common(3))
        return f"loss scale: dropped on {self.drops} of {self.steps} steps" + (
            f"; overflowed then: {who}" if who else ""
        )
