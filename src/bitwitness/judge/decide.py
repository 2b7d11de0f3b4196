"""From who agrees with whom to who is wrong: the pure part of the judgement, without torch and without ranks.

Every execution of a payload that did not give the right result (`judge.agreement`) was wrong, and is counted against the
device that made it.

What is counted against a device is no conviction yet. One that contradicts *itself* beyond the known spread is convicted;
one that always gives the same, and another result than the others do, may run another algorithm: an operator has to
be found whose result float64 contradicts (`Judgement.unproven`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bitwitness.finding import Cause
from bitwitness.judge.agreement import LOCAL, NAMES, Agreement, Match, device_of, right_executions, spreading

PARTIAL = "but the loss code outside the model was not repeated: a fault there would not be seen"
CANNOT = "the step cannot be run again"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the table says. ``ranks`` are the culprits; ``heal`` tells that all gradients can be replaced by agreed ones.

    ``skip``: the gradients are wrong and cannot be replaced: the replay started from a wrong one, or another rank's
    executions do not agree. ``disputed``: two ranks that contradict each
    other where no third can decide. ``unproven``: rank and witness whose operators have to be compared before the cause counts;
    ``far`` then tells that the results are further apart than any two healthy algorithms'.
    """

    cause: Cause
    ranks: tuple[int, ...] = ()
    heal: bool = False
    skip: bool = False
    intermittent: bool = False
    disputed: tuple[int, ...] = ()
    unproven: tuple[int, ...] = ()
    far: bool = False
    reason: str = ""
    wrong: dict[int, list[str]] = field(default_factory=dict)
    weak: bool = False
    """Whether what differs speaks against nobody: once, by rounding, or in a script that may do what no replay repeats."""


@dataclass(slots=True)
class _Tally:
    """Wrong executions by device, and what stayed open."""

    wrong: dict[int, list[tuple[int, int, Match]]] = field(default_factory=dict)
    disputes: list[tuple[int, int]] = field(default_factory=list)
    unresolved: list[int] = field(default_factory=list)


def _count(rows: Sequence[Agreement]) -> _Tally:
    size = len(rows)
    tally = _Tally()
    for rank, row in enumerate(rows):
        right = right_executions(row, rank, size)
        if right is None:
            tally.unresolved.append(rank)
            # Of two ranks, each of which always agrees with itself, no third can say which is right.
            local = {row.match(0, 1), row.match(0, 2), row.match(1, 2)}
            if size == 2 and local == {Match.EQUAL}:
                tally.disputes.append((rank, device_of(3, rank, size)))
            continue
        for execution in row.made():
            if execution not in right:
                device = device_of(execution, rank, size)
                how = row.match(right[0], execution)
                tally.wrong.setdefault(device, []).append((rank, execution, how))
    return tally


