"""Why steps are not covered, or not wholly, in words."""

from __future__ import annotations

UNSEEN = (
    "optimizers step, but no training forward of the model was seen, so nothing is checked: give the guard the module that the "
    "training calls, and make the guard after torch.compile"
)
INSIDE_JOIN = (
    "inside join() another rank may have no batch left: each senses its own gradients, and nothing is proven or healed"
)
PARTED_BY_JOIN = (
    "since join() the ranks hold other weights: torch makes them equal at its end, but not the optimizers' states and learning "
    "rates, which took unequally many steps"
)
