"""The ranks compare what they noted of a step's collectives: a handful of exchanges, whose size grows with the calls.

Words of all calls travel together, each group's in a place of its own, so that ranks that belong to different groups (tensor
parallel beside data parallel) answer the same few exchanges; nobody waits for a collective that another rank did not make.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitwitness.ranks import Ranks
from bitwitness.sense.collective import Noted, described
from bitwitness.sense.mismatch import Mismatch
from bitwitness.site import Site
from bitwitness.stats import in_hex

_LEAST = -(1 << 63)
_MOST_WORDS = 1 << 16  # of one deep step, over all groups
_DIFFERS, _CONTRADICTS = 1, 2
_FOR_ONE = ("reduce_scatter", "all_to_all")


@dataclass(slots=True)
class _Place:
    """Where a group's words stand."""

    calls: int
    first_call: int
    first_int: int
    first_float: int


@dataclass(slots=True)
class Comparison:
    """Compares steps; remembers what was ever equal."""

    compared: Counter[str] = field(default_factory=Counter)
    """Calls that were compared, by what they are."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Calls that were not, by the reason."""
    mismatches: int = 0
    _equal: set[tuple[Any, ...]] = field(default_factory=set)

    def compare(self, ranks: Ranks, noted: list[Noted]) -> Mismatch | None:
        """Compare a step's calls; collective over ``ranks``, whatever this rank has noted.

        Raises
        ------
        SideChannelError
            If a rank does not answer.

        """
        groups: dict[tuple[int, ...], list[Noted]] = defaultdict(list)
        for call in noted:
            if set(call.group) <= set(ranks.members):
                groups[call.group].append(call)
            else:
                self.skipped["with ranks that do not train this model together"] += 1
        places = self._agree(ranks, groups)
        mine = [(places[_key(g)], calls) for g, calls in groups.items() if _key(g) in places]
        total = _total(places)
        if not total.calls:
            return None
        extremes = ranks.max(_extremes(mine, total.calls)).reshape(-1, 3)
        ints, floats, squares = self._sums(ranks, mine, total)
        ready = extremes[:, 2] == 0
        differs = ready & (extremes[:, 0] != ~extremes[:, 1])
        flags = torch.zeros(total.calls, dtype=torch.int64)
        parts = torch.zeros(total.calls, dtype=torch.int64)
        for place, calls in mine:
            for call, slot, i, f in _slots(place, calls):
                if not bool(ready[slot]):
                    self.skipped["not waited for in Python, or changed at once"] += 1
                    continue
                self.compared[call.op] += 1
                parts[slot] = call.wrong(
                    ints[i : i + call.ints], floats[f : f + call.floats], squares[f : f + call.floats]
                )
                flags[slot] = _CONTRADICTS * int(parts[slot] > 0) | self._unequal(call, bool(differs[slot]))
        worst = ranks.max(flags)
        if not bool(worst.any()):
            return None
        self.mismatches += 1
        slot = int(worst.nonzero()[0])
        return self._conclude(ranks, mine, slot, int(flags[slot]), int(parts[slot]))

    def _unequal(self, call: Noted, differs: bool) -> int:
        """Tell whether bits that differ count: some backend may reduce in another order on each rank, always."""
        kind = call.group, call.op, call.reduction, call.dtype
        if not differs:
            self._equal.add(kind)
            return 0
        if call.op == "all_reduce" and kind not in self._equal:
            self.skipped["equality: not seen to give all ranks the same bits so far"] += 1
            return 0
        return _DIFFERS

    def _agree(self, ranks: Ranks, groups: dict[tuple[int, ...], list[Noted]]) -> dict[str, _Place]:
        """Settle which groups' calls are compared, and where their words stand; collective."""
        told = {_key(group): _row(calls) for group, calls in groups.items()}
        everyone = [json.loads(text) if text else {} for text in ranks.gather_text(json.dumps(told))]
        rows: dict[str, list[list[int]]] = defaultdict(list)
        for one in everyone:
            for key, row in one.items():
                rows[key].append(row)
        places: dict[str, _Place] = {}
        calls = ints = floats = 0
        for key, found in sorted(rows.items()):
            size, row = int(key.split("-")[0]), found[0]
            alike = len(found) == size and all(other == row for other in found)
            if not alike or 3 * (calls + row[0]) + ints + row[2] + floats + row[3] > _MOST_WORDS:
                reason = "too many for one step" if alike else "the ranks of a group did not make the same ones"
                self.skipped[reason] += told.get(key, [0])[0]
                continue
            places[key] = _Place(row[0], calls, ints, floats)
            calls, ints, floats = calls + row[0], ints + row[2], floats + row[3]
        places[""] = _Place(calls, 0, ints, floats)
        return places

    def _sums(
        self, ranks: Ranks, mine: list[tuple[_Place, list[Noted]]], total: _Place
    ) -> tuple[Tensor, Tensor, Tensor]:
        ints = torch.zeros(total.first_int, dtype=torch.int64)
        floats = torch.zeros(2, total.first_float, dtype=torch.float64)
        for place, calls in mine:
            for call, _, i, f in _slots(place, calls):
                if call.given_ints is not None:
                    ints[i : i + call.ints] = call.given_ints
                if call.given_floats is not None and call.squares is not None:
                    floats[0, f : f + call.floats] = call.given_floats
                    floats[1, f : f + call.floats] = call.squares
        summed = ranks.sum(floats) if floats.numel() else floats
        return (ranks.sum(ints) if ints.numel() else ints), summed[0], summed[1]

    def _conclude(
        self, ranks: Ranks, mine: list[tuple[_Place, list[Noted]]], slot: int, flag: int, part: int
    ) -> Mismatch:
        """Say whose result of one call is wrong; collective."""
        call = next((c for place, calls in mine for c, at, _, _ in _slots(place, calls) if at == slot), None)
        word = 0 if call is None or call.word is None else int(call.word)
        rows = ranks.gather(torch.tensor([int(call is not None), flag, word, part], dtype=torch.int64)).tolist()
        members = [rank for rank, row in enumerate(rows) if row[0]]
        text = ranks.broadcast_text(
            json.dumps(described(call)) if ranks.rank == members[0] and call else "", members[0]
        )
        evidence: dict[str, Any] = json.loads(text)
        words = {rank: (rows[rank][1], rows[rank][2]) for rank in members}
        odd = odd_ones(words, evidence.get("root"))
        pieces = [row[3] for row in rows if row[3]]
        if evidence["op"] == "all_reduce" and evidence["reduction"] in ("sum", "avg") and pieces:
            evidence |= named_element(ranks, call, pieces[0] - 1)
        evidence["hashes_by_rank"] = [in_hex(rows[rank][2]) for rank in members]
        evidence["contradicted_on"] = [rank for rank in members if rows[rank][1] & _CONTRADICTS]
        site = Site(".", str(evidence["op"]), int(evidence["call"]), "backward", "out0")
        # A piece that one rank alone receives has been wrong there, or on its way, or with one that gave: nobody else can tell.
        blamed = () if evidence["op"] in _FOR_ONE else odd
        return Mismatch(_text(evidence, odd, members), blamed, site, {"collective": evidence}, "received wrongly")


