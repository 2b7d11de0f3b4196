"""Attributes that several replace for a while."""

from __future__ import annotations

import itertools

import pytest

from bitwitness.tap.patching import replaced


class Owner:
    def plain(self) -> list[str]:
        return ["original"]

    @classmethod
    def made(cls) -> list[str]:
        return ["original"]


def wrapper(word: str):
    def wrap(original):
        if isinstance(original, classmethod):
            return classmethod(lambda cls: [word, *original.__get__(None, cls)()])
        return lambda self: [word, *original(self)]

    return wrap


@pytest.mark.parametrize("name", ["plain", "made"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_whatever_order_they_leave_in_nothing_stays(name: str, order: tuple[int, ...]) -> None:
    before = Owner.__dict__[name]
    contexts = [replaced(Owner, name, wrapper(word)) for word in "abc"]
    for context in contexts:
        context.__enter__()
    assert getattr(Owner(), name)() == ["c", "b", "a", "original"]
    for index in order:
        contexts[index].__exit__(None, None, None)
    assert Owner.__dict__[name] is before
