"""Which device this rank computes on: enough to find it in a rack and to quarantine it."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bitwitness.finding import Device

_IDENTITIES = ("/etc/machine-id", "/var/lib/dbus/machine-id", "/sys/class/dmi/id/product_uuid")


def this_device(where: torch.Tensor | torch.device | str | None = None) -> Device:
    """Return the identity of a device; it never fails, since a name that is missing must not end a training.

    ``uuid`` is the device's own where its driver tells one (CUDA: the one of ``nvidia-smi -L``, without the ``GPU-``
    before it), else its name and index. The CPU's is the machine's, and its ``index`` this rank's number on the host.

    Parameters
    ----------
    where
        A device, or a tensor that lives on it; by default the current accelerator, or the CPU where there is none.

    """
    device = _device_of(where)
    host = socket.gethostname()
    if device.type == "cpu":
        local_rank = os.environ.get("LOCAL_RANK", "")
        is_rank = local_rank.isdecimal() and len(local_rank) < 10
        return Device(host, int(local_rank) if is_rank else 0, _host_identity(), "cpu")
    index, module = device.index, None
    with suppress(Exception):
        module = torch.get_device_module(device)
        index = module.current_device() if index is None else index
    index = index or 0
    return Device(host, index, _accelerator_identity(module, device.type, index), device.type)


def _device_of(where: torch.Tensor | torch.device | str | None) -> torch.device:
    if isinstance(where, torch.Tensor):
        return where.device
    if where is not None:
        return torch.device(where)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _accelerator_identity(module: Any, kind: str, index: int) -> str:
    """Return the vendor's own number where the properties have one, else the device's name and place."""
    properties = None
    with suppress(Exception):
        properties = module.get_device_properties(index)
    own = getattr(properties, "uuid", None) or getattr(properties, "serial_number", None)
    return str(own) if own else f"{getattr(properties, 'name', kind)}#{index}"


def _host_identity() -> str:
    for path in _IDENTITIES:
        with suppress(OSError, UnicodeDecodeError):
            text = Path(path).read_text(encoding="utf-8").strip()
            if text:
                return text
    node = uuid.getnode()
    made_up = node >> 40 & 1  # the bit that RFC 9562, section 6.10, sets in a random number instead of an address
    return socket.gethostname() if made_up else f"mac-{node:012x}"
