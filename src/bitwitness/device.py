"""Which device this rank computes on: enough to find it in a rack and to quarantine it."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

import torch

from bitwitness.finding import Device

_IDENTITIES = ("/etc/machine-id", "/var/lib/dbus/machine-id", "/sys/class/dmi/id/product_uuid")


def this_device(device: torch.device | None = None) -> Device:
    """Return the identity of the device that a tensor on ``device`` lives on; by default the current accelerator, or CPU."""
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found or torch.device("cpu")
    host = socket.gethostname()
    if device.type == "cpu":
        return Device(host, int(os.environ.get("LOCAL_RANK", "0")), _host_identity(), "cpu")
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return Device(host, index, _accelerator_identity(module, index), device.type)


def _accelerator_identity(module: object, index: int) -> str:
    """Return the vendor's own serial where its properties have one (CUDA: uuid), else its name and place."""
    properties = module.get_device_properties(index)  # type: ignore[attr-defined]
    serial = getattr(properties, "uuid", None) or getattr(properties, "serial_number", None)
    return str(serial) if serial else f"{getattr(properties, 'name', 'device')}#{index}"


def _host_identity() -> str:
    for path in _IDENTITIES:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text:
            return text
    return f"mac-{uuid.getnode():012x}"
