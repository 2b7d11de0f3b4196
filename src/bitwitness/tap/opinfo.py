"""Torch's own tests as a source of operators: its database of sample inputs, and its list of functions that compute."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from bitwitness.errors import UsageError


@lru_cache(maxsize=1)
def database() -> list[Any]:
    """Return torch's OpInfo entries, in its order. Raises UsageError where its tests cannot be imported."""
    try:
        return list(import_module("torch.testing._internal.common_methods_invocations").op_db)
    except ImportError as error:
        raise UsageError(
            f"torch's sample inputs cannot be imported ({error}); pip install 'bitwitness[precheck]' has what they need"
        ) from error


@lru_cache(maxsize=1)
def overridable() -> frozenset[Any]:
    """Return torch's functions and methods that compute with tensors: what ``torch.overrides`` lists."""
    listed = torch.overrides.get_overridable_functions()
    return frozenset(f for functions in listed.values() for f in functions if callable(f))
