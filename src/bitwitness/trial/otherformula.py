"""Whether a function gives something else than its reference where neither is rounded: half types hide what float64 shows."""

from __future__ import annotations

from bitwitness.numerics import HALF
from bitwitness.trial.allowance import allowance
from bitwitness.trial.asked import FEW, Asked
from bitwitness.trial.figures import spacing
from bitwitness.trial.result import FAIL, WARN

_HIDDEN = 0.25
"""Units in the last place by which formulas may differ: constants that one of them holds in float32 differ by far less."""
_SMALL = 2.0**-4
"""Of the root mean square of a result, what is not called small: smaller numbers are judged by the units of those."""
_ANOTHER = "another formula than the reference's: where nothing is rounded it gives {got:.9g} where {due:.9g} is due"
_LESS = "{another}; numbers of {dtype} hardly show it"


def other_formula(asked: Asked) -> tuple[str, str] | None:
    """Return a verdict on a function that a half type's rounding has excused, and its reason; None where it may stay.

    By what noise moves it, computed in float32, formulas may differ: near-equal choices, cancellations.
    """
    if asked.dtype not in HALF or not asked.oracle.has_reference:
        return None
    own = asked.these(asked.oracle.own(draws=FEW, stepwise=False))
    if len(own) <= FEW or any(t.shape != asked.truth.shape for t in own):
        return None
    known = asked.truth.isfinite() & own[0].isfinite()
    if not bool(known.any()):
        return None
    truth = asked.truth.masked_fill(~known, 0.0)
    noise = allowance(truth, [truth + n - own[0] for n in own[1:]], asked.dtype) - spacing(truth, asked.dtype) / 2
    size = truth.abs().clamp_min(_SMALL * float(truth[known].square().mean().sqrt()))
    units = ((own[0] - truth).abs() - noise).masked_fill(~known, 0.0) / spacing(size, asked.dtype)
    if float(units.max()) <= _HIDDEN:
        return None
    at = int(units.argmax())
    another = _ANOTHER.format(got=float(own[0].reshape(-1)[at]), due=float(asked.truth.reshape(-1)[at]))
    if float(units.max()) > 1.0:
        return FAIL, another
    return WARN, _LESS.format(another=another, dtype=str(asked.dtype).removeprefix("torch."))
