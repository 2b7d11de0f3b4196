"""A verdict as a health event: the reference systems' alert, MindCluster's entry for a faulty device, and what is ours.

``device_info`` holds what the Ascend Device Plugin reports in the ConfigMap ``mindx-dl-deviceinfo-<node>`` under
``huawei.com/Ascend910-Fault``, with its seven fields (MindCluster 7.3.0, "Processor Resources"). That the code 80818C00 has a
device isolated (``SeparateNPU``) is the plugin's own ``faultCode.json``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any
from zlib import crc32

from bitwitness.finding import Device, Verdict
from bitwitness.judge.verdict import FAULT_CODE
from bitwitness.respond.reference_log import alert_fields
from bitwitness.store.life import now
from bitwitness.version import __version__

_KEY = "huawei.com/Ascend910-Fault"
_HANDLING = "SeparateNPU"
_LONGEST = 2000  # characters of a verdict's words


def verdict_event(verdict: Verdict, rank: int, device: Device | None, run: str) -> dict[str, Any]:
    """Return the event by which ``rank`` tells of a verdict; ``device``: its own where it is convicted, else None."""
    time = now()
    ours = {
        "cause": str(verdict.cause),
        "action": str(verdict.action),
        "step": verdict.step,
        "rank": rank,
        "ranks": list(verdict.ranks),
        "message": verdict.message[:_LONGEST],
        "site": None if verdict.site is None else str(verdict.site),
    }
    if verdict.fault_code is None:  # no device is at fault: the reference systems have no alert for that
        return _event("notice", "OK", time, device, run, ours)
    return _event("fault", "Warning", time, device, run, ours)


def cleared_event(device: Device, rank: int, run: str, *, step: int, by: str, reason: str) -> dict[str, Any]:
    """Return the event of a device that somebody has cleared; ``step``: from which on it read Warning."""
    ours = {"step": step, "rank": rank, "ranks": [rank], "cleared_by": by, "message": reason}
    return _event("recovery", "OK", now(), device, run, ours)


def npu_name(device: Device, environ: Mapping[str, str] | None = None) -> str:
    """Return a device's name as the plugin gives it: ``Ascend910-4`` for an NPU by its number on the host, else ``cuda-4``.

    ``environ``: where ``ASCEND_RT_VISIBLE_DEVICES`` tells which of the host's NPUs a process sees.
    """
    environ = os.environ if environ is None else environ
    seen = [part.strip() for part in environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")]
    if device.kind != "npu":
        return f"{device.kind}-{device.index}"
    own = seen[device.index] if device.index < len(seen) and seen[device.index].isdecimal() else str(device.index)
    return f"Ascend910-{own}"


def _event(kind: str, status: str, time: str, device: Device | None, run: str, ours: dict[str, Any]) -> dict[str, Any]:
    alert = {**alert_fields(), "health_status": status, "event_type": kind}
    if kind == "notice":
        alert |= dict.fromkeys(("error_code", "sensor_type", "event_state"), "") | {"fault_level": "notice"}
    elif kind == "recovery":
        alert |= {"event_state": "check pass"}
    told = f"{run}|{ours['rank']}|{ours['step']}|{kind}|{time}"
    return {
        "id": f"{crc32(told.encode()):08x}-{ours['step']}-{ours['rank']}",
        "time": time,
        **alert,
        "device_info": {_KEY: [_entry(device, time)] if kind == "fault" and device is not None else []},
        "bitwitness": {
            **ours,
            "run": run,
            "device": None if device is None else asdict(device),
            "npu_name": None if device is None else npu_name(device),
            "version": __version__,
        },
    }


def _entry(device: Device, time: str) -> dict[str, Any]:
    """Return a faulty device as the plugin tells of one; times are in milliseconds since 1970."""
    since = int(datetime.fromisoformat(time).timestamp() * 1000)
    return {
        "fault_type": "CardUnhealthy",
        "npu_name": npu_name(device),
        "large_model_fault_level": _HANDLING,
        "fault_level": _HANDLING,
        "fault_handling": _HANDLING,
        "fault_code": FAULT_CODE,
        "fault_time_and_level_map": {FAULT_CODE: {"fault_time": since, "fault_level": _HANDLING}},
    }
