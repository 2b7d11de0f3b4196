"""Every rank's device, known to all ranks."""

from __future__ import annotations

import json

from bitwitness.finding import Device
from bitwitness.ranks import Ranks


def gather_devices(ranks: Ranks, here: Device) -> list[Device]:
    """Return every rank's device; collective."""
    told = ranks.gather_text(json.dumps([here.host, here.index, here.uuid, here.kind]))
    return [Device(*json.loads(text)) for text in told]
