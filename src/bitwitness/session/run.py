"""What a session has for all of its instruments: the ranks, and the run folders, claimed by all ranks together."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from bitwitness.ranks import Ranks
from bitwitness.store import RunWriter, claim_folder, release_folder
from bitwitness.tap.process_groups import join_ranks


@dataclass
class _Claimed:
    """A run folder, the name that was asked for, and what goes into it now."""

    out: str
    writer: RunWriter
    holds: set[str] = field(default_factory=set)
    used: bool = False


class TrainingRun:
    """The ranks that train one model, and the folders in which its instruments record.

    Parameters
    ----------
    model
        What the training calls.

    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ranks: Ranks | None = None
        self._claimed: list[_Claimed] = []

    @property
    def rank(self) -> int:
        """The number of this process in the job, as far as it is known."""
        return 0 if self._ranks is None else self._ranks.in_job

    def ranks(self, deadline_s: float) -> Ranks:
        """Return the ranks; joined at the first call, which all of them make. Collective."""
        if self._ranks is None:
            self._ranks = join_ranks(self._model, deadline_s)
        return self._ranks

    def folder(self, out: str, what: str, deadline_s: float) -> RunWriter:
        """Return the writer of the run folder ``out``, the same for all instruments that name it. Collective.

        ``what`` is to go there: where another run is, or the same, a folder beside it is taken.
        """
        ranks = self.ranks(deadline_s)
        shared = next((one for one in self._claimed if one.out == out and what not in one.holds), None)
        if shared is None:
            path = ranks.broadcast_text(str(claim_folder(out)) if ranks.rank == 0 else "", 0)
            shared = _Claimed(out, RunWriter(path, ranks.rank, ranks.size))
            self._claimed.append(shared)
        shared.holds.add(what)
        return shared.writer

    def leave(self, writer: RunWriter, what: str, *, unused: bool = False) -> None:
        """Close a folder with the last that goes into it; remove it where nothing was recorded there."""
        for one in [one for one in self._claimed if one.writer is writer]:
            one.holds.discard(what)
            one.used |= not unused
            if not one.holds:
                self._claimed.remove(one)
                writer.close()
                if not one.used:
                    release_folder(writer.path, writer.rank)

    def close(self) -> None:
        """Close what is open."""
        for one in self._claimed:
            one.writer.close()
        self._claimed.clear()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
