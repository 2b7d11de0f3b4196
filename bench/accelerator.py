"""On an accelerator: whether bits are untouched, faults found, runs comparable, and what it costs.

    python bench/accelerator.py --device cuda [--only PART …] [--quick]

Everything else in this folder runs on CPUs. Here time is the wall's, of a few steps at a stretch, the device synchronised
before and after; the figure is the median over rounds of watched over plain stretches by turns, with a 95 % interval from the
order statistics. Host synchronisations are counted by torch itself (CUDA only). ``--quick`` proves that it runs, on a CPU too.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checksum_cost import call_of
from gpt import GPT
from monitor_own import GRADIENTS
from overhead import ratio
from price import ResidualNet
from torch import nn

import bitwitness as bw
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.testing import FaultyDevice, contained, from_mapping

Batch = tuple[torch.Tensor, torch.Tensor]
STRIKE = 11  # a deep step where every tenth is
STRETCH = 4
PARTS = ["doctor", "rounding", "bits", "clean", "faults", "state", "record", "cost"]


@dataclass(frozen=True)
class Setting:
    """A training: its model, what a batch is drawn from, and its precision."""

    name: str
    model: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    autocast: torch.dtype | None = None
    scaled: bool = False


def text(vocabulary: int, sequences: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Return what draws tokens and the ones that follow them."""

    def draw(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return draw


def images(generator: torch.Generator) -> Batch:
    """Draw 32 labelled images."""
    return torch.randn(32, 3, 32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def small() -> nn.Module:
    """Return a GPT that trains in a moment."""
    return GPT(512, 128, 4, 4)


SMALL = (
    Setting("GPT, float32", small, text(512, 16, 128)),
    Setting("GPT attending by hand, float32", lambda: GPT(512, 128, 4, 4, eager=True), text(512, 16, 128)),
    Setting("GPT, bfloat16 autocast", small, text(512, 16, 128), torch.bfloat16),
    Setting("GPT, float16 and a scaler", small, text(512, 16, 128), torch.float16, scaled=True),
    Setting("convnet, BatchNorm, float32", ResidualNet, images),
)


class Training:
    """A model on a device, its optimizer and batches."""

    def __init__(self, setting: Setting, device: str) -> None:
        torch.manual_seed(0)
        self.setting, self.device = setting, torch.device(device)
        self.model = setting.model().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setting.scaled)
        self.generator = torch.Generator().manual_seed(1)

    def batch(self) -> Batch:
        """Draw the next batch."""
        inputs, targets = self.setting.draw(self.generator)
        return inputs.to(self.device), targets.to(self.device)

    def step(self, batch: Batch, strike: Callable[[torch.Tensor], None] | None = None) -> None:
        """Train one step; ``strike`` is given the first gradient, before it is used."""
        kind = self.setting.autocast
        with torch.autocast(self.device.type, dtype=kind, enabled=kind is not None):
            loss = self.model(*batch)
        self.scaler.scale(loss).backward()
        if strike is not None and (grad := next(iter(self.model.parameters())).grad) is not None:
            strike(grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        """Return the weights, on the CPU."""
        return [value.detach().cpu() for value in self.model.state_dict().values()]


Watch = Callable[[Training, Path], Any]
WATCHES: dict[str, Watch] = {
    "guard, every step replayed": lambda t, _f: bw.Guard(t.model, t.optimizer, **bw.testing.EVERY_STEP),
    "guard": lambda t, _f: bw.Guard(t.model, t.optimizer, deep_every=5),
    "tracer": lambda t, _f: bw.NonfiniteTracer(t.model, t.optimizer),
    "recorder, statistics": lambda t, f: bw.Recorder(t.model, out=f / "run", steps="0-5"),
    "recorder, tensors": lambda t, f: bw.Recorder(t.model, out=f / "run", content="tensors", steps="2"),
    "monitor": lambda t, f: bw.Monitor(t.model, out=f / "run"),
}


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Tell whether all bits agree, NaN included."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True) if a.ndim)


def train(setting: Setting, device: str, steps: int, watch: Watch | None = None) -> tuple[list[torch.Tensor], Any]:
    """Train, watched or not; return the weights and what watched."""
    training = Training(setting, device)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        watching = None if watch is None else stack.enter_context(watch(training, Path(folder)))
        for _ in range(steps):
            training.step(training.batch())
    return training.weights(), watching


def bits(device: str, quick: bool) -> list[str]:
    """Compare the weights of plain and watched trainings."""
    lines = [
        "| training | repeats its bits | watched by | same bits | verdicts | suspicions | failures |",
        "|" + "---|" * 7,
    ]
    steps = 6 if quick else 20
    for setting in SMALL[:1] if quick else SMALL:
        plain, again = train(setting, device, steps)[0], train(setting, device, steps)[0]
        for name, watch in WATCHES.items():
            weights, watching = train(setting, device, steps, watch)
            told = watching.coverage() if isinstance(watching, bw.Guard) else {}
            verdicts = [str(v.cause) for v in watching.verdicts] if told else ""
            lines.append(
                f"| {setting.name} | {same(plain, again)} | {name} | {same(plain, weights)} | {verdicts} "
                f"| {told.get('suspicions', '')} | {told.get('failures', '')} |"
            )
            print(lines[-1], flush=True)
    return lines


ONCE: dict[str, Any] = {"steps": [STRIKE], "times": 1}
ALWAYS: dict[str, Any] = {"from_step": STRIKE}
TIMES: dict[str, Any] = {"kind": "multiply", "factor": 64.0}
FAULTS = {
    "once, backward product": ("blocks.1.fc1/mm#0:backward.out0", ONCE | {"kind": "exponent_msb"}),
    "once, forward product": ("blocks.2.fc2/addmm:forward", ONCE | TIMES | {"pattern": "tile"}),
    "always, forward product": ("blocks.2.fc1/addmm:forward", ALWAYS | TIMES | {"pattern": "tile"}),
    "always, backward product": ("blocks.1.proj/mm*:backward", ALWAYS | {"kind": "bitflip", "bit": -2, "element": 7}),
    "once, GELU": ("blocks.1/gelu:forward.out0", ONCE | TIMES),
    "once, layer norm": ("blocks.2.ln1/native_layer_norm:forward.out0", ONCE | TIMES | {"pattern": "row"}),
    "always, attention": ("blocks.3/*attention*:forward.out0", ALWAYS | TIMES | {"pattern": "row", "element": 200}),
    "always, attention's gradient": (
        "blocks.3/*attention*:backward.out1",
        ALWAYS | TIMES | {"pattern": "row", "element": 200},
    ),
}


def faults(device: str, quick: bool) -> list[str]:
    """Strike a device that computes wrongly; tell the verdicts, and whether healing gave back the bits."""
    lines = ["| training | fault | strikes | verdicts | ends with the fault-free bits |", "|" + "---|" * 5]
    for setting in SMALL[:1] if quick else SMALL[:3]:
        clean = train(setting, device, STRIKE + 4)[0]
        for name, (site, fault) in list(FAULTS.items())[: 2 if quick else None]:
            training, verdicts = Training(setting, device), []
            with (
                contained(),
                FaultyDevice(from_mapping({"fault": [{"site": site, **fault}]}), rank=0, seed=0) as faulty,
            ):
                guard = bw.Guard(training.model, training.optimizer, act="protect", deep_every=10, trend={"warmup": 6})
                try:
                    with guard:
                        for _ in range(STRIKE + 4):
                            training.step(training.batch())
                except bw.TrainingStopped:
                    pass
                verdicts = [f"{v.cause}, {v.action}, {v.site}" for v in guard.verdicts]
            strikes = sum(firing.changed for firing in faulty.fired)
            lines.append(f"| {setting.name} | {name} | {strikes} | {verdicts} | {same(clean, training.weights())} |")
            print(lines[-1], flush=True)
    return lines


def clean(device: str, quick: bool) -> list[str]:
    """Train healthily with everything on every step: what the sensors say of it, by sensor."""
    lines = [
        "| training | steps | suspicions by sensor | verdicts | twice | not repeated | failures |",
        "|" + "---|" * 7,
    ]
    steps = 10 if quick else 60
    for setting in SMALL[:1] if quick else SMALL:
        training = Training(setting, device)
        with bw.Guard(training.model, training.optimizer, deep_every=1, quiet=True) as guard:
            for _ in range(steps):
                training.step(training.batch())
        told, said = guard.coverage(), Counter(finding.sensor for finding in guard.findings)
        twice = told["twice"]
        lines.append(
            f"| {setting.name} | {steps} | {dict(said)} | {[str(v.cause) for v in guard.verdicts]} | {twice['calls']} calls of "
            f"{twice['operators']} operators | {twice['do_not_repeat']} | {told['failures']} |"
        )
        print(lines[-1], [finding.message for finding in guard.findings[:3]], flush=True)
    return lines


def flip(tensor: torch.Tensor) -> None:
    """Flip the highest exponent bit of a number past the middle; torch counts no write."""
    tensor.data.view(torch.int32).view(-1)[tensor.numel() // 2 + 3] ^= 1 << 30


STATE: dict[str, Callable[[Training], torch.Tensor]] = {
    "weight": lambda t: next(iter(t.model.parameters())),
    "optimizer's state": lambda t: t.optimizer.state[next(iter(t.model.parameters()))]["exp_avg"],
    "buffer": lambda t: next(b for b in t.model.buffers() if b.is_floating_point()),
}


def state(device: str, quick: bool) -> list[str]:
    """Flip a bit between two steps, or of a gradient behind its backward; tell what is said."""
    lines = ["| training | struck | findings | verdicts | ends with the fault-free bits |", "|" + "---|" * 5]
    for setting in (SMALL[0],) if quick else (SMALL[0], SMALL[2], SMALL[4]):
        clean_weights = train(setting, device, STRIKE + 4)[0]
        for what in (*STATE, "gradient"):
            training = Training(setting, device)
            if what == "buffer" and not any(b.is_floating_point() for b in training.model.buffers()):
                continue
            guard = bw.Guard(training.model, training.optimizer, act="protect", deep_every=1, quiet=True)
            with contained(), suppress(bw.TrainingStopped), guard:
                for step in range(STRIKE + 4):
                    if step == STRIKE and what in STATE:
                        flip(STATE[what](training))
                    training.step(training.batch(), flip if step == STRIKE and what == "gradient" else None)
            lines.append(
                f"| {setting.name} | {what} | {sorted({f.sensor for f in guard.findings})} | "
                f"{[f'{v.cause}, {v.action}, {v.site}' for v in guard.verdicts]} | {same(clean_weights, training.weights())} |"
            )
            print(lines[-1], flush=True)
    return lines


def record(device: str, quick: bool, folder: Path) -> list[str]:
    """Record the same training here and on the CPU, and twice here; compare them."""
    lines = ["| training | content | pair | status | conclusion | suspects |", "|" + "---|" * 6]
    for setting in SMALL[:1] if quick else SMALL:
        for content in ("stats", "tensors"):
            runs = {}
            for name, where in (("here", device), ("here again", device), ("cpu", "cpu")):
                training = Training(setting, where)
                runs[name] = folder / f"{setting.name} {content} {name}".replace(" ", "-").replace(",", "")
                with bw.Recorder(training.model, out=runs[name], content=content, steps="0-2"):
                    for _ in range(3):
                        training.step(training.batch())
            for one, other in (("here", "here again"), ("cpu", "here")):
                report = bw.compare(runs[one], runs[other])
                lines.append(
                    f"| {setting.name} | {content} | {one}, {other} | {report.status} | {report.conclusion} | "
                    f"{[s.text for s in report.suspects[:3]]} |"
                )
                print(lines[-1], flush=True)
    return lines


def rounding(device: str, quick: bool) -> list[str]:
    """Hold healthy matrix products of many shapes against the checksum's threshold: the largest share of it that is seen."""
    lines = ["| dtype | products | beyond the threshold | largest share of it | at |", "|" + "---|" * 5]
    generator = torch.Generator(device).manual_seed(1)
    lengths = (64, 384) if quick else (64, 128, 384, 1024, 4096)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        worst, beyond, count = (0.0, ""), 0, 0
        for m, k, n in itertools.product(lengths, (*lengths, 1024 if quick else 16384), lengths):
            a, b = (torch.randn(*shape, generator=generator, device=device) for shape in ((m, k), (k, n)))
            kinds = {
                "normal": (a, b),
                "drifting": (a + torch.linspace(-3, 3, k, device=device), b),
                "relu": (a.relu(), b),
            }
            for kind, (left, right) in kinds.items():
                x, y = left.to(dtype), (right / k**0.5).to(dtype)
                sensor = ChecksumSensor(deferred=True)
                sensor(call_of(x, y, x @ y))
                beyond += len([f for f in sensor.drain(0, 0) if f.evidence["kind"] == "residual"])
                worst = max(worst, (sensor.largest_ratio, f"{kind} {m} x {k} x {n}"))
                count += 1
        lines.append(f"| {dtype} | {count} | {beyond} | {worst[0]:.2f} | {worst[1]} |")
        print(lines[-1], flush=True)
    return lines


def large() -> Setting:
    """Return a GPT of 203 million parameters with 8,192 tokens a step, in bfloat16."""
    return Setting("GPT 203 M", lambda: GPT(32768, 1024, 13, 16, 1024), text(32768, 8, 1024), torch.bfloat16)


COSTS: dict[str, Watch | None] = {
    "plain": None,
    "guard, light steps": lambda t, _f: bw.Guard(t.model, t.optimizer, deep_every=0, replay={"calibrate": False}),
    "guard, every step deep": lambda t, _f: bw.Guard(t.model, t.optimizer, deep_every=1, replay={"calibrate": False}),
    "tracer": lambda t, _f: bw.NonfiniteTracer(t.model, t.optimizer),
    "recorder, modules": lambda t, f: bw.Recorder(t.model, out=f / "modules", level="modules"),
    "recorder, mix": lambda t, f: bw.Recorder(t.model, out=f / "mix"),
    "monitor, gradients": lambda t, f: bw.Monitor(t.model, out=f / "gradients", kinds=GRADIENTS),
    "monitor": lambda t, f: bw.Monitor(t.model, out=f / "monitored"),
}


def synchronise(device: torch.device) -> None:
    """Wait for what the device has been asked to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def waits(training: Training) -> int | str:
    """Return how often the host waits for the device in one step, as torch counts it."""
    if training.device.type != "cuda":
        return ""
    batch = training.batch()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message).lower() for one in heard)


def cost(device: str, quick: bool, folder: Path, watched_by: list[str]) -> list[str]:
    """Time steps of one training under each instrument, by turns."""
    setting, rounds = (SMALL[0], 3) if quick else (large(), 6)
    lines = [
        f"{setting.name}:",
        "",
        "| watched by | ms a step | ratio | 95 % interval | host waits |",
        "|" + "---|" * 5,
    ]
    seconds: dict[str, list[float]] = {}
    plain: list[float] = []
    for name, watch in COSTS.items():
        if name not in watched_by:
            continue
        training, other = Training(setting, device), Training(setting, device)
        shuffle = random.Random(2)
        spent: dict[bool, list[float]] = {True: [], False: []}
        context = nullcontext() if watch is None else watch(training, folder)
        with context as watching:
            for number in range(rounds + 2):
                batches = [training.batch() for _ in range(STRETCH)]
                for watched in shuffle.sample([True, False], 2):
                    one = training if watched else other
                    if watching is not None and number:
                        (watching.resume if watched else watching.pause)()
                    synchronise(one.device)
                    started = time.perf_counter()
                    for batch in batches:
                        one.step(batch)
                    synchronise(one.device)
                    if number >= 2:
                        spent[watched].append((time.perf_counter() - started) / STRETCH)
            if watching is not None:
                watching.resume()
            waited = waits(training)
        seconds[name], plain = spent[True], spent[False]
        middle, low, high = ratio(seconds[name], plain)
        took = 1e3 * statistics.median(seconds[name])
        lines.append(f"| {name} | {took:.1f} | {middle:.3f} | {low:.3f} – {high:.3f} | {waited} |")
        print(lines[-1], flush=True)
        del training, other, watching
    return lines


def doctor(device: str) -> list[str]:
    """Return what `bitwitness doctor` says here."""
    found = subprocess.run([sys.executable, "-m", "bitwitness", "doctor"], capture_output=True, text=True, check=False)
    print(found.stdout, found.stderr[-3000:], flush=True)
    return [f"`bitwitness doctor` returned {found.returncode} ({device})"]


def main() -> int:
    """Run the parts; print, and write ``bench/results/accelerator.md``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=PARTS)
    parser.add_argument(
        "--watched-by", nargs="+", default=list(COSTS), choices=list(COSTS), help="whose cost is measured"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    failed, told = 0, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parts: dict[str, Callable[[], list[str]]] = {
            "doctor": lambda: doctor(args.device),
            "rounding": lambda: rounding(args.device, args.quick),
            "bits": lambda: bits(args.device, args.quick),
            "clean": lambda: clean(args.device, args.quick),
            "faults": lambda: faults(args.device, args.quick),
            "state": lambda: state(args.device, args.quick),
            "record": lambda: record(args.device, args.quick, folder),
            "cost": lambda: cost(args.device, args.quick, folder, args.watched_by),
        }
        for name in args.only:
            try:
                told += ["", f"## {name}", "", *parts[name]()]
            except Exception:
                traceback.print_exc()
                failed += 1
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    args.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "bench/accelerator.py", *sys.argv[1:]])
    head = f"# On an accelerator\n\n`{command}`, torch {torch.__version__}, {where}\n"
    (args.out / "accelerator.md").write_text(head + "\n".join(told) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
