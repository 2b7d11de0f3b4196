"""The slots of this node: the devices that its ranks may compute on, which of them are fit, and how ranks are put on these.

A slot is a device by the number that it has on its node. On an accelerator these are the visible devices; on a CPU, where there
is nothing to tell apart, labels. ``BITWITNESS_SLOTS`` (``0,2,3``) tells a rank its own: the LOCAL_RANK-th, or on an accelerator
that of its visible device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitwitness.config.variables import SLOTS
from bitwitness.device import slots_told, this_device
from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import Device
from bitwitness.launch.quarantine import Entry, key_of

VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
}
"""The variable that says which devices of a kind a process sees."""
_PROBE_S = 120.0  # a driver that does not answer by then is told of


@dataclass(frozen=True, slots=True)
class Slot:
    """A device of this node; ``token``: how the variable of `VISIBLE` names it."""

    number: int
    device: Device
    token: str

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {"slot": self.number, "device": key_of(self.device), "names": sorted(self.names), **asdict(self.device)}

    @property
    def names(self) -> set[str]:
        """By what a verdict may name it: also as a CPU's label, where ranks with accelerators train on the CPU all the same."""
        return {key_of(self.device), key_of(Device(self.device.host, self.number, "", "cpu"))}


def slots_here(wanted: int, environ: Mapping[str, str]) -> list[Slot]:
    """Return this node's first ``wanted`` slots.

    Where there are fewer accelerators than that the ranks do not have one each, and are told apart by labels.

    Raises
    ------
    UsageError
        ``BITWITNESS_SLOTS`` names fewer, or cannot be understood.

    """
    found = _accelerators()
    if len(found) >= wanted:
        return found[:wanted]
    numbers = slots_told(environ) or list(range(wanted))
    if len(numbers) < wanted:
        given = f"{SLOTS} = {shown(environ.get(SLOTS, ''))} names {len(numbers)} slots"
        raise UsageError(f"{given}; expected {wanted}, one for each rank and spare")
    here = this_device("cpu")
    return [Slot(number, Device(here.host, number, here.uuid), str(number)) for number in numbers[:wanted]]


def healthy(slots: Sequence[Slot], quarantined: Sequence[Entry]) -> list[Slot]:
    """Return the slots whose devices are not in quarantine."""
    held = {key_of(entry.device) for entry in quarantined}
    return [slot for slot in slots if not slot.names & held]


def environment_for(slots: Sequence[Slot]) -> dict[str, str]:
    """Return the variables that put local rank i on the i-th of these slots."""
    told = {SLOTS: ",".join(str(slot.number) for slot in slots)}
    kind = slots[0].device.kind
    if kind == "cpu":
        return told
    if kind not in VISIBLE:
        raise UsageError(f"how a process is told which {kind} devices to use is not known here; known are {VISIBLE}")
    return {**told, VISIBLE[kind]: ",".join(slot.token for slot in slots)}


def _accelerators() -> list[Slot]:
    """Return the visible accelerators, asked for in a process of its own: whoever asks keeps memory on each."""
    import torch

    if not torch.accelerator.is_available():
        return []
    command = [sys.executable, "-m", "bitwitness.launch.slots"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=True)  # noqa: S603
        rows = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UsageError(
            f"the accelerators of this node could not be asked for their numbers: {shown(error)}"
        ) from error
    return [Slot(row["slot"], Device(row["host"], row["slot"], row["uuid"], row["kind"]), row["token"]) for row in rows]


def _asked() -> list[dict[str, Any]]:
    """Return what torch tells of each visible accelerator."""
    import torch

    found = torch.accelerator.current_accelerator()
    kind = "cpu" if found is None else found.type
    given = [token.strip() for token in os.environ.get(VISIBLE.get(kind, ""), "").split(",") if token.strip()]
    rows = []
    for index in range(torch.accelerator.device_count()):
        token = given[index] if index < len(given) else str(index)
        device = this_device(f"{kind}:{index}")
        number = int(token) if token.isdecimal() else index
        uuid = device.uuid if "#" not in device.uuid else f"{device.uuid.rpartition('#')[0]}#{number}"
        rows.append({"slot": number, "host": device.host, "uuid": uuid, "kind": kind, "token": token})
    return rows


if __name__ == "__main__":
    print(json.dumps(_asked()))
