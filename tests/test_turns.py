"""Who is looked at on a deep step where not all can be."""

from __future__ import annotations

from bitwitness.tap.turns import MANY, Turns


def test_one_in_so_many_has_its_turn_and_all_have_it_in_as_many_steps() -> None:
    turns, seen = Turns(), set()
    for _ in range(4):
        now = {place for place in range(12) if turns.has_one(4)}
        assert len(now) == 3
        seen |= now
        turns.next_step()
    assert seen == set(range(12))


def test_of_an_operator_that_is_called_thousands_of_times_the_first_are_looked_at_and_the_others_by_turns() -> None:
    turns, seen = Turns(), set()
    for _ in range(turns.beyond):
        now = {place for place in range(1000) if not turns.is_among_many("tanh")}
        assert not turns.is_among_many("exp")
        assert set(range(MANY)) <= now
        assert len(now) == MANY + (1000 - MANY) // turns.beyond
        seen |= now
        turns.next_step()
    assert seen == set(range(1000))
