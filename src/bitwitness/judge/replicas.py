"""Experiment 0: do all ranks hold the same state? A mismatch is corrupted *state*, its own cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bitwitness.ranks import Ranks
from bitwitness.sense.held import Name
from bitwitness.site import Site
from bitwitness.stats import bit_hash, norms_of
from bitwitness.stats.digest import bit_hashes

Named = str | Name

# Share of the gradients that differ where ranks share none. A few may be equal all the same: those that are zero on all.
_NEARLY_ALL = 0.9
# By how much one rank's factors between its gradients before and after may differ. Clipping scales all alike, but for
# rounding, and a reduction does not.
_CONSTANT = 1e-3


@dataclass(frozen=True, slots=True)
class Desync:
    """A replicated tensor whose bits differ: which one, and the ranks that stand against the majority.

    Attributes
    ----------
    name
        Whose bits differ.
    ranks
        Those that hold other bits than most.
    hashes
        What each rank that is to hold the same bits has, in their order.
    count
        How many tensors differ.
    majority
        Whether more than half of them agree.
    positions
        All tensors that differ, by number.
    members
        The ranks that are to hold the same bits.

    """

    name: Named
    ranks: tuple[int, ...]
    hashes: tuple[int, ...]
    count: int
    majority: bool
    positions: tuple[int, ...] = ()
    members: tuple[int, ...] = ()

    @property
    def others(self) -> str:
        """How many more tensors differ, in words that follow the first one's name."""
        more = self.count - 1
        return f" and {more} more tensor{'s' * (more > 1)}" if more else ""

    @property
    def site(self) -> Site:
        """Where the first one is."""
        return (self.name if isinstance(self.name, Name) else Name(self.name)).site

    def hash_of(self, rank: int) -> int:
        """Return the hash that a rank has of it; 0 of one that holds something else."""
        return dict(zip(self.members, self.hashes, strict=True)).get(rank, 0)


def find_desync(
    ranks: Ranks, names: Sequence[Named], hashes: torch.Tensor, groups: Sequence[int] | None = None
) -> Desync | None:
    """Compare bit hashes of replicated tensors over the ranks; collective.

    Parameters
    ----------
    ranks
        The side channel.
    names
        The tensors' names, equal on every rank.
    hashes
        int64 [len(names)], this rank's bit hashes.
    groups
        Every rank's group, by rank: only ranks of one group hold the same tensors. None: all do.

    Returns
    -------
    None if every rank holds the same bits, else the first tensor that differs. As long as nothing does, one word a rank is
    exchanged; then two for each tensor, and one more a rank.

    """
    if ranks.size == 1:
        return None
    groups = [0] * ranks.size if groups is None else groups
    host = hashes.cpu()
    differing = _differing(ranks.gather(bit_hash(host).reshape(1)).reshape(-1).tolist(), groups)
    if differing is None or not names:
        return None
    # max(h) == min(h), with min(h) = -max(-h); the complement avoids the one int64 that has no negative
    mine = torch.cat([host, ~host])
    if groups[ranks.rank] != differing:
        mine.fill_(torch.iinfo(torch.int64).min)  # the least, which sways no maximum
    extremes = ranks.max(mine)
    differs = extremes[: len(names)] != ~extremes[len(names) :]
    first = int(differs.nonzero()[0])
    told = ranks.gather(host[first : first + 1]).reshape(-1).tolist()
    everyone = {rank: value for rank, value in enumerate(told) if groups[rank] == differing}
    common, votes = Counter(everyone.values()).most_common(1)[0]
    odd = tuple(rank for rank, value in everyone.items() if value != common)
    positions = tuple(differs.nonzero().reshape(-1).tolist())
    majority = 2 * votes > len(everyone)
    return Desync(names[first], odd, tuple(everyone.values()), len(positions), majority, positions, tuple(everyone))


def _differing(words: list[int], groups: Sequence[int]) -> int | None:
    """Return the first group whose ranks gave different words; None if there is none."""
    seen: dict[int, int] = {}
    for word, group in zip(words, groups, strict=True):
        if seen.setdefault(group, word) != word:
            return group
    return None


def train_apart(
    ranks: Ranks,
    gradients: Sequence[torch.Tensor | None],
    local: NDArray[np.float64],
    groups: Sequence[int] | None = None,
) -> bool:
    """Return whether ranks whose weights differ share no gradients, as in local SGD; collective.

    A device that computes wrongly, or a reduction that goes wrong on one rank, makes one rank's gradients differ. Here nearly
    all differ and no majority of the ranks agrees on any; and where two ranks have no majority, each one's are its own local
    ones, all by the same factor.

    Parameters
    ----------
    ranks
        The side channel.
    gradients
        Of this rank, as its optimizer is about to use them.
    local
        float64 [len(gradients)], the L2 norms of the same gradients before anything was reduced.
    groups
        As for `find_desync`.

    """
    there = torch.tensor([g is not None for g in gradients], dtype=torch.bool)
    mine = [g.detach() for g in gradients if g is not None]
    somewhere = int(ranks.max(there.float()).sum())
    hashes = torch.zeros(len(gradients), dtype=torch.int64)
    if mine:
        hashes[there] = bit_hashes(mine).cpu()
    found = find_desync(ranks, [str(index) for index in range(len(gradients))], hashes, groups)
    if found is None or found.majority or found.count < _NEARLY_ALL * somewhere:
        return False
    if ranks.size > 2:
        return True  # nearly all differ, and no majority agrees on any: no single fault does that
    return not bool(ranks.max(torch.tensor([float(not _in_proportion(mine, local[there.numpy()]))])))


def _in_proportion(gradients: Sequence[torch.Tensor], local: NDArray[np.float64]) -> bool:
    if not gradients:
        return False
    norms = norms_of(gradients, gradients[0].device).cpu().double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = norms / local
    factors = factors[np.isfinite(factors) & (factors > 0)]
    return bool(factors.size) and float(factors.max() / factors.min()) < 1 + _CONSTANT
