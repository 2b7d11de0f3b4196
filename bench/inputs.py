"""Bad inputs, drawn over verbs, formats and kinds of damage: no traceback, no hang, no control character, no wrong all-clear.

    python bench/inputs.py --trials 10000

Each trial damages one file of a good folder (a recording, a guarded run, a dump of msprobe, an Ascend dump, two checkpoints, a
file of settings or faults, a map) and calls the command line in this process. It is wrong if that raises, takes longer than
`SECONDS`, prints something unprintable, leaves a half-named file, uses more than a gigabyte, or exits with 0 although the same
data whole would not.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import ascend_writer
import msprobe_writer
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import bitwitness as bw
from bitwitness.cli import main as command_line

SECONDS = 20.0
GIGABYTE = 1 << 30
CODES = {0, 1, 2, 3, 4}
"""What a reading verb may end with on bad input; 70 is a failure of ours."""
NASTY = "\x1b[31m\u202e\x00\ud800=cmd|calc"


@dataclass(frozen=True)
class Format:
    """A good folder, the command lines that read it (``{}``: where it lies), and each one's exit code on it."""

    name: str
    make: Callable[[Path], None]
    commands: tuple[tuple[str, ...], ...]


def train(net: nn.Module, seed: int) -> None:
    """Train two steps on drawn batches."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(5, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recordings(folder: Path) -> None:
    """Make two guarded and recorded runs that part at a GELU."""
    for name, approximate in (("a", "none"), ("b", "tanh")):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.GELU(approximate), nn.Linear(8, 1))
        with bw.Guard(net, out=folder / name), bw.Recorder(net, out=folder / name, content="tensors"):
            train(net, 1)


def msprobe(folder: Path) -> None:
    """Write two dumps of msprobe that differ."""
    for name, factor in (("a", 1.0), ("b", 1.5)):
        data, parents = msprobe_writer.step_of_a_model()
        if factor != 1.0:
            changed = json.loads(json.dumps(data))
            last = list(changed.values())[-1]
            for one in [*last.get("output", []), *last.get("input", [])]:
                for key in ("Max", "Min", "Mean", "Norm"):
                    one[key] = None if one.get(key) is None else one[key] * factor + 1.0
            data = changed
        msprobe_writer.write(folder / name, data, parents=parents)


def ascend(folder: Path) -> None:
    """Write a dump path with one overflow and its operator's dump."""
    place = folder / "20200808163566" / "0" / "model" / "11" / "0"
    half = np.array([1, 2, 3], np.float16)
    dump = ascend_writer.dump(inputs=[ascend_writer.Tensor(2, (3,), half.tobytes())])
    ascend_writer.write(place / "Add.Add_1.3.59.100", dump)
    record = ascend_writer.opdebug(ascend_writer.record(core=ascend_writer.CORE))
    ascend_writer.write(place / "Opdebug.Node_OpDebug.59.101", record)


def checkpoints(folder: Path) -> None:
    """Write two checkpoints that differ, in two kinds."""
    for name, shift in (("a", 0.0), ("b", 1.0)):
        (folder / name).mkdir(parents=True)
        values = {"one": torch.arange(6.0) + shift, "two": torch.ones(2, 3)}
        save_file(values, folder / name / "model.safetensors")
        torch.save(values, folder / f"{name}.pt")


def settings(folder: Path) -> None:
    """Write files of settings, and a script."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text("print('ran')\n")
    (folder / "guard.toml").write_text('act = "observe"\nbudget = 0.01\n')
    (folder / "config.json").write_text(
        json.dumps({"task": "statistics", "dump_path": "x", "step": [0], "level": "mix"})
    )


COMPARE = ("compare", "{}/a", "{}/b")
FORMATS = (
    Format(
        "recording", recordings, (COMPARE, (*COMPARE, "--json"), ("status", "-v", "{}/a"), ("diff-env", "{}/a", "{}/b"))
    ),
    Format("msprobe", msprobe, (COMPARE, (*COMPARE, "--csv", "{}/out.csv"))),
    Format("ascend", ascend, (("ascend", "summary", "{}"), ("ascend", "convert", "-d", "{}", "-o", "{}-out"))),
    Format(
        "checkpoints",
        checkpoints,
        (("compare", "--checkpoints", "{}/a", "{}/b"), ("compare", "--checkpoints", "{}/a.pt", "{}/b.pt", "--json")),
    ),
    Format(
        "settings",
        settings,
        (
            ("run", "--config", "{}/guard.toml", "{}/none.py"),
            ("record", "--out", "{}/rec", "--config", "{}/config.json", "{}/none.py"),
        ),
    ),
)


def bytes_of(data: bytes, draw: random.Random) -> bytes:
    """Return what damage makes of a file's bytes."""
    kind = draw.randrange(8)
    if kind == 0:
        return data[: draw.randrange(len(data) + 1)]
    if kind == 1 and data:
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 8))):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == 2:
        return draw.randbytes(draw.choice((0, 1, 8, 300)))
    if kind == 3:
        return b"[" * draw.choice((900, 100_000)) + b"]"
    if kind == 4:
        return b'{"a": ' + b"9" * draw.choice((400, 5000)) + b"}"
    if kind == 5:
        at = draw.randrange(len(data) + 1)
        return data[:at] + NASTY.encode("utf-8", "surrogatepass") + data[at:]
    if kind == 6:
        return data.replace(b"[", b'{"x":', 1).replace(b"1", b"-1e999", 1)
    return data + data


