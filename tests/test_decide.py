"""The judgement, from tables of who agrees with whom."""

from __future__ import annotations

from itertools import combinations

import pytest

from bitwitness import Cause
from bitwitness.judge.agreement import PAIRS, Agreement, Match, device_of
from bitwitness.judge.decide import Judgement, decide


def table(
    results: list[list[str]], *, checksum: tuple[int, ...] = (), changed: tuple[int, ...] = ()
) -> list[Agreement]:
    """Build rows from each rank's five results: equal text is equal bits, a trailing ``~`` is a rounding apart."""

    def match(a: str, b: str) -> Match:
        if "" in (a, b):
            return Match.MISSING
        if a == b:
            return Match.EQUAL
        return Match.NEAR if a.rstrip("~") == b.rstrip("~") else Match.FAR

    return [
        Agreement(
            tuple(match(row[a], row[b]) for a, b in PAIRS),
            proven_by_checksum=rank in checksum,
            outputs_changed=rank in changed,
        )
        for rank, row in enumerate(results)
    ]


def run(size: int, wrong: dict[tuple[int, int], str], **more: tuple[int, ...]) -> Judgement:
    """Judge ``size`` ranks whose execution ``(rank, execution)`` gave another result."""
    executions = 5 if size >= 3 else (4 if size == 2 else 3)
    rows = [[wrong.get((r, e), "x") if e < executions else "" for e in range(5)] for r in range(size)]
    return decide(table(rows, **more), reproducible=True)


def persistent(size: int, culprit: int, text: str = "bad") -> dict[tuple[int, int], str]:
    return {(r, e): f"{text}{r}" for r in range(size) for e in range(5) if device_of(e, r, size) == culprit}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_equal_results_everywhere_are_dismissed(size: int) -> None:
    assert run(size, {}).cause is Cause.DISMISSED


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_one_odd_training_result_is_a_transient_and_can_be_healed(size: int) -> None:
    found = run(size, {(size - 1, 0): "bad"})
    assert (found.cause, found.ranks, found.heal) == (Cause.TRANSIENT_HARDWARE, (size - 1,), True)


@pytest.mark.parametrize("execution", [1, 2])
def test_one_process_is_not_convicted_for_a_re_execution_of_its_own(execution: int) -> None:
    # a script may read memory that nobody has written: what it trained with was repeated, so it stands
    found = run(1, {(0, execution): "bad"})
    assert (found.cause, found.weak) == (Cause.INCONCLUSIVE, True)
    assert "another gave the training's own result" in found.reason


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_device_that_always_errs_is_persistent_whichever_it_is(size: int) -> None:
    for culprit in range(size):
        found = run(size, persistent(size, culprit))
        assert (found.cause, found.ranks, found.intermittent) == (
            Cause.PERSISTENT_HARDWARE,
            (culprit,),
            False,
        )


def test_a_persistent_fault_within_rounding_is_still_proven_because_it_repeats() -> None:
    found = run(4, persistent(4, 2, "x~"))
    # every own execution equal, both others agree: no nondeterministic kernel does that
    rows = table([[f"x{'~' if device_of(e, r, 4) == 2 else ''}" for e in range(5)] for r in range(4)])
    assert decide(rows, reproducible=True).ranks == (2,)
    assert found.ranks == (2,)


def test_a_fault_that_the_own_batch_alone_triggers_names_the_right_one_of_two_neighbours() -> None:
    own = {(1, e): "bad" for e in (0, 1, 2)}
    assert run(4, own).ranks == (1,)
    assert run(4, {(0, 3): "bad"}).ranks == (1,)  # rank 0's step, wrong only when run on rank 1


def test_two_ranks_that_contradict_each_other_are_a_dispute() -> None:
    found = run(2, persistent(2, 1))
    assert found.cause is Cause.INCONCLUSIVE
    assert found.disputed == (0, 1)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_an_intermittent_device_is_named_when_its_replays_differ(size: int) -> None:
    found = run(size, {(1, 0): "bad1", (1, 1): "bad2"})
    assert (found.cause, found.ranks, found.intermittent) == (Cause.PERSISTENT_HARDWARE, (1,), True)


def test_all_three_own_results_different_on_one_rank_of_two() -> None:
    found = run(2, {(0, 0): "a", (0, 1): "b", (0, 2): "c"})
    assert (found.cause, found.ranks) == (Cause.PERSISTENT_HARDWARE, (0,))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_nondeterministic_kernel_convicts_nobody(size: int) -> None:
    wrong = {(r, e): f"x{'~' * (1 + r + e)}" for r in range(size) for e in range(5)}
    assert run(size, wrong).cause is Cause.INCONCLUSIVE
    one = {(1, 0): "x~"}
    assert run(size, one).cause is Cause.INCONCLUSIVE  # once, and by rounding only


def test_a_rounding_sized_difference_counts_where_a_checksum_failed() -> None:
    assert run(4, {(1, 0): "x~"}, checksum=(1,)).cause is Cause.TRANSIENT_HARDWARE


def test_outputs_that_changed_make_the_step_be_skipped_not_healed() -> None:
    found = run(4, {(1, 0): "bad"}, changed=(1,))
    assert (found.heal, found.skip) == (False, True)


def test_a_step_is_skipped_where_another_ranks_executions_do_not_agree() -> None:
    wrong = {(1, 0): "bad", **{(3, e): f"other{e}" for e in range(5)}}
    found = run(4, wrong)
    assert (found.cause, found.ranks, found.heal, found.skip) == (Cause.TRANSIENT_HARDWARE, (1,), False, True)


def test_a_step_that_cannot_be_replayed_is_inconclusive() -> None:
    rows = [Agreement((Match.MISSING,) * len(PAIRS), failed=True)]
    assert decide(rows, reproducible=True).cause is Cause.INCONCLUSIVE


def test_healthy_spread_keeps_a_single_odd_result_from_convicting() -> None:
    rows = table([["x", "x", "x", "x", "x"], ["x~", "x", "x", "x", "x"]] + [["x"] * 5] * 2)
    assert decide(rows, reproducible=False).cause is Cause.INCONCLUSIVE


def test_every_pair_is_compared_once() -> None:
    assert list(combinations(range(5), 2)) == list(PAIRS)
