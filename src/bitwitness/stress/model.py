"""Which model of device this is, and which software computes on it: only what is equal in both must have equal bits."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch


def model_of(device: torch.device) -> dict[str, str]:
    """Return a device's model, and what else decides which kernels run on it, in words."""
    found = {"model": _processor() if device.type == "cpu" else device.type, "torch": str(torch.__version__)}
    if device.type == "cpu":
        return found | {"kernels": torch.backends.cpu.get_cpu_capability()}
    with suppress(Exception):
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device)
        names = ("name", "major", "minor", "multi_processor_count", "cube_core_num", "vector_core_num")
        found["model"] = " ".join(str(getattr(properties, name)) for name in names if hasattr(properties, name))
    for name in ("cuda", "hip"):
        if version := getattr(torch.version, name, None):
            found[name] = str(version)
    with suppress(Exception):
        found["libraries"] = f"cudnn {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    with suppress(Exception):
        import torch_npu  # type: ignore[import-not-found,import-untyped,unused-ignore]

        found["torch_npu"] = str(torch_npu.__version__)
    return {name: value for name, value in found.items() if value}


def _processor() -> str:
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