def damaged(folder: Path, draw: random.Random) -> tuple[str, bool]:
    """Damage one file below a folder; say how, and whether anything changed."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    name = str(path.relative_to(folder))
    kind = draw.randrange(12)
    if kind < 7:
        data = path.read_bytes()
        changed = bytes_of(data, draw)
        path.write_bytes(changed)
        return f"{name}: bytes", changed != data
    path.unlink()
    if kind == 7:
        os.mkfifo(path)
    elif kind == 8:
        path.mkdir()
    elif kind == 9:
        path.symlink_to(path)
    elif kind == 10:
        path.symlink_to("/dev/zero")
    gone = kind == 11 and folder.name == "copy" and "Opdebug" in name  # nobody can tell that there was an overflow
    return f"{name}: {('FIFO', 'folder', 'loop', 'device', 'gone')[kind - 7]}", not gone


@contextmanager
def in_time() -> Iterator[None]:
    """Raise `TimeoutError` inside where it takes too long."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def called(arguments: list[str]) -> tuple[int, str]:
    """Call the command line; return its exit code and all it printed. Raises what it raises."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), in_time():
        try:
            code = command_line(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 2
    return code, out.getvalue() + err.getvalue()


def wrong(code: int, told: str, whole: int, folder: Path, *, changed: bool) -> str | None:
    """Return what is wrong with an answer."""
    if code not in CODES:
        return f"exit code {code}: {told[-300:]}"
    if any(not c.isprintable() and c not in "\n\t" for c in told):
        return f"unprintable: {told!r}"[:300]
    if changed and code == 0 and whole != 0:
        return f"exit code 0, and {whole} on the whole data: {told[-300:]}"
    if list(folder.rglob("*.part")):
        return "a half-named file is left"
    if (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > 2 * GIGABYTE
    ):  # torch itself takes a part of a gigabyte
        return "more than a gigabyte"
    return None


def campaign(trials: int, seed: int) -> list[str]:
    """Make the trials; return what went wrong."""
    found: list[str] = []
    draw = random.Random(seed)
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (8 * GIGABYTE, limit)
    )  # of addresses: this process and not the machine runs out
    with tempfile.TemporaryDirectory() as scratch:
        good = {one.name: Path(scratch) / one.name for one in FORMATS}
        whole: dict[tuple[str, ...], int] = {}
        for one in FORMATS:
            with redirect_stderr(io.StringIO()):
                one.make(good[one.name])
            for command in one.commands:
                copy = Path(shutil.copytree(good[one.name], Path(scratch) / "copy", symlinks=True))
                whole[command], _ = called([part.format(copy) for part in command])
                shutil.rmtree(copy)
                shutil.rmtree(f"{copy}-out", ignore_errors=True)
        seen: Counter[int] = Counter()
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number in range(trials):
            one = draw.choice(FORMATS)
            command = draw.choice(one.commands)
            copy = Path(shutil.copytree(good[one.name], Path(scratch) / "copy", symlinks=True))
            how, changed = damaged(copy, draw)
            try:
                code, told = called([part.format(copy) for part in command])
                seen[code] += 1
                problem = wrong(code, told, whole[command], copy, changed=changed)
            except Exception:
                problem = traceback.format_exc()[-600:]
            if problem is not None:
                found.append(f"trial {number}, {' '.join(command)}, {how}: {problem}")
            if (peak := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) > base + GIGABYTE:
                found.append(f"trial {number}, {' '.join(command)}, {how}: {peak - base:,} bytes of memory")
                base = peak
            shutil.rmtree(copy)
            shutil.rmtree(f"{copy}-out", ignore_errors=True)
    print(
        f"{trials} trials, {len(found)} wrong; exit codes: {dict(sorted(seen.items()))}; whole: {sorted(whole.values())}"
    )
    return found


def main() -> int:
    """Make the trials; return 1 if any went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = campaign(args.trials, args.seed)
    print("\n".join(found[:20]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
