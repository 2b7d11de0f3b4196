"""Which parameters optimizers step that no guard watches: what is still looked for, and in the end is named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.guard.roots import watched_roots

_TRIES = 3  # steps for which an optimizer's model is looked for
_NAMED = 4  # parameters that are named at the end
NOTHING = (
    "no model was trained under guard: no module with trainable parameters was called in training mode, with gradients"
)


@dataclass
class _Seen:
    """What is known of one optimizer; ``state`` says of which guards it is true, ``sizes`` of how large groups."""

    state: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    tries: int = 0
    missing: tuple[nn.Parameter, ...] = ()
    idle: tuple[nn.Parameter, ...] = ()
    """Parameters that nobody watches and that had no gradient as yet: a part of the model that is called later."""


class Unguarded:
    """Keeps, of every optimizer that steps, which trained parameters no guard watches.

    A step of an optimizer whose parameters are all watched costs the same whatever their number.
    """

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()
        self._named: dict[int, tuple[str, dict[int, tuple[int, ...]]]] = {}

    def stepped(self, optimizer: Optimizer) -> bool:
        """Note a step; return whether this optimizer is seen for the first time, or was given more parameters since."""
        roots = watched_roots()
        state, sizes = tuple(map(id, roots)), tuple(len(group["params"]) for group in optimizer.param_groups)
        seen = self._seen.setdefault(optimizer, _Seen())
        new = seen.sizes != sizes
        seen.sizes = sizes
        settled = not new and seen.state == state and (not seen.missing or seen.tries > _TRIES)
        if settled and not any(p.grad is not None for p in seen.idle):
            return new
        watched = {id(parameter) for root in roots for parameter in root.parameters()}
        seen.state = state
        unwatched = [p for p in parameters_of(optimizer) if p.requires_grad and id(p) not in watched]
        seen.missing = tuple(p for p in unwatched if p.grad is not None)
        seen.idle = tuple(p for p in unwatched if p.grad is None)
        seen.tries = seen.tries + 1 if seen.missing else 0
        if seen.missing:
            self._named[id(optimizer)] = (type(optimizer).__name__, {id(p): tuple(p.shape) for p in seen.missing})
        else:
            self._named.pop(id(optimizer), None)
        return new

    @property
    def looked_for(self) -> bool:
        """Whether some optimizer's parameters are worth looking for."""
        return any(seen.idle or (seen.missing and seen.tries <= _TRIES) for seen in self._seen.values())

    def optimizers(self) -> list[Optimizer]:
        """Return those that have stepped and are still there."""
        return list(self._seen)

    def missing(self) -> list[tuple[Optimizer, set[int]]]:
        """Return every optimizer with unwatched parameters, and these parameters' identities."""
        return [(optimizer, {id(p) for p in seen.missing}) for optimizer, seen in self._seen.items() if seen.missing]

    def steps_of(self, root: nn.Module) -> int:
        """Return how many steps went by, at least, in which a model's parameters were trained and not watched."""
        held = {id(parameter) for parameter in root.parameters()}
        return max((s.tries for s in self._seen.values() if not held.isdisjoint(map(id, s.missing))), default=0)

    def lines(self, modules: Iterable[nn.Module]) -> list[str]:
        """Name what was trained unguarded, by the modules that are known."""
        names = {
            id(parameter): f"{type(module).__name__}.{name}"
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        lines = []
        for optimizer, shapes in self._named.values():
            shown = [
                names.get(key, f"{shape} in no module that was called for training") for key, shape in shapes.items()
            ][:_NAMED]
            more = f" and {len(shapes) - _NAMED} more" if len(shapes) > _NAMED else ""
            plural = "" if len(shapes) == 1 else "s"
            lines.append(
                f"trained unguarded: {len(shapes)} parameter{plural} that {optimizer} steps: {'; '.join(shown)}{more}"
            )
        return lines


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
