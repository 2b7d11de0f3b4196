"""The mode in which an Ascend device shows an overflow: as Inf and NaN, or not at all."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "INF_NAN_MODE_ENABLE"


def overflow_mode(environ: Mapping[str, str], device_type: str) -> tuple[str, bool] | None:
    """Say what ``INF_NAN_MODE_ENABLE`` means for this run, and whether that is a warning.

    None where it is not set and the device is no NPU.
    """
    value = environ.get(VARIABLE, "").strip()
    npu = device_type == "npu"
    if not value and not npu:
        return None
    if value not in ("", "0", "1"):
        return f"{VARIABLE} = {value!r}: expected 0 (saturation) or 1 (Inf and NaN, the default); set it to 1", True
    shown = f"{VARIABLE} = {value}" if value else f"{VARIABLE} is not set (1 by default)"
    if value != "0":
        return f"{shown}: an overflow shows as Inf, an undefined result as NaN", False
    blind = (
        "saturation: an overflow becomes the dtype's largest number and NaN becomes 0, so that looking for NaN and Inf sees "
        "nothing; results at the largest number are looked for on sampled steps. Set it to 1 to see all"
    )
    if not npu:
        return f"{shown} ({blind.partition(':')[0]}) concerns an NPU; on {device_type} Inf and NaN stay visible", False
    return f"{shown}: {blind}", True
