"""A value that was changed in memory after it was made, past torch: through numpy, or another pointer to it.

No operator did it and no version tells of it. But all that read it give other results than in the other run, from the same
inputs as far as is recorded: that so many operators computed wrongly at once, and none of another input, is hard to believe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.suspect import Suspect

_READERS = 2
_FORWARD = ("op", "forward")
_NAMED = 3  # readers that are named in a sentence


def changed_past_torch(suspects: Sequence[Suspect], differences: Differences) -> list[Suspect]:
    """Return suspects in their order; those that read one such value as one, which names what made it."""
    computed: defaultdict[tuple[int, int], list[Suspect]] = defaultdict(list)
    for one in suspects:
        if one.reason == "computed" and one.pair is not None and (one.pair.a.kind, one.pair.a.phase) == _FORWARD:
            for value in {int(differences.a.value[row]) for row, _ in one.pair.inputs}:
                computed[value, one.micro].append(one)
    for (value, micro), readers in computed.items():
        maker = _maker(differences, value, readers[0])
        numbers = {one.pair.a.number for one in readers if one.pair is not None}
        if maker is None or len(numbers) < _READERS or numbers != _readers_of(differences, value, micro):
            continue
        if _were_right_before(differences, readers[0]):
            told, others = _told(differences, maker, value, readers), set(map(id, readers[1:]))
            return [told if one is readers[0] else one for one in suspects if id(one) not in others]
    return list(suspects)


def _were_right_before(differences: Differences, reader: Suspect) -> bool:
    """Return whether the same operator gave what it should earlier in the step: it is not its kernel, then."""
    assert reader.pair is not None  # noqa: S101 - the caller asked
    node = reader.pair.a
    like = (pair.a.number for pair in differences.alignment.pairs if (pair.a.kind, pair.a.op) == ("op", node.op))
    return any(
        number < node.number and number in differences.largest and number not in differences.real for number in like
    )


def _maker(differences: Differences, value: int, reader: Suspect) -> Pair | None:
    """Return what made a value: a parameter has no maker, and is recorded anew in each step."""
    assert reader.pair is not None  # noqa: S101 - the caller asked
    row = next(row for row, _ in reader.pair.inputs if int(differences.a.value[row]) == value)
    return differences.makers.maker(row)


def _readers_of(differences: Differences, value: int, micro: int) -> set[int]:
    """Return the numbers of all operators of the forward that read a value."""
    return {
        pair.a.number
        for pair in differences.alignment.pairs
        if (pair.a.kind, pair.a.phase, pair.a.micro) == (*_FORWARD, micro)
        and any(int(differences.a.value[row]) == value for row, _ in pair.inputs)
    }


def _told(differences: Differences, maker: Pair, value: int, readers: Sequence[Suspect]) -> Suspect:
    out = next((row for row, _ in maker.outputs if int(differences.a.value[row]) == value), maker.outputs[0][0])
    sites = [one.site.rpartition(".")[0] for one in readers]
    listed = ", ".join(sites[:_NAMED]) + (f" and {len(sites) - _NAMED} others" if len(sites) > _NAMED else "")
    text = (
        f"all that read it ({listed}) give other results, and all that they read is recorded alike: it was changed in memory "
        "after it was made, past torch (through numpy, or another pointer to it), or each of them computed wrongly"
    )
    first = readers[0]
    return replace(
        first,
        site=f"{maker.a.site}.{differences.a.text('slot', out)}",
        reason="edited",
        text=text,
        pair=maker,
        stack=int(differences.a.stack[maker.a.rows[0]]),
        rows=None,
    )
