"""How deeply a pickle nests tuples, told without unpickling it: hashing one that is nested deeply enough ends the process."""

from __future__ import annotations

import pickletools
from typing import Any

DEEPEST = 64
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = -1  # on the stack, among depths


def nests_tuples_deeply(data: bytes) -> bool:
    """Tell whether a pickle makes a tuple that is nested deeper than `DEEPEST`; of a damaged one, up to the damage."""
    stack: list[int] = []
    memo: dict[int, int] = {}
    try:
        for operation, argument, _ in pickletools.genops(data):
            _apply(operation, argument, stack, memo)
            if stack and stack[-1] > DEEPEST:
                return True
    except Exception:  # whoever unpickles it says what is wrong
        return False
    return False


def _apply(operation: pickletools.OpcodeInfo, argument: Any, stack: list[int], memo: dict[int, int]) -> None:
    """Do to the depths on the stack what an operation does to the objects."""
    name = operation.name
    if name == "MARK":
        stack.append(_MARK)
    elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
        memo[len(memo) if argument is None else argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[argument])
    elif name == "DUP":
        stack.append(stack[-1])
    elif name == "TUPLE" or name in _TUPLES:
        count = stack[::-1].index(_MARK) if name == "TUPLE" else _TUPLES[name]
        inside = _popped(stack, count)
        if name == "TUPLE":
            stack.pop()
        stack.append(1 + max(inside, default=0))
    else:
        before = [one.name for one in operation.stack_before]
        if "mark" in before:  # it takes all from the mark on, and what comes before that
            _popped(stack, stack[::-1].index(_MARK) + 1)
            before = before[: before.index("mark")]
        _popped(stack, len(before))
        stack += [0] * len(operation.stack_after)


def _popped(stack: list[int], count: int) -> list[int]:
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken
