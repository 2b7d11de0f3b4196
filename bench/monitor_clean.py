"""How often a monitor's rules alert where nothing is wrong, and whether they do where something is.

    python bench/monitor_clean.py [--steps 600] [--only-clean | --only-faults]

Eleven trainings without faults (models, optimizers, precisions), everything looked at: alerts against series-steps, the numbers
held against the rules. Then faults in three of them, each planted at one step: is it alerted, by which rule, and is the
right place named; and two ranks, of which one goes another way slowly.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from clean import SETTINGS, Setting, data
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bitwitness as bw
from bitwitness import Finding
from bitwitness.demo.model import standard_library

CLEAN = tuple(
    replace(setting, spiky=False) for setting in SETTINGS if not setting.shift and setting.name[-4:] != "bf16"
)
AT = 60
"""The step at which a fault is planted."""
Plant = Callable[[int, nn.Module, list[torch.optim.Optimizer]], None]
"""Called before each step's optimizer; ``None`` of the fault's own steps is left out."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, when it is planted, and which rules may say so of which place (a part of a series' name)."""

    name: str
    rules: tuple[str, ...]
    place: str
    grads: Plant | None = None
    forward: bool = False
    batch: bool = False
    cause: str = ""
    after: int = 70  # steps that it is given to be seen in
    state: tuple[str, ...] = ()  # what the optimizer has to have, one of these, for there to be anything to plant


def weights(model: nn.Module) -> tuple[str, nn.Parameter]:
    """Return the parameter in the middle of those that are matrices."""
    named = [(name, p) for name, p in model.named_parameters() if p.ndim == 2 and "norm" not in name]
    return named[len(named) // 2]


def _poison(value: float, at: int = AT) -> Plant:
    def plant(step: int, model: nn.Module, optimizers: list[Any]) -> None:
        del optimizers
        _, p = weights(model)
        if step == at and p.grad is not None:
            p.grad.view(-1)[3] = value

    return plant


def _scaled(factor: float) -> Plant:
    def plant(step: int, model: nn.Module, optimizers: list[Any]) -> None:
        del optimizers
        _, p = weights(model)
        if step >= AT and p.grad is not None:
            p.grad.mul_(factor)

    return plant


def _state(keys: tuple[str, ...], factor: float) -> Plant:
    def plant(step: int, model: nn.Module, optimizers: list[Any]) -> None:
        _, p = weights(model)
        for optimizer in optimizers:
            for key in keys if step == AT else ():
                if key in optimizer.state.get(p, {}):
                    optimizer.state[p][key].mul_(factor)

    return plant


@torch.no_grad()
def _shrinking(step: int, model: nn.Module, optimizers: list[Any]) -> None:
    """Take 3 % off a weight before each update."""
    del optimizers
    if step >= AT:
        weights(model)[1].mul_(0.97)


def _frozen(step: int, model: nn.Module, optimizers: list[Any]) -> None:
    """Have the optimizer forget a parameter, whose gradient goes on."""
    if step == AT:
        _, p = weights(model)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [q for q in group["params"] if q is not p]


FAULTS = (
    Fault("Inf once, one element of a gradient", ("nonfinite",), "weight", _poison(float("inf"))),
    Fault("NaN once, one element of a gradient", ("nonfinite",), "weight", _poison(float("nan"))),
    Fault("a gradient drops to zero", ("vanished",), "weight", _scaled(0.0)),
    Fault("a gradient drops by 10,000", ("vanished",), "weight", _scaled(1e-4)),
    Fault("frozen weights", ("frozen",), "weight", _frozen),
    Fault("weights that shrink, 3 % a step", ("drift", "exploding"), "weight", _shrinking, after=140),
    Fault("an exploding gradient, 30 times", ("exploding",), "weight", _scaled(30.0)),
    Fault(
        "one layer explodes, output 30 times, once", ("exploding", "spike"), "module", forward=True, cause="one_layer"
    ),
    Fault("a bad batch", ("spike",), "loss", batch=True, cause="data"),
    Fault(
        "second moment reset to 1e-6 of itself",
        ("exploding", "drift", "vanished", "spike"),
        "weight",
        _state(("exp_avg_sq",), 1e-6),
        cause="optimizer_state",
        state=("exp_avg_sq",),
    ),
    Fault(
        "first moment 300 times",
        ("exploding",),
        "weight",
        _state(("exp_avg", "momentum_buffer"), 300.0),
        cause="optimizer_state",
    ),
)


def train(
    setting: Setting, steps: int, fault: Fault | None, folder: Path, **settings: Any
) -> tuple[list[Finding], int, int]:
    """Train one setting under a monitor; return findings, series-steps, and steps with alerts before the fault."""
    torch.manual_seed(0)
    model = setting.model()
    optimizers = setting.optimizers(model.parameters())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    base = [group["lr"] for group in groups]
    scaler = torch.amp.GradScaler("cpu", enabled=setting.scaler)
    generator = torch.Generator().manual_seed(1)
    text = standard_library(1 << 20)
    hit = next((m for m in list(model.modules())[len(list(model.modules())) // 2 :] if isinstance(m, nn.Linear)), None)
    with bw.Monitor(model, out=folder, **settings) as monitor:
        for step in range(steps):
            for group, rate in zip(groups, base, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / 50)
            batch = data(setting, step, steps, text, generator)
            if fault is not None and fault.batch and step == AT:
                batch = [torch.zeros_like(batch[0]), torch.randint(128, 256, batch[1].shape, generator=generator)]
            handle = None
            if fault is not None and fault.forward and step == AT and hit is not None:
                handle = hit.register_forward_hook(lambda _m, _a, out: out * 30, prepend=True)
            with torch.autocast("cpu", dtype=setting.autocast or torch.bfloat16, enabled=setting.autocast is not None):
                loss = model(*batch)
            scaler.scale(loss).backward()
            if handle is not None:
                handle.remove()
            if fault is not None and fault.grads is not None:
                fault.grads(step, model, optimizers)
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9 if fault else 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        findings = monitor.findings
        return findings, monitor.series_steps, sum(f.step < AT for f in findings)


def clean(steps: int, only: list[int]) -> list[str]:
    """Train everything without a fault; return a table's lines."""
    lines = ["| training | series-steps | alerts | per 10,000 | which |", "|---|---|---|---|---|"]
    total = alerts = 0
    for setting in [CLEAN[number] for number in only]:
        with tempfile.TemporaryDirectory(prefix="monitor-clean-") as scratch, redirect_stderr(io.StringIO()):
            findings, looked, _ = train(setting, steps, None, Path(scratch) / "run")
        found = [f for f in findings if f.sensor != "monitor.post_mortem"]
        total, alerts = total + looked, alerts + len(found)
        which = ", ".join(
            f"{name.removeprefix('monitor.')} {n}" for name, n in Counter(f.sensor for f in found).items()
        )
        lines.append(
            f"| {setting.name} | {looked} | {len(found)} | {1e4 * len(found) / max(1, looked):.3f} | {which} |"
        )
        print(lines[-1], flush=True)
        for f in found:
            print(f"    step {f.step}: {f.sensor}: {f.message[:150]}", file=sys.stderr)
    lines.append(f"| all | {total} | {alerts} | {1e4 * alerts / max(1, total):.3f} | |")
    print(lines[-1], flush=True)
    return lines


def _has_state(setting: Setting, keys: tuple[str, ...]) -> bool:
    """Tell whether a setting's optimizer keeps one of these for each parameter."""
    kept = {"AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
    names = {type(optimizer).__name__ for optimizer in setting.optimizers(setting.model().parameters())}
    return not keys or any(key in kept[name] for name in names for key in keys)


def faults(names: list[int]) -> list[str]:
    """Plant each fault in some trainings; return a table's lines."""
    chosen = [CLEAN[i] for i in names]
    lines = ["| fault | " + " | ".join(s.name for s in chosen) + " |", "|---" * (1 + len(chosen)) + "|"]
    seen = asked = 0
    for fault in FAULTS:
        cells = []
        for setting in chosen:
            if not _has_state(setting, fault.state):
                cells.append("has none")
                continue
            with (
                tempfile.TemporaryDirectory(prefix="monitor-fault-") as scratch,
                redirect_stderr(io.StringIO()),
            ):
                findings, _, early = train(setting, AT + fault.after, fault, Path(scratch) / "run")
            after = [f for f in findings if f.step >= AT]
            right = [f for f in after if f.sensor.removeprefix("monitor.") in fault.rules]
            causes = [f.evidence["cause"] for f in after if f.sensor == "monitor.post_mortem"]
            asked += 1
            seen += bool(right)
            what = (
                f"step {right[0].step}, {right[0].sensor.removeprefix('monitor.')}: {right[0].message[:70]}"
                if right
                else (f"NOT ({after[0].sensor} {after[0].message[:60]})" if after else "NOT")
            )
            cells.append(
                what
                + (f" [{causes[0]}{'' if causes[0] == fault.cause else ' WRONG'}]" if causes and fault.cause else "")
                + (f" ({early} early)" if early else "")
            )
        lines.append(f"| {fault.name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    lines.append(f"\n{seen} of {asked} seen.")
    print(lines[-1])
    return lines


def _drifting_rank(rank: int, store: str, folder: Path, steps: int) -> None:
    """Train under DDP; from `AT` on the second rank makes a weight's local gradient 3 % larger with each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    setting = CLEAN[0]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    bare = setting.model()
    net, optimizers, step = DistributedDataParallel(bare), setting.optimizers(bare.parameters()), 0
    weights(bare)[1].register_hook(lambda grad: grad * 1.03 ** (step - AT) if rank and step >= AT else None)
    generator, text = torch.Generator().manual_seed(1 + rank), standard_library(1 << 20)
    with bw.Monitor(net, out=folder) as monitor:
        for step in range(steps):
            net(*data(setting, step, steps, text, generator)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        (folder / f"told{rank}").write_text("\n".join(f"{f.step}\t{f.sensor}\t{f.message}" for f in monitor.findings))
    dist.destroy_process_group()


def drifting_rank() -> list[str]:
    """Say what either of two ranks tells when one of them goes another way slowly."""
    lines = ["", "Two ranks (DDP), the local gradient of one weight grows by 3 % a step on rank 1:", ""]
    with tempfile.TemporaryDirectory(prefix="monitor-ranks-") as scratch, redirect_stderr(io.StringIO()):
        folder = Path(scratch) / "run"
        mp.spawn(_drifting_rank, (f"{scratch}/store", folder, AT + 70), nprocs=2)
        told = {rank: (folder / f"told{rank}").read_text().splitlines() for rank in (0, 1)}
    lines += [f"- rank {rank}: " + ("; ".join(said) if said else "nothing") for rank, said in told.items()]
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    """Run, print, and write ``bench/results/monitor_clean.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only-clean", action="store_true")
    parser.add_argument("--only-faults", action="store_true")
    parser.add_argument(
        "--only", type=int, nargs="+", default=list(range(len(CLEAN))), help="trainings without a fault"
    )
    parser.add_argument("--trainings", type=int, nargs="+", default=[0, 4, 7], help="in which faults are planted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [] if args.only_faults else clean(args.steps, args.only)
    lines += [""] if lines else []
    lines += [] if args.only_clean else [*faults(args.trainings), *drifting_rank()]
    if not (args.only_clean or args.only_faults):
        text = f"`python bench/monitor_clean.py --steps {args.steps}`\n\n" + "\n".join(lines)
        (Path(__file__).parent / "results" / "monitor_clean.md").write_text(f"# A monitor's alerts\n\n{text}\n")


if __name__ == "__main__":
    main()
