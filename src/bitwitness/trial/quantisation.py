"""What a function that quantises loses by it, told from what its kernel does wrong.

Its own float64 run quantises as it does: against that the kernel is judged. A reference that does not quantise is further off,
by no more than casts of its arguments move it.
"""

from __future__ import annotations

import torch

from bitwitness.numerics import FLOAT8, unit_roundoff
from bitwitness.trial.allowance import ALLOWANCE
from bitwitness.trial.figures import parts
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.sway import factor, sway

_DRAWS = 8
_NO_NUMBERS = (torch.float8_e8m0fnu,)  # scales


def loss(own: Oracle, reference: Oracle) -> tuple[str, str]:
    """Return what is to be told of a quantisation: the types, and how far it takes results from a reference's.

    Nothing where the function casts to no float8 type, or the reference does as well. The second text names the first result
    that is further off than casts explain, if there is one.

    Parameters
    ----------
    own
        The function's own float64 run.
    reference
        The reference's.

    """
    kinds = sorted((k for k in own.mode.quantised if k in FLOAT8 and k not in _NO_NUMBERS), key=unit_roundoff)
    if not kinds or reference.mode.quantised:
        return "", ""
    found, wanted = own.exact.slots(), reference.exact.slots()
    noisy = [one.slots() for one in reference.on_quantised(kinds[-1], draws=_DRAWS)]
    furthest, where = 0.0, ""
    for slot, tensor in found.items():
        if slot not in wanted or tensor.shape != wanted[slot].shape or not tensor.is_floating_point():
            return "", slot
        truth = parts(wanted[slot])
        off = (parts(tensor) - truth).abs()
        others = [parts(one[slot]) for one in noisy]
        spread = torch.stack([(n - truth).square() for n in others]).mean(0).sqrt()
        usual = float(spread.square().mean().sqrt())
        if not bool((off <= ALLOWANCE * (spread + usual) / 2).all()):
            return "", slot
        if abs(factor(parts(tensor), truth) - 1) > ALLOWANCE * sway(others, truth) + unit_roundoff(kinds[-1]) ** 2:
            return "", slot  # all of it larger or smaller: roundings to nearest go both ways
        share = float(off.norm() / truth.norm()) if float(truth.norm()) else 0.0
        furthest, where = max((furthest, where), (share, slot))
    types = " and ".join(str(k).removeprefix("torch.") for k in kinds)
    return f"quantised to {types}, which takes {where or 'nothing'} {furthest:.2g} of its norm from the reference", ""