def odd_ones(rows: dict[int, tuple[int, int]], sender: int | None = None) -> tuple[int, ...]:
    """Return the ranks whose result is wrong, from each member's flags and word; empty where that is not known.

    Those whose result contradicts what was put in; else those whose word is not that of the ``sender``, who has seen what it
    sent; where there is none, or all contradict, those whose word is not that of a majority.
    """
    contradicting = tuple(rank for rank, (flag, _) in rows.items() if flag & _CONTRADICTS)
    if contradicting and len(contradicting) < len(rows):
        return contradicting
    if sender is not None:
        return tuple(rank for rank, (_, word) in rows.items() if word != rows[sender][1])
    common, votes = Counter(word for _, word in rows.values()).most_common(1)[0]
    if 2 * votes <= len(rows) or votes == len(rows):
        return ()
    return tuple(rank for rank, (_, word) in rows.items() if word != common)


def named_element(ranks: Ranks, call: Noted | None, piece: int) -> dict[str, Any]:
    """Add what the ranks gave once more, in float64, for the piece that is wrong; return the worst element; collective."""
    here = call is not None and len(call.kept) == 2
    absent = call is not None and not here
    part = slice(piece * call.length, (piece + 1) * call.length) if call is not None else slice(0, 0)
    given = call.kept[0][part].double().cpu() if call is not None and here else torch.zeros(0, dtype=torch.float64)
    missing, length = ranks.max(torch.tensor([int(absent), given.numel()])).tolist()
    if missing or not length:
        return {}
    if not given.numel():
        given = torch.zeros(length, dtype=torch.float64)
    exact = ranks.sum(given)
    rows = torch.zeros(4, dtype=torch.float64)
    if call is not None and here:
        exact = exact / (len(call.group) if call.reduction == "avg" else 1)
        got = call.kept[1][part].double().cpu()
        gap = (got - exact).abs().nan_to_num(nan=float("inf"))
        at = int(gap.argmax())
        rows = torch.stack([gap[at], got[at], exact[at]])
        rows = torch.cat([rows, torch.tensor([float(part.start + at)], dtype=torch.float64)])
    table = ranks.gather(rows)
    worst = table[int(table[:, 0].nan_to_num(nan=0.0).argmax())].tolist()
    return {"element": int(worst[3]), "value": worst[1], "expected": worst[2]}


