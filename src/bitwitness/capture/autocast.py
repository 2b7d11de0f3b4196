"""The autocast setting, read and set again."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast setting under which a forward ran."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def read(cls, device: torch.device) -> Autocast:
        """Read the setting that holds now for ``device``'s type."""
        return cls(
            device.type,
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_cache_enabled(),
        )

    def context(self) -> torch.autocast:
        """Return a context manager that sets it again."""
        return torch.autocast(self.device_type, enabled=self.enabled, dtype=self.dtype, cache_enabled=self.cache)
