"""What an overflow record's status number means, unit by unit. A code or bit without a published meaning is shown as such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

AI_CORE_BITS = {
    0x008: "inversion of the smallest negative signed integer",
    0x010: "integer addition, subtraction, multiplication or multiply-add overflow",
    0x020: "floating-point overflow",
    0x080: "negative input of a float-to-unsigned conversion",
    0x100: "FP32-to-FP16 or 32-bit-integer-to-FP16 conversion overflow",
    0x400: "Cube accumulation overflow",
}
DHA_CODES = {
    0x9: "atomic overflow",
    0xA: "atomic underflow",
    0xB: "invalid source operand (NaN)",
    0xC: "invalid destination operand (NaN)",
    0xD: "invalid source and destination operands (NaN)",
}
L2_CODES = {
    1: "atomic overflow",
    2: "atomic underflow",
    3: "invalid source operand (NaN)",
    4: "invalid destination operand (NaN)",
    5: "invalid source and destination operands (NaN)",
}
CORES = ("AI Core", "AIC", "AIV")
UNITS = ("AI Core", "DHA Atomic Add", "L2 Atomic Add")


@dataclass(frozen=True, slots=True)
class Decoded:
    """A status in words.

    ``code``: the part of the status that carries the meaning; ``causes``: in words, empty for no error; ``unknown``: bits (AI
    Core) or the code (atomic additions) without a published meaning, 0 for none.
    """

    unit: str
    status: int
    code: int
    causes: tuple[str, ...] = ()
    unknown: int = 0

    @property
    def text(self) -> str:
        """All of it in one line."""
        parts = list(self.causes)
        if self.unit in CORES:
            bits = [1 << place for place in range(64) if self.unknown >> place & 1]
            parts += [f"unknown bit {bit:#05x} (no published meaning)" for bit in bits]
        elif self.unknown:
            parts.append(f"unknown code {self.unknown:#x} (no published meaning)")
        return " + ".join(parts) if parts else "no error"

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "unit": self.unit,
            "status": self.status,
            "hex": f"{self.status:#010x}",
            "code": f"{self.code:#x}",
            "causes": list(self.causes),
            "unknown": f"{self.unknown:#x}" if self.unknown else None,
        }


def decode(status: int, unit: str) -> Decoded:
    """Say what a status means on a unit (AI Core, AIC, AIV, DHA Atomic Add, L2 Atomic Add); on others it is shown raw."""
    if unit in CORES:
        known = [(bit, words) for bit, words in AI_CORE_BITS.items() if status & bit]
        return Decoded(unit, status, status, tuple(words for _, words in known), status & ~sum(bit for bit, _ in known))
    if unit == "DHA Atomic Add":
        return _by_code(unit, status, (status >> 8) & 0xFF, DHA_CODES)
    if unit == "L2 Atomic Add":
        return _by_code(unit, status, (status >> 16) & 0x7, L2_CODES)
    return Decoded(unit, status, status, (), status)


def _by_code(unit: str, status: int, code: int, words: dict[int, str]) -> Decoded:
    if code in words:
        return Decoded(unit, status, code, (words[code],))
    return Decoded(unit, status, code, (), code)
