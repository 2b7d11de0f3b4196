"""The numbers by which dump files name data types and formats (they are not the graph engine's)."""

from __future__ import annotations

from typing import Any

NAMES = {
    0: "undefined", 1: "float32", 2: "float16", 3: "int8", 4: "uint8", 5: "int16", 6: "uint16", 7: "int32", 8: "int64",
    9: "uint32", 10: "uint64", 11: "bool", 12: "float64", 13: "string", 14: "dual_sub_int8", 15: "dual_sub_uint8",
    16: "complex64", 17: "complex128", 18: "qint8", 19: "qint16", 20: "qint32", 21: "quint8", 22: "quint16", 23: "resource",
    24: "string_ref", 25: "dual", 26: "variant", 27: "bfloat16", 28: "int4", 29: "uint1", 30: "int2", 31: "uint2",
    32: "complex32", 33: "hifloat8", 34: "float8_e5m2", 35: "float8_e4m3fn", 36: "float8_e8m0fnu", 37: "float6_e3m2fn",
    38: "float6_e2m3fn", 39: "float4_e2m1fn", 40: "float4_e1m2",
}  # fmt: skip

FORMATS = {
    0: "NCHW", 1: "NHWC", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 12: "NC1HWC0_C04", 16: "HWCN", 25: "C1HWNCoC0", 27: "NDHWC",
    29: "FRACTAL_NZ", 30: "NCDHW", 31: "DHWCN", 32: "NDC1HWC0", 33: "FRACTAL_Z_3D", 40: "RESERVED", 47: "NCL",
    48: "FRACTAL_Z_WINO", 49: "C1HWC0", 255: "MAX",
}  # fmt: skip

_PLAIN = frozenset({
    "float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "uint64", "bool", "float64",
    "complex64", "complex128",
})  # fmt: skip
_ML = frozenset(
    {"bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn"}
)
_STORED_AS = {"qint8": "int8", "qint16": "int16", "qint32": "int32", "quint8": "uint8", "quint16": "uint16"}
PACKED_BITS = {"int4": 4, "int2": 2, "uint2": 2, "uint1": 1, "float4_e2m1fn": 4}
"""Types of less than a byte that may come several to the byte, the first one in the lowest bits."""


def dtype_name(number: int) -> str:
    """Return a data type's name; an unknown one shows its number."""
    return NAMES.get(number, f"unknown_{number}")


def format_name(number: int) -> str:
    """Return a format's name; an unknown one shows its number."""
    return FORMATS.get(number, f"unknown_{number}")


def numpy_dtype(name: str) -> Any | None:
    """Return the NumPy dtype whose elements a payload of this type is, one element each; None where there is none."""
    import numpy as np

    if name in _PLAIN or name in _STORED_AS:
        return np.dtype(_STORED_AS.get(name, name)).newbyteorder("<")
    if name in _ML or name in ("int4", "int2", "uint2"):
        import ml_dtypes

        kind = getattr(ml_dtypes, name, None)
        return None if kind is None else np.dtype(kind)
    return None
