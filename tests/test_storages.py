"""References to tensors' memory: let go of without Python, where an interrupt would be lost."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from bitwitness.capture.weakmap import WeakTensorMap
from bitwitness.tap.storages import StorageRef


def test_an_interrupt_is_not_lost_where_references_to_memory_are_let_go() -> None:
    """A ``__del__`` written in Python would take it, print it, and have the training go on."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    kept = torch.zeros(1)
    references = [StorageRef(torch.empty(1).untyped_storage()) for _ in range(3)]
    references.append(StorageRef(kept.untyped_storage()))
    assert [reference.expired() for reference in references] == [True, True, True, False]
    sys.setprofile(note)
    references.clear()
    sys.setprofile(None)
    assert called == []
    assert kept.add_(1).item() == 1


def test_what_is_known_of_tensors_ends_with_them() -> None:
    known: WeakTensorMap[str] = WeakTensorMap()
    kept, other = torch.zeros(1), torch.zeros(1)
    known[kept], known[other] = "kept", "other"
    assert (known.get(kept), known.get(torch.zeros(1))) == ("kept", None)
    del other
    for _ in range(100):  # whoever gets a dead one's number is not taken for it
        assert known.get(torch.zeros(1)) is None
    assert [value for _, value in known.items()] == ["kept"]