def decide(rows: Sequence[Agreement], *, reproducible: bool) -> Judgement:
    """Conclude from all ranks' rows.

    Parameters
    ----------
    rows
        One per rank, in order.
    reproducible
        Healthy replays of this model gave the same bits on every rank when they were tried. Where they
        did not, executions that differ by rounding only must already have been reported as `Match.EQUAL`.

    """
    if any(row.failed for row in rows):
        return Judgement(Cause.INCONCLUSIVE, reason=CANNOT)
    tally = _count(rows)
    wrong = {
        device: [f"{NAMES[e]} of rank {rank}'s step" for rank, e, _ in found] for device, found in tally.wrong.items()
    }
    if not tally.wrong:
        return _without_culprit(rows, tally, reproducible=reproducible)
    # Faults are rare: where most devices seem to err at once, what they have in common is the script or the kernel.
    if len(tally.wrong) > max(1, len(rows) // 2):
        return Judgement(
            Cause.INCONCLUSIVE,
            reason="executions differ on most devices: a nondeterministic kernel, differing platforms, or the script itself",
            wrong=wrong,
        )
    verdicts = {device: _device_cause(device, found, rows, tally) for device, found in tally.wrong.items()}
    steady = [device for device, found in tally.wrong.items() if _is_steady(device, found, rows)]
    if steady:
        pair = _dispute(steady[0], tally.wrong[steady[0]], rows)
        far = any(how is Match.FAR for _, _, how in tally.wrong[steady[0]])
        return Judgement(Cause.PERSISTENT_HARDWARE, (steady[0],), unproven=pair, far=far, wrong=wrong)
    convicted = {device: cause for device, cause in verdicts.items() if cause is not Cause.INCONCLUSIVE}
    if not convicted:
        reason = (
            "a result differed once, and by no more than another algorithm or a nondeterministic kernel may make it"
        )
        if _only_a_replay(tally, rows):
            reason = (
                "a re-execution came out otherwise once, and another gave the training's own result: it may have read memory "
                "that nobody had written (torch.empty), or a nondeterministic kernel, or a fault have struck it"
            )
        elif all(rows[device].never_repeated for device in tally.wrong):
            reason = (
                "no step of this kind has been replayed with the training's own result yet, or not since one "
                "was not: the script "
                "may do what a replay does not repeat"
            )
        return Judgement(Cause.INCONCLUSIVE, reason=reason, wrong=wrong, weak=True)
    if not reproducible and Cause.PERSISTENT_HARDWARE not in convicted.values() and not _far(tally, convicted):
        reason = "healthy replays of this model differ as far, or none was made yet that would tell"
        return Judgement(Cause.INCONCLUSIVE, reason=reason, wrong=wrong)
    return _convict(rows, tally, convicted, wrong)


def _is_steady(device: int, found: list[tuple[int, int, Match]], rows: Sequence[Agreement]) -> bool:
    """Return whether a device contradicts others and never itself, as far as the executions show."""
    row = rows[device]
    own = [execution for rank, execution, _ in found if rank == device and execution in LOCAL]
    if not own:
        return True  # only other ranks' steps came out otherwise there
    if len(own) > 1 and all(how is Match.NEAR for _, _, how in found):
        return True  # by rounding, as kernels do that do not repeat their bits: so an operator has to be found
    return len(own) == len(LOCAL) and row.match(1, 2) is Match.EQUAL and row.match(0, 1) is Match.EQUAL


def _dispute(device: int, found: list[tuple[int, int, Match]], rows: Sequence[Agreement]) -> tuple[int, int]:
    """Return whose step shows that a device gives another result, and whose device is to be compared on it."""
    if any(rank == device for rank, _, _ in found):
        return device, (device + 1) % len(rows)
    return found[0][0], device


def _without_culprit(rows: Sequence[Agreement], tally: _Tally, *, reproducible: bool) -> Judgement:
    apart = spreading(rows)
    if (
        reproducible
        and len(rows) > 1
        and len(apart) == 1
        and not rows[apart[0]].never_repeated
        and set(tally.unresolved) <= _neighbours(apart[0], rows)
    ):
        reason = "this device alone gives another result each time, where healthy replays gave the same bits"
        return Judgement(
            Cause.PERSISTENT_HARDWARE,
            (apart[0],),
            intermittent=True,
            reason=reason,
            wrong={apart[0]: ["spread"]},
        )
    if tally.disputes:
        pair = tuple(sorted(tally.disputes[0]))
        return Judgement(
            Cause.INCONCLUSIVE,
            disputed=pair,
            reason="two devices contradict each other and there is no third",
        )
    if tally.unresolved and len(rows) == 1:
        return Judgement(
            Cause.INCONCLUSIVE,
            reason="this step comes out otherwise each time: a nondeterministic kernel, or a device that does not repeat",
        )
    if tally.unresolved:
        who = ", ".join(map(str, tally.unresolved))
        return Judgement(
            Cause.INCONCLUSIVE,
            reason=f"no two executions agree on the step of rank {who}: a nondeterministic kernel",
        )
    return _nothing_wrong(rows)


def _nothing_wrong(rows: Sequence[Agreement]) -> Judgement:
    """Dismiss what was run again, all of it, with the same result; say what was not."""
    same = (
        "the same result, up to what this model's healthy runs differ by"
        if any(row.spread for row in rows)
        else "the same bits"
    )
    elsewhere = all(any(execution not in LOCAL for execution in row.made()) for row in rows)
    who = "every execution, on every device asked, gave" if elsewhere else "two replays gave"
    where = "" if elsewhere else "; no other device was asked"
    if any(row.partial for row in rows):
        return Judgement(
            Cause.INCONCLUSIVE,
            reason=f"{who} {same}{where}, {PARTIAL}",
        )
    return Judgement(Cause.DISMISSED, reason=f"{who} {same}{where}")


def _neighbours(rank: int, rows: Sequence[Agreement]) -> set[int]:
    """Return the ranks whose payloads were executed on ``rank``'s device."""
    size = len(rows)
    return {rank, (rank - 1) % size, (rank - 2) % size}


def _device_cause(device: int, found: list[tuple[int, int, Match]], rows: Sequence[Agreement], tally: _Tally) -> Cause:
    """Judge a device that contradicts itself: once is a transient, more often an intermittent fault."""
    row = rows[device]
    if row.never_repeated and found[0][:2] == (device, 0) and len(found) == 1:
        return Cause.INCONCLUSIVE  # the training alone differs: the script may do what no replay repeats
    if _only_a_replay(tally, rows):
        return Cause.INCONCLUSIVE  # what was trained with stands, and one process accuses nobody by its replays
    near_only = all(how is Match.NEAR for _, _, how in found)
    if near_only and not row.proven_by_checksum:
        return Cause.INCONCLUSIVE  # a kernel that does not repeat its bits does that
    if len(found) == 1 and device not in tally.unresolved:
        return Cause.TRANSIENT_HARDWARE
    return Cause.PERSISTENT_HARDWARE if len(rows) > 1 else Cause.INCONCLUSIVE


def _only_a_replay(tally: _Tally, rows: Sequence[Agreement]) -> bool:
    """Return whether all that one process alone gave wrongly is a re-execution, and not what it trained with."""
    return len(rows) == 1 and all(execution for found in tally.wrong.values() for _, execution, _ in found)


def _far(tally: _Tally, convicted: Mapping[int, Cause]) -> bool:
    return any(how is Match.FAR for device in convicted for _, _, how in tally.wrong[device])


def _convict(
    rows: Sequence[Agreement], tally: _Tally, convicted: Mapping[int, Cause], wrong: dict[int, list[str]]
) -> Judgement:
    ranks = tuple(sorted(convicted))
    persistent = any(cause is Cause.PERSISTENT_HARDWARE for cause in convicted.values())
    row = rows[ranks[0]]
    steady = row.match(0, 1) is Match.EQUAL and row.match(1, 2) is Match.EQUAL
    spoiled = any(rows[rank].outputs_changed for rank in convicted)
    return Judgement(
        Cause.PERSISTENT_HARDWARE if persistent else Cause.TRANSIENT_HARDWARE,
        ranks,
        heal=not persistent and not spoiled and not tally.unresolved,
        skip=not persistent and (spoiled or bool(tally.unresolved)),
        intermittent=persistent and not steady,
        wrong=wrong,
    )
