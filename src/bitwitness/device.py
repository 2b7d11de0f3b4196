"""Which device this rank computes on: enough to find it in a rack and to quarantine it."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bitwitness.config.variables import SLOTS
from bitwitness.finding import Device

_IDENTITIES = ("/etc/machine-id", "/var/lib/dbus/machine-id", "/sys/class/dmi/id/product_uuid")


def this_device(where: torch.Tensor | torch.device | str | None = None) -> Device:
    """Return the identity of a device; it never fails, since a name that is missing must not end a training.

    ``uuid`` is the device's own where its driver tells one (CUDA: the one of ``nvidia-smi -L``, without the ``GPU-``
    before it), else its name and index. The CPU's is the machine's, and its ``index`` this rank's number on the host.
    Where a launcher chose among the node's devices (`SLOTS`) ``index`` is the device's number there.

    Parameters
    ----------
    where
        A device, or a tensor that lives on it; by default the current accelerator, or the CPU where there is none.

    """
    device = _device_of(where)
    host = socket.gethostname()
    if device.type == "cpu":
        return Device(host, this_slot(), _host_identity(), "cpu")
    index, module = device.index, None
    with suppress(Exception):
        module = torch.get_device_module(device)
        index = module.current_device() if index is None else index
    index = index or 0
    slot = _slot(index)
    return Device(host, slot, _accelerator_identity(module, device.type, index, slot), device.type)


def this_slot() -> int:
    """Return the number, on its node, of the device that this rank computes on: its local rank where nothing else is told."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    return _slot(int(local_rank) if local_rank.isdecimal() and len(local_rank) < 10 else 0)


def slots_told(environ: Mapping[str, str]) -> list[int]:
    """Return what `SLOTS` tells; nothing where it is not set, or is not understood: a name must not end a training."""
    told = [part.strip() for part in environ.get(SLOTS, "").split(",")]
    return list(map(int, told)) if all(part.isdecimal() and len(part) < 10 for part in told) else []


def _slot(index: int) -> int:
    slots = slots_told(os.environ)
    return slots[index] if index < len(slots) else index


def _device_of(where: torch.Tensor | torch.device | str | None) -> torch.device:
    if isinstance(where, torch.Tensor):
        return where.device
    if where is not None:
        return torch.device(where)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _accelerator_identity(module: Any, kind: str, index: int, slot: int) -> str:
    """Return the vendor's own number where the properties have one, else the device's name and place."""
    properties = None
    with suppress(Exception):
        properties = module.get_device_properties(index)
    own = getattr(properties, "uuid", None) or getattr(properties, "serial_number", None)
    return str(own) if own else f"{getattr(properties, 'name', kind)}#{slot}"


def _host_identity() -> str:
    for path in _IDENTITIES:
        with suppress(OSError, UnicodeDecodeError):
            text = Path(path).read_text(encoding="utf-8").strip()
            if text:
                return text
    node = uuid.getnode()
    made_up = node >> 40 & 1  # the bit that RFC 9562, section 6.10, sets in a random number instead of an address
    return socket.gethostname() if made_up else f"mac-{node:012x}"