def _text(evidence: dict[str, Any], odd: tuple[int, ...], members: list[int]) -> str:
    what = f"{evidence['op']} {evidence['reduction']}".strip()
    where = f"call {evidence['call']} of the step among ranks {', '.join(map(str, members))}"
    element = ""
    if "element" in evidence:
        element = (
            f"; element {evidence['element']} is {evidence['value']:.6g}, the sum in float64 {evidence['expected']:.6g}"
        )
    whose = f"rank {', '.join(map(str, odd))} received" if odd else f"{len(members)} ranks received"
    wrong = "something else than was put in" if evidence["contradicted_on"] else "other bits than the others"
    return f"{what} ({where}): {whose} {wrong}{element}"


def _key(group: tuple[int, ...]) -> str:
    return f"{len(group)}-{zlib.crc32(str(group).encode()):08x}"


def _row(calls: list[Noted]) -> list[int]:
    signature = zlib.crc32("\n".join(call.signature for call in calls).encode())
    return [len(calls), signature, sum(call.ints for call in calls), sum(call.floats for call in calls)]


def _total(places: dict[str, _Place]) -> _Place:
    return places.pop("")


def _slots(place: _Place, calls: list[Noted]) -> list[tuple[Noted, int, int, int]]:
    """Return each call with the places of its words, its integers and its floating numbers."""
    found, i, f = [], place.first_int, place.first_float
    for number, call in enumerate(calls):
        found.append((call, place.first_call + number, i, f))
        i, f = i + call.ints, f + call.floats
    return found


def _extremes(mine: list[tuple[_Place, list[Noted]]], calls: int) -> Tensor:
    """Return, of each call, the word and its complement, so that a maximum gives both extremes, and whether it is not over."""
    rows = torch.full((calls, 3), _LEAST, dtype=torch.int64)
    rows[:, 2] = 0
    for place, own in mine:
        for call, slot, _, _ in _slots(place, own):
            word = torch.zeros((), dtype=torch.int64) if call.word is None else call.word
            rows[slot] = torch.stack([word, ~word, torch.tensor(int(not call.over))])
    return rows.reshape(-1)
