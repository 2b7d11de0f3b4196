"""Experiment 0: do all ranks hold the same state? A mismatch is corrupted *state*, its own cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from bitwitness.ranks import Ranks


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
