"""What a module holds besides its parameters and buffers, and a forward may change: kept, put back, named where that fails.

Counters, memory banks, hidden states, generators of its own: in attributes of the modules, in what these hold, in the globals
and closures that the script's functions use, hooks included. Before each recorded forward what is known to change is kept, so
that a replay starts from what the forward found; around a replay everything is looked at, and put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitwitness.capture.buffers import LEARNED_FROM
from bitwitness.capture.containers import read
from bitwitness.capture.contents import ARGUMENT, Place, Snapshot, SnapshotWalk
from bitwitness.capture.leaves import is_generator
from bitwitness.capture.surroundings import Reading, Surroundings
from bitwitness.capture.usercode import Namespace, is_users_function, namespaces_of

_NESTED = 3  # containers within containers in which a tensor is looked for


class HeldState:
    """Looks at one root.

    Parameters
    ----------
    root
        The module that is run again.

    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._code: dict[str, Namespace] | None = None
        self._structure: list[tuple[Any, ...]] | None = None
        self._learned = self._learned_backwards = 0
        self._before: Snapshot | None = None
        self._before_backward: Snapshot | None = None
        self._volatile: dict[Place, str] = {}
        self._mutated: set[Place] = set()
        self._found: list[Place] = []
        self._beside: list[Any] = []
        self._forward: Any = None
        self._around: Surroundings | None = None
        self.refused: str | None = None
        """Why no replay may be made: something changes in a forward that cannot be put back."""
        self.disturbance: str | None = None
        """What a re-execution has changed for good, so that the training may compute other numbers since."""

    def forward_begins(self, unknown: list[Any]) -> Snapshot | None:
        """Return what is known to change, as it is now; None if there is nothing. Learn from the first forwards.

        ``unknown``: arguments of the forward that are neither plain nor tensors: caches, say.
        """
        if self._learned < LEARNED_FROM:
            self._before = self.everything()
            for leaf in self._before.leaves:
                if is_generator(leaf.thing):
                    self._volatile[leaf.place] = leaf.name
        return self.volatile(unknown)

    def volatile(self, unknown: Sequence[Any] = (), places: Collection[Place] | None = None) -> Snapshot | None:
        """Return what is known to change in forwards, as it is now, and ``unknown`` things; None if there is nothing.

        ``places``: at these alone.
        """
        volatile = self._volatile if places is None else self._volatile.keys() & set(places)
        if not volatile and not unknown:
            return None
        walk = SnapshotWalk(lambda place: place in self._mutated or place[0] == ARGUMENT, self._known)
        for index, value in enumerate(unknown):
            walk.enter((ARGUMENT, index), f"argument {index}", value)
        wanted: dict[Any, set[str]] = {}
        for place in volatile:
            wanted.setdefault(place[0], set()).add(place[1])
        namespaces = self._namespaces() if wanted else {}
        for key, names in wanted.items():
            if key in namespaces:
                name, thing, _ = namespaces[key]
                walk.namespace((key,), name, thing, frozenset(names))
        return walk.snapshot

    @contextmanager
    def noting(self, places: set[Place] | None) -> Iterator[None]:
        """Add the places at which what runs inside changes something; what a script changes beside it is none of it."""
        before = None if places is None else self.volatile()
        yield
        if before is not None and places is not None:
            places |= {place[:2] for place in before.changed()}

    def forward_ended(self, around: Reading) -> None:
        """Learn what the forward changed, and what of that nobody could put back. ``around``: what it had found."""
        before, self._before = self._before, None
        if before is None:
            return
        self._learned += 1
        self.learn(before)
        if self._learned == LEARNED_FROM:  # what only the very first one sets up is there from now on
            lost = around.changed_beside(before.things())
            if lost and self.refused is None:
                self.refused = f"{lost[0]} changes in the forward, and cannot be put back"

    def disturbed(self, what: str) -> None:
        """Say that a re-execution has changed something for good: none is made any more."""
        if self.disturbance is None:
            self.disturbance = self.refused = what

    def backward_begins(self) -> None:
        """Take what there is before a backward, whose functions and hooks may be the script's, as long as that is learned."""
        if self._learned_backwards < LEARNED_FROM:
            self._before_backward = self.everything()

    def backward_ended(self) -> None:
        """Learn what the backward changed."""
        before, self._before_backward = self._before_backward, None
        if before is not None:
            self._learned_backwards += 1
            self.learn(before)

    def learn(self, before: Snapshot) -> list[str]:
        """Note what differs from a snapshot; return the names of what was not known to change."""
        changed = before.changed()
        new = [name for place, name in changed.items() if place[:2] not in self._volatile and len(place) > 1]
        for leaf in before.leaves:
            if leaf.place in changed and leaf.changed():
                self._mutated.add(leaf.place)
                if not leaf.exact and self.refused is None:
                    what = "does not tell whether it moves" if leaf.untold else "changes"
                    self.refused = (
                        f"{leaf.name} ({type(leaf.thing).__name__}) {what} in the forward, and cannot be put back"
                    )
        given = next((one for one in before.containers if not one.exact), None)
        if given is not None and self.refused is None:
            self.refused = (
                f"{given.name} (set) gives away elements in the forward; which comes next then cannot be put back"
            )
        self._volatile |= {place[:2]: name for place, name in changed.items() if len(place) > 1}
        return new

    def surroundings(self) -> Reading:
        """Return, by reference, what a forward that begins now finds around it."""
        if self._redirected():
            self._code = self._around = None
        if self._around is None:
            self._around = self._search()
        reading = self._around.read()
        if reading.code or self._structure not in (None, reading.structure):  # other code, which uses names of its own
            self._code = None
            self._around = self._search()
            reading = self._around.read()
        self._structure = reading.structure
        self._mind_left_out(self._around.left_out)
        return reading

    def know(self, things: Iterable[Any]) -> None:
        """Look at these, too: functions, classes and objects of the script's that a step ran beside the modules' code.

        Those of other steps are let go: a script may make its modes and hooks anew in each.
        """
        now = list({id(thing): thing for thing in things}.values())
        if len(now) != len(self._beside) or any(a is not b for a, b in zip(now, self._beside, strict=True)):
            self._beside = now
            self._code = self._around = None

    def _redirected(self) -> bool:
        """Tell whether the root's own ``forward`` was replaced by other code of the script's since it was looked at."""
        forward = vars(self._root).get("forward")
        function = getattr(forward, "__func__", forward)
        if function is self._forward or not (function is None or is_users_function(function)):
            return False  # frameworks send the root's call elsewhere for a while
        self._forward = function
        return True

    def _search(self) -> Surroundings:
        modules = [(name or type(m).__name__, m) for name, m in self._root.named_modules()]
        return Surroundings(modules, self._namespaces_of_code())

    def moved(self, before: Reading, *, but_state: bool = False) -> str | None:
        """Return what a forward that is repeated now would find otherwise; None if nothing.

        The forward or the script has changed it since; from now on it is put back, where that is possible. ``but_state``: what
        is known to change does not count.
        """
        changed = before.changed()
        if but_state:
            changed = {place: name for place, name in changed.items() if place[:2] not in self._volatile}
        self._volatile |= {place[:2]: name for place, name in changed.items() if len(place) > 1}
        return next(iter(changed.values()), None)

    def _namespaces_of_code(self) -> dict[str, Namespace]:
        """Return the namespaces that code uses, by names that stay where others come or go."""
        if self._code is None:
            self._code = {}
            before: Counter[str] = Counter()
            for namespace in namespaces_of(self._root, self._beside):
                name = namespace[0]
                self._code[f"code {name} {before[name]}"] = namespace
                before[name] += 1
        return self._code

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor is held, in an attribute or in containers there; None if it is not."""
        for path in self._found:
            if self.value(path) is tensor:
                return path
        for key, (_, thing, keys) in self._namespaces().items():
            for name, value in read(thing, keys).items():
                found = _within(value, tensor, (key, name), 0)
                if found is not None:
                    self._found.append(found)
                    return found
        return None

    def value(self, path: Place) -> Any:
        """Return what is at a place now; None if nothing is."""
        namespaces = self._namespaces()
        if path[0] not in namespaces:
            return None
        value: Any = read(namespaces[path[0]][1], namespaces[path[0]][2])
        for key in path[1:]:
            try:
                value = value[key]
            except (LookupError, TypeError):
                return None
        return value

    def everything(self, given: Iterable[Any] = ()) -> Snapshot:
        """Return all that can be reached, as it is now; ``given``: what forwards were given besides tensors, too."""
        walk = SnapshotWalk(known=self._known)
        for index, value in enumerate(given):
            walk.enter((ARGUMENT, index), f"argument {index}", value)
        for key, (name, thing, keys) in self._namespaces().items():
            walk.namespace((key,), name, thing, keys)
        self._mind_left_out(walk.snapshot.left_out)
        return walk.snapshot

    def _known(self) -> frozenset[int]:
        """Return the ``id`` of the root's own modules and parameters, which are minded elsewhere."""
        return frozenset((*map(id, self._root.modules()), *map(id, self._root.parameters())))

    def _mind_left_out(self, name: str | None) -> None:
        if name is not None and self.refused is None:
            self.refused = f"the forward's code reaches more than can be looked at, {name} for one"

    def _namespaces(self) -> dict[Any, tuple[str, Any, frozenset[str] | None]]:
        found: dict[Any, tuple[str, Any, frozenset[str] | None]] = {}
        for position, (name, module) in enumerate(self._root.named_modules()):
            found[position] = name or type(module).__name__, module, None
        return found | self._namespaces_of_code()


def _within(value: Any, tensor: torch.Tensor, path: Place, depth: int) -> Place | None:
    if value is tensor:
        return path
    if depth > _NESTED or not isinstance(value, dict | list | tuple):
        return None
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if (found := _within(item, tensor, (*path, key), depth + 1)) is not None:
            return found
    return None
