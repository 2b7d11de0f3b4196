"""The rows of one rank's recording, in order: nodes get their numbers here, and rows the step that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bitwitness.record.values import Noted, Values
from bitwitness.session.clock import StepClock
from bitwitness.site import Site, matches
from bitwitness.tap.compat import in_transform


@dataclass(slots=True)
class Selection:
    """Which sites are recorded: those of some phases that match one of the globs; all, where nothing is said."""

    sites: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    all: bool = field(init=False)
    """Whether nothing is left out."""
    _known: dict[Site, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all = not self.sites and not self.phases

    def wants(self, site: Site) -> bool:
        """Tell whether a site is recorded."""
        if self.all:
            return True
        known = self._known.get(site)
        if known is None:
            known = (not self.phases or site.phase in self.phases) and (
                not self.sites or any(matches(glob, site) for glob in self.sites)
            )
            self._known[site] = known
        return known


class NodeValue(NamedTuple):
    """One value of a node: where it was seen and what is known of it."""

    site: Site
    noted: Noted


class Log:
    """Collects rows until they are handed to the writer.

    Parameters
    ----------
    clock
        Numbers steps and micro-batches.
    values
        Measures what is new.
    selection
        What is recorded at all.

    """

    def __init__(self, clock: StepClock, values: Values, selection: Selection) -> None:
        self._clock = clock
        self.values = values
        self.selection = selection
        self._rows: list[tuple[object, ...]] = []
        self._seq = 0
        self._nodes = 0
        self.backward = False
        """Whether a backward is running: what runs forward in it is recomputed,"""
        self.twice = False
        """unless it makes a graph of its own: then it is the backward itself, to be differentiated once more."""

    @property
    def micro(self) -> int:
        """The number of the micro-batch."""
        return self._clock.micro

    @property
    def begun(self) -> bool:
        """Whether a step runs, and has not ended."""
        return self._clock.begun

    @property
    def now(self) -> tuple[int, int]:
        """The numbers of the step and of its micro-batch."""
        return self._clock.step, self._clock.micro

    def node(self) -> int:
        """Return the number of a new node."""
        self._nodes += 1
        return self._nodes - 1

    def see(
        self, site: Site, tensor: torch.Tensor, *, overwritten: bool = False, noted: Noted | None = None
    ) -> NodeValue | None:
        """Note a value now, to be added later; None if its site is not recorded. ``overwritten``: see `Values.note`.

        ``noted``: what was noted of it just now.

        Inside a transform of ``torch.func`` the operators beneath it are recorded, and not the tensors that stand for many;
        of a model on the meta device, which holds no numbers, nothing is.
        """
        if not self.selection.wants(site) or in_transform() or tensor.is_meta:
            return None
        return NodeValue(site, noted or self.values.note(tensor, site, overwritten=overwritten))

    def add(self, entry: NodeValue, node: int, kind: str, *, args: str | None = None, stack: int = -1) -> None:
        """Add a row."""
        site, noted = entry.site, entry.noted
        self._seq += 1
        self._rows.append(
            (
                self._clock.step,
                self._clock.micro,
                self._seq,
                node,
                kind,
                site.phase,
                site.module,
                site.op,
                site.call,
                site.slot,
                noted.dtype,
                noted.shape,
                noted.placement,
                noted.layout,
                noted.number,
                noted.producer,
                noted.name,
                args,
                stack,
                noted.tensor,
                self.backward and not self.twice and site.phase == "forward",
            )
        )

    def record(
        self,
        site: Site,
        tensor: torch.Tensor,
        node: int,
        kind: str,
        *,
        args: str | None = None,
        noted: Noted | None = None,
    ) -> None:
        """Note a value, unless it was ``noted`` just now, and add its row at once."""
        entry = self.see(site, tensor, noted=noted)
        if entry is not None:
            self.add(entry, node, kind, args=args)

    def take(self) -> list[tuple[object, ...]]:
        """Return the rows since the last call."""
        rows, self._rows = self._rows, []
        return rows


Fail = Callable[[str, BaseException], None]
"""Told of an error inside the recording: which part, and what; that part ends, the training goes on."""
