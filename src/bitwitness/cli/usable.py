"""Whether a device can be used here, before anything is tried on it."""

from __future__ import annotations

from bitwitness.errors import UsageError


def usable(device: str) -> None:
    """Raise UsageError, with torch's own reason, for a device that is none or is not here."""
    import torch

    try:
        torch.ones(1, device=device).cpu()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"the device {device!r} cannot be used here ({type(error).__name__}: {first}); nothing was tried. Run this "
            "where it is, or name another one with --device"
        ) from error
