"""What bitwitness itself reads and writes of checkpoints is nobody's to seal or to verify once more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


@contextmanager
def ours() -> Iterator[None]:
    """Have calls of torch.save and the like inside, in this thread, pass as they are."""
    before = is_ours()
    _here.on = True
    try:
        yield
    finally:
        _here.on = before


def is_ours() -> bool:
    """Tell whether this thread is inside `ours`."""
    return getattr(_here, "on", False)
