"""Log lines and alert fields as the reference systems write them, so that what watches those finds them here.

    [WARNING] BITWITNESS(2950,rank 0):2025-08-26-10:46:26.665.782 [checksum] Global CheckSum result is 0

Numbers are printed as C++ streams print them: six significant digits, ``inf``, ``nan``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from bitwitness.judge.verdict import FAULT_CODE

Loudness = Literal["INFO", "WARNING", "ERROR"]


class ReferenceLog:
    """Writes one rank's lines, to its stderr by default.

    A stream that is closed or full loses lines, never the training.
    """

    def __init__(self, rank: int, stream: TextIO | None = None) -> None:
        self._rank = rank
        self._stream = stream

    def line(self, loudness: Loudness, where: str, message: str, now: datetime | None = None) -> str:
        """Write a line and return it; ``now`` is the present by default."""
        now = now or datetime.now(UTC).astimezone()
        stamp = f"{now:%Y-%m-%d-%H:%M:%S}.{now.microsecond // 1000:03d}.{now.microsecond % 1000:03d}"
        text = f"[{loudness}] BITWITNESS({os.getpid()},rank {self._rank}):{stamp} [{where}] {message}"
        stream = sys.stderr if self._stream is None else self._stream
        try:
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):
            pass
        return text

    def abnormal(self, evidence: Mapping[str, Any]) -> str:
        """Say that a value reached level 1 of V1, V2 or V3."""
        return self.line("ERROR", "feature", f"accuracy sensitivity feature abnormal: {_pairs(evidence)}")

    def suspicious(self, evidence: Mapping[str, Any]) -> str:
        """Say that a value reached level 2."""
        return self.line("WARNING", "feature", f"feature value above the second level: {_pairs(evidence)}")

    def value(self, name: str, value: float) -> str:
        """Say what a feature value was, at level info."""
        return self.line("INFO", "feature", f"feature value of {name}: {value:g}")

    def strike(self, evidence: Mapping[str, Any], now: datetime | None = None) -> str:
        """Say that a parameter struck in the combined scheme; ``evidence`` is that of its finding."""
        now = now or datetime.now(UTC).astimezone()
        message = f"Silent detect strike detected: {strike_record(evidence, int(now.timestamp()))}"
        return self.line("WARNING", "feature", message, now)

    def strikes_out_here(self, strikes_num: int) -> str:
        """Say that this rank has struck out."""
        return self.line(
            "WARNING",
            "strikes",
            f"Feature value detection strikes out on rank {self._rank}, strikes_num: {strikes_num}",
        )

    def strikes_out(self) -> str:
        """Say that some rank has struck out."""
        return self.line("WARNING", "strikes", "Feature value detection strikes out!")

    def checksum_start(self) -> str:
        """Say that the checksum is on now."""
        return self.line("WARNING", "checksum", "CheckSum start…")

    def matmul_error(self) -> str:
        """Say that a checksum failed on this rank."""
        return self.line("WARNING", "checksum", f"CheckSum detects MatMul error on rank {self._rank}")

    def global_result(self, found: bool) -> list[str]:
        """Say what all ranks' checksums found together."""
        lines = [self.line("WARNING", "checksum", f"Global CheckSum result is {int(found)}")]
        if found:
            lines.append(self.line("WARNING", "checksum", "SilentCheck detects SDC error"))
        return lines


def strike_record(evidence: Mapping[str, Any], timestamp: int) -> str:
    """Return ``StrikeRecord{timestamp: …, …, stat: StatData{…}}``; ``timestamp`` is in Unix seconds."""
    stat = (
        f"StatData{{avg: {evidence['avg']:g}, pre_value: {evidence['pre_value']:g}, "
        f"count: {evidence['count']}, none_zero_count: {evidence['none_zero_count']}}}"
    )
    name, value = evidence["name"], evidence["value"]
    return f"StrikeRecord{{timestamp: {timestamp}, name: {name}, value: {value:g}, stat: {stat}}}"


def alert_fields(evidence: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of the reference systems' alert; with ``evidence``, what it was raised for."""
    fields: dict[str, Any] = {
        "health_status": "Warning",
        "error_code": FAULT_CODE,
        "node_type": "SoC",
        "sensor_type": "Check Sensor",
        "event_state": "check fail",
        "event_type": "fault",
        "fault_level": "minor",
    }
    if evidence is not None:
        fields["evidence"] = dict(evidence)
    return fields


def _pairs(evidence: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {_plain(item)}" for key, item in evidence.items())


def _plain(item: Any) -> str:
    if isinstance(item, float):
        return f"{item:g}"
    if isinstance(item, list | tuple):
        return ",".join(_plain(part) for part in item)
    return str(item)
