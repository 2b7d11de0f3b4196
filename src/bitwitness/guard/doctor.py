"""``bitwitness doctor``: what this machine has, and whether everything that the guard relies on works here."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

from bitwitness.device import this_device
from bitwitness.guard.selftest import SEEN, explained, prove
from bitwitness.stats import reader
from bitwitness.stats.launches import kernels
from bitwitness.tap.lacking import lacking

_NOT_COVERED = (
    "recurrent layers on accelerators are computed twice, without a checksum",
    "loss code in which ranks exchange something or compiled functions run is sensed but not replayed",
    "compiled kernels have no checksum on deep steps; their matrix products are checked in an eager re-execution",
    "tensor parallel and FSDP1 training is watched, but its steps cannot be replayed",
)


def examine() -> dict[str, Any]:
    """Return everything that `main` prints."""
    results = prove(step=True)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(this_device()),
        "accelerator": "none" if accelerator is None else f"{accelerator.type} x {torch.accelerator.device_count()}",
        "backends": [name for name in ("gloo", "nccl", "hccl") if _available(name)],
        "proven": {name: "sees" if result == SEEN else result for name, result in results.items()},
        "lacking": lacking(),
        "not_covered": list(_NOT_COVERED),
        "readers": {
            "CPU": "compiled code" if reader.built() is not None else "torch's operators: built without a C compiler",
            "accelerator": "Triton's kernels" if kernels() is not None else "torch's operators: no Triton here",
        },
    }


def _available(backend: str) -> bool:
    return dist.is_available() and dist.is_backend_available(backend)


def is_healthy(found: dict[str, Any]) -> bool:
    """Return whether every sensor saw its fault, and torch has all that is needed."""
    return all(result == "sees" for result in found["proven"].values()) and not found["lacking"]


def show(found: dict[str, Any]) -> None:
    """Print an examination."""
    print(f"python {found['python']}, torch {found['torch']}, accelerator: {found['accelerator']}")
    print(f"device {found['device']}")
    print(f"process groups: {', '.join(found['backends']) or 'none'}")
    words = explained()
    for name, result in found["proven"].items():
        print(f"  {'ok    ' if result == 'sees' else 'FAILED'}  {name:11s} {words[name]}")
        if result != "sees":
            print(f"          {result}")
    for name in found["lacking"]:
        print(f"  FAILED  this torch has no {name}, which bitwitness stands on")
    for where, how in found["readers"].items():
        print(f"  tensors on the {where} are read for recordings and monitors by: {how}")
    for gap in found["not_covered"]:
        print(f"  not covered: {gap}")
