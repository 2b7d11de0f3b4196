"""Experiment 0: do all ranks hold the same state? A mismatch is corrupted *state*, its own cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bitwitness.ranks import Ranks
from bitwitness.stats import norms_of
from bitwitness.stats.digest import bit_hashes

# Share of the gradients that differ where ranks share none. A few may be equal all the same: those that are zero on all.
_NEARLY_ALL = 0.9
# By how much one rank's factors between its gradients before and after may differ. Clipping scales all alike, but for
# rounding, and a reduction does not.
_CONSTANT = 1e-3


@dataclass(frozen=True, slots=True)
class Desync:
    """A replicated tensor whose bits differ: which one, and the ranks that stand against the majority."""

    name: str
    ranks: tuple[int, ...]
    hashes: tuple[int, ...]
    count: int
    majority: bool


def find_desync(ranks: Ranks, names: list[str], hashes: torch.Tensor) -> Desync | None:
    """Compare bit hashes of replicated tensors over the ranks; collective.

    Parameters
    ----------
    ranks
        The side channel.
    names
        The tensors' names, equal on every rank.
    hashes
        int64 [len(names)], this rank's bit hashes.

    Returns
    -------
    None if every rank holds the same bits, else the first tensor that differs. What is exchanged grows with the number of
    tensors, plus one word a rank, never with their product.

    """
    if ranks.size == 1 or not names:
        return None
    host = hashes.cpu()
    # max(h) == min(h), with min(h) = -max(-h); the complement avoids the one int64 that has no negative
    extremes = ranks.max(torch.cat([host, ~host]))
    differs = extremes[: len(names)] != ~extremes[len(names) :]
    if not bool(differs.any()):
        return None
    first = int(differs.nonzero()[0])
    everyone = tuple(ranks.gather(host[first : first + 1]).reshape(-1).tolist())
    common, votes = Counter(everyone).most_common(1)[0]
    odd = tuple(rank for rank, value in enumerate(everyone) if value != common)
    return Desync(names[first], odd, everyone, int(differs.sum()), majority=2 * votes > len(everyone))


def train_apart(ranks: Ranks, gradients: Sequence[torch.Tensor | None], local: NDArray[np.float64]) -> bool:
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

    """
    there = torch.tensor([g is not None for g in gradients], dtype=torch.bool)
    mine = [g.detach() for g in gradients if g is not None]
    somewhere = int(ranks.max(there.float()).sum())
    hashes = torch.zeros(len(gradients), dtype=torch.int64)
    if mine:
        hashes[there] = bit_hashes(mine).cpu()
    found = find_desync(ranks, [str(index) for index in range(len(gradients))], hashes)
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
