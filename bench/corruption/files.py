"""Faults of checkpoints on disk: bits, blocks and lengths, in all formats that are sealed; who loads takes the one before."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import bitwitness as bw
from bitwitness.demo.model import ByteGPT
from corruption.accounts import begun

FORMATS = ("dcp", "safetensors", "torch.save")
CHANGES = ("bit", "byte", "zeroed block", "random block", "swapped blocks", "cut")
_BLOCK = 512  # bytes, a sector


def strike_file(path: Path, change: str, rng: random.Random) -> bool:
    """Change bytes of a file where it lies; return whether any changed."""
    data = bytearray(path.read_bytes())
    before, at = bytes(data), rng.randrange(len(data))
    block = slice(at - at % _BLOCK, min(len(data), at - at % _BLOCK + _BLOCK))
    if change == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif change == "byte":
        data[at] = rng.randrange(256)
    elif change == "zeroed block":
        data[block] = bytes(block.stop - block.start)
    elif change == "random block":
        data[block] = rng.randbytes(block.stop - block.start)
    elif change == "swapped blocks":
        other = slice(max(0, block.start - _BLOCK), max(0, block.start - _BLOCK) + block.stop - block.start)
        data[block], data[other] = data[other], data[block]
    else:
        del data[at:]
    path.write_bytes(data)
    return bytes(data) != before


def _written(kind: str, folder: Path) -> None:
    """Write two checkpoints, of steps 1 and 2, and seal them."""
    for step in (1, 2):
        torch.manual_seed(step)
        state = ByteGPT(width=32, layers=2, heads=2, context=16).state_dict()
        if kind == "dcp":
            bw.checkpoint.save({"model": state}, folder, step)
        else:
            path = folder / f"{step}.{'safetensors' if kind == 'safetensors' else 'pt'}"
            if kind == "safetensors":
                save_file({name: tensor.clone() for name, tensor in state.items()}, path)
            else:
                torch.save(state, path)
            bw.checkpoint.seal(path)


def _newest(kind: str, folder: Path, rng: random.Random) -> tuple[Path, Path]:
    """Return the newest checkpoint, and one file of it that holds numbers."""
    if kind == "dcp":
        place = bw.checkpoint.latest(folder)
        assert place is not None
        return place, rng.choice(sorted(place.glob("*.distcp")))
    place = next(folder.glob("2.*[!n]"))
    return place, place


def campaign(seed: int, count: int, lines: Path) -> None:
    """Run the trials that are not there yet, a line each."""
    done = begun(lines)
    scratch = Path(tempfile.mkdtemp(prefix="corrupt-"))
    try:
        for kind in FORMATS:
            (scratch / kind).mkdir()
            _written(kind, scratch / kind)
        with lines.open("a") as file:
            for number in range(done, count):
                file.write(json.dumps(_trial(scratch, number, random.Random(f"{seed} {number}"))) + "\n")
                file.flush()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _trial(scratch: Path, number: int, rng: random.Random) -> dict[str, Any]:
    kind, change = FORMATS[number % len(FORMATS)], rng.choice(CHANGES)
    folder = scratch / f"{kind}-struck"
    shutil.copytree(scratch / kind, folder)
    place, path = _newest(kind, folder, rng)
    struck = strike_file(path, change, rng)
    told: list[str] = []
    if kind == "dcp":
        taken = bw.checkpoint.latest(folder, refused=told.append)
        right = taken is not None and taken != place if struck else taken == place
    else:
        told = [str(damage) for damage in bw.checkpoint.verify(place).damage]
        right = bool(told) == struck
    shutil.rmtree(folder)
    return {
        "number": number, "cell": kind, "dtype": "fp32", "parallelism": "one process", "mode": "checkpoints",
        "place": "checkpoint", "sort": "flip" if change in ("bit", "byte") else "pattern", "class": "transient",
        "where": path.name, "fault": {"kind": change}, "rank": 0, "struck": struck, "harm": float("inf") if struck else 0.0,
        "steps": 1 if struck and told and right else None, "as_clean": None, "sensors": ["seal"] if told else [],
        "verdicts": [], "named": any(path.name in text for text in told), "references": {},
        "early": int(bool(told) and not struck),
    }  # fmt: skip
