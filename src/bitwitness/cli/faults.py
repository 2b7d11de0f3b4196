"""``BITWITNESS_INJECT``: the faulty device that a script is run on, if one is declared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from bitwitness.cli.folders import rank_here

if TYPE_CHECKING:
    from bitwitness.inject.device import FaultyDevice


def declared_faults() -> AbstractContextManager[object]:
    """Return the device that the environment declares, to be entered before anything that looks; it tells of itself at the end.

    Raises
    ------
    ConfigError
        The file cannot be read or is not understood.

    """
    from bitwitness.inject.device import FaultyDevice

    faulty = FaultyDevice.from_environment(rank_here())
    return nullcontext() if faulty is None else _telling(faulty)


@contextmanager
def _telling(faulty: FaultyDevice) -> Iterator[None]:
    try:
        with faulty:
            yield
    finally:
        for line in faulty.told():
            sys.stderr.write(f"bitwitness: {line}\n")
