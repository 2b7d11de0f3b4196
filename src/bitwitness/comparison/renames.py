"""Names of parameters that differ only by what a wrapper put in front of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

PREFIXES = ("module.", "_orig_mod.", "model.")
"""Of DistributedDataParallel, of `torch.compile` (which also wraps parts: there it stands within), and of whole models."""

_CHOICES = [chosen for count in range(len(PREFIXES) + 1) for chosen in combinations(PREFIXES, count)]


@dataclass(frozen=True, slots=True)
class Names:
    """What each side calls a tensor: the name in common, and each side's own; and what was stripped, in words."""

    a: dict[str, str]
    b: dict[str, str]
    stripped: list[str]


def matched(a: Iterable[str], b: Iterable[str]) -> Names:
    """Strip prefixes where that gives the two sides more names in common; the fewest that do."""
    plain_a, plain_b = {name: name for name in a}, {name: name for name in b}
    if plain_a.keys() == plain_b.keys():
        return Names(plain_a, plain_b, [])
    variants_a, variants_b = _variants(plain_a), _variants(plain_b)
    _, chosen_a, chosen_b = max(
        ((len(x.keys() & y.keys()), chosen_a, chosen_b) for chosen_a, x in variants_a for chosen_b, y in variants_b),
        key=lambda one: (one[0], -len(one[1]) - len(one[2])),
    )
    names_a, names_b = dict(variants_a)[chosen_a], dict(variants_b)[chosen_b]
    return Names(names_a, names_b, [*_told("A", names_a, chosen_a), *_told("B", names_b, chosen_b)])


def _variants(names: dict[str, str]) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """Return the names with each choice of prefixes stripped, where they stay different from one another."""
    variants = []
    for chosen in _CHOICES:
        renamed = {_stripped(name, chosen): name for name in names}
        if len(renamed) == len(names):
            variants.append((chosen, renamed))
    return variants


def _stripped(name: str, prefixes: tuple[str, ...]) -> str:
    if "_orig_mod." in prefixes:
        name = name.removeprefix("_orig_mod.").replace("._orig_mod.", ".")
    while prefix := next((one for one in prefixes if name.startswith(one)), None):
        name = name.removeprefix(prefix)
    return name


def _told(side: str, names: dict[str, str], chosen: tuple[str, ...]) -> list[str]:
    if not chosen:
        return []
    count = sum(1 for name, own in names.items() if name != own)
    return [f"{' and '.join(map(repr, chosen))} was stripped from {count} names of {side}"]
