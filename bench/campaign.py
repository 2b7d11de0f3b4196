"""Two hundred faults on four real ranks: what is sensed, and whether every verdict is right.

    python bench/campaign.py --trials 200

Each trial trains a small GPT under guard (``act = protect``) on devices one of which computes wrongly: a fault drawn at
random in its operator, rank, kind, pattern and class. All trials share one process group; a trial depends on its number and
the seed only. ``--nondeterministic N`` adds N trials with a model one of whose kernels is healthy but sums in a random order.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forking import together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard, TrainingStopped
from bitwitness.demo.model import ByteGPT
from bitwitness.stats import bit_hash
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OperatorTap
from bitwitness.tap.trace import computes
from bitwitness.testing import FaultyDevice, contained, from_mapping

RANKS = 4
STEPS = 14
STRIKE = 11  # a deep step where deep_every is 10
CLASSES = ("transient", "persistent", "intermittent")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
KINDS = (
    {"kind": "exponent_msb"},
    {"kind": "bitflip", "bit": 31},
    {"kind": "bitflip", "bit": 28},
    {"kind": "bitflip", "bit": 25},
    {"kind": "nullify", "pattern": "tile"},
    {"kind": "nullify", "pattern": "row"},
    {"kind": "multiply", "factor": 64.0, "pattern": "column"},
    {"kind": "multiply", "factor": -30.0, "pattern": "warp"},
    {"kind": "multiply", "factor": 1e4, "pattern": "tile"},
    {"kind": "multiply_max"},
)


class RandomOrder(torch.autograd.Function):
    """A healthy kernel that sums its columns in an order of its own, so that the last bits vary."""

    order = random.Random()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply [.., K] by [K], adding two parts of K in random order and at a random cut."""
        ctx.save_for_backward(x, weight)
        cut = RandomOrder.order.randrange(1, x.shape[-1])
        return x[..., :cut] @ weight[:cut] + x[..., cut:] @ weight[cut:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the usual gradients."""
        x, weight = ctx.saved_tensors
        return grads[0].unsqueeze(-1) * weight, (grads[0].unsqueeze(-1) * x).flatten(0, -2).sum(0)


class Model(nn.Module):
    """The small GPT; ``varying`` adds a little of a kernel that is healthy but not deterministic to its loss."""

    def __init__(self, *, varying: bool) -> None:
        super().__init__()
        self.gpt = ByteGPT(width=32, layers=2, heads=2, context=16)
        self.varying = nn.Parameter(torch.ones(32)) if varying else None

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.gpt(text, following)
        if self.varying is None:
            return loss
        return loss + 0.1 * RandomOrder.apply(self.gpt.tokens(text), self.varying).square().mean()


def train(
    trial: dict[str, Any], *, guarded: bool, steps: int, gradients: list[torch.Tensor] | None = None
) -> tuple[str, Guard | None, str | None]:
    """Train; return the weights' hash, the guard, and why it stopped. ``gradients`` gets the reduced ones of the last step."""
    torch.manual_seed(trial["number"])
    model = DistributedDataParallel(Model(varying=trial["varying"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1000 * trial["number"] + dist.get_rank())
    guard, stopped = None, None
    if guarded:
        guard = Guard(
            model, optimizer, act="protect", deep_every=trial["deep_every"], trend={"warmup": 6}, self_test=False
        )
        guard.__enter__()
        guard.reporter.say = lambda _text: None
    try:
        for step in range(steps):
            text = torch.randint(0, 64, (3, 17), generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=trial["bf16"]):
                loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            if gradients is not None and step == steps - 1:
                gradients += [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except TrainingStopped as stop:
        stopped = str(stop)
    finally:
        if guard is not None:
            guard.close()
    hashes = tuple(int(bit_hash(p.detach())) for p in model.parameters())
    return f"{hash(hashes):x}", guard, stopped


def operators() -> list[tuple[str, str, str]]:
    """Return (module, operator, phase) of every operator that computes a floating result in one step of the model."""
    seen: dict[tuple[str, str, str], None] = {}

    def note(call: Any) -> None:
        if any(t.is_floating_point() for t in call.outputs) and call.module != "." and "detach" not in call.op:
            seen[call.module, call.op, call.phase] = None

    model, tracker = Model(varying=False), ModuleTracker()
    text = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(0))
    with OperatorTap(tracker, note, computes):
        model(text[:, :-1], text[:, 1:]).backward()
    return list(seen)


def draw(number: int, seed: int, known: list[tuple[str, str, str]], *, varying: bool) -> dict[str, Any]:
    """Draw a trial: the same on every rank."""
    rng = random.Random(seed * 1_000_003 + number)
    module, op, phase = rng.choice(known)
    kind = CLASSES[number % len(CLASSES)]
    fault: dict[str, Any] = {
        "site": f"{module}/{op}#0:{phase}.out0",
        "rank": rng.randrange(RANKS),
        "element": rng.randrange(16),
        **rng.choice(KINDS),
    }
    if kind == "transient":
        fault |= {"steps": [STRIKE], "times": 1}
    else:
        fault["from_step"] = STRIKE
    if kind == "intermittent":
        fault["probability"] = rng.choice((0.2, 0.4, 0.6))
    deep = rng.random() < 0.5
    return {
        "number": number, "class": kind, "fault": fault, "deep": deep, "deep_every": 10 if deep else 0,
        "bf16": rng.random() < 0.5, "varying": varying,
    }  # fmt: skip


def harm(trial: dict[str, Any], rank: int) -> float:
    """Return the relative L2 error that the fault makes in the raw reduced gradient of its first step, unguarded."""
    results: list[list[torch.Tensor]] = []
    for faults in ([], [trial["fault"]]):
        gradients: list[torch.Tensor] = []
        with FaultyDevice(from_mapping({"fault": faults}), rank=rank, seed=trial["number"]):
            train(trial, guarded=False, steps=STRIKE + 1, gradients=gradients)
        results.append(gradients)
    clean = torch.cat([g.flatten() for g in results[0]]).double()
    faulty = torch.cat([g.flatten() for g in results[1]]).double()
    error = float((faulty - clean).norm() / clean.norm())
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN


def run_trial(trial: dict[str, Any]) -> dict[str, Any]:
    """Run one trial on all ranks; return the account of rank 0, with what every rank's device did."""
    rank = dist.get_rank()
    error = harm(trial, rank)
    clean, _, _ = train(trial, guarded=False, steps=STEPS)
    with FaultyDevice(from_mapping({"fault": [trial["fault"]]}), rank=rank, seed=trial["number"]) as device:
        weights, guard, stopped = train(trial, guarded=True, steps=STEPS)
    changed = [firing.step for firing in device.fired if firing.changed]
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, changed)
    assert guard is not None
    assert guard.watch is not None
    verdicts = guard.verdicts
    sensors = sorted(
        {s["sensor"] for v in verdicts for items in v.evidence.get("suspicions", {}).values() for s in items}
    )
    return {
        **trial,
        "harm": error,
        "strikes": sum(map(len, told)),
        "suspicions": guard.coverage()["suspicions"],
        "verdicts": [
            {"step": v.step, "cause": str(v.cause), "ranks": list(v.ranks), "action": str(v.action), "why": v.message}
            for v in verdicts
        ],
        "sensors": sensors,
        "stopped": stopped is not None,
        "as_clean": weights == clean,
        "failures": guard.coverage()["failures"],
    }


def judge(trial: dict[str, Any]) -> str:
    """Say whether a trial's verdicts are right: right, wrong, inconclusive, or unsensed."""
    if not trial["verdicts"]:
        return "unsensed" if trial["strikes"] else "idle"
    culprit = trial["fault"]["rank"]
    allowed = {
        "transient": {"transient_hardware"},
        "persistent": {"persistent_hardware"},
        "intermittent": {"transient_hardware", "persistent_hardware"},
    }[trial["class"]]
    results = set()
    for verdict in trial["verdicts"]:
        if verdict["cause"] == "inconclusive":
            results.add("inconclusive")
        elif verdict["ranks"] != [culprit] or verdict["cause"] not in allowed or not trial["strikes"]:
            results.add("wrong")
        else:
            results.add("right")
    return next(result for result in ("wrong", "right", "inconclusive") if result in results)


def worker(args: argparse.Namespace, lines: Path) -> None:
    """Run all trials on this rank; rank 0 writes a line a trial."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    known = operators()
    numbers = [(n, False) for n in range(args.trials)] + [(10_000 + n, True) for n in range(args.nondeterministic)]
    for number, varying in numbers:
        result = run_trial(draw(number, args.seed, known, varying=varying))
        if dist.get_rank() == 0:
            with lines.open("a") as file:
                file.write(json.dumps({**result, "result": judge(result)}, default=str) + "\n")
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


def summary(trials: list[dict[str, Any]]) -> str:
    """Return the tables."""
    lines = [
        "| model | class | trials | struck | harmful | sensed of harmful | right | inconclusive | wrong |",
        "|---" * 9 + "|",
    ]
    for varying in (False, True):
        for kind in CLASSES:
            some = [t for t in trials if t["class"] == kind and t["varying"] is varying]
            if some:
                results = Counter(t["result"] for t in some)
                harmful = [t for t in some if t["harm"] > 1 and t["strikes"]]
                sensed = sum(bool(t["verdicts"] or t["suspicions"]) for t in harmful)
                name = "varying kernel" if varying else "deterministic"
                lines.append(
                    f"| {name} | {kind} | {len(some)} | {sum(bool(t['strikes']) for t in some)} | {len(harmful)} | {sensed} "
                    f"| {results['right']} | {results['inconclusive']} | {results['wrong']} |"
                )
    deep = [
        t for t in trials
        if t["deep"] and t["harm"] > 1 and t["strikes"] and any(f"/{op}#" in t["fault"]["site"] for op in PRODUCTS)
    ]  # fmt: skip
    sensed = sum(bool(t["suspicions"]) for t in deep)
    # An intermittent fault may strike more than one step, and too weakly to be sensed in another one.
    mended = [t for t in trials if any(v["action"] == "healed" for v in t["verdicts"]) and not t["varying"]]
    healed = [t for t in mended if t["class"] == "transient"]
    stopped = [t for t in mended if any(v["action"] == "stopped" for v in t["verdicts"])]
    others = [t for t in mended if t["class"] != "transient" and t not in stopped]
    equal, others_equal = (sum(t["as_clean"] for t in these) for these in (healed, others))
    lines += [
        "",
        f"Harmful faults of matrix products and attention on deep steps: {sensed} of {len(deep)} sensed.",
        f"Healed transients, deterministic model: {equal} of {len(healed)} end with the fault-free bits.",
        f"Healed intermittent faults: {others_equal} of {len(others)}; {len(stopped)} more convicted later.",
    ]
    odd = [t for t in trials if t["result"] in ("inconclusive", "wrong") or t["failures"]]
    lines += [
        f"- {t['result']}: trial {t['number']}, {t['class']}, {t['fault']}: {t['verdicts'] or t['failures']}"
        for t in odd
    ]
    return "\n".join(lines)


@contained()
def main() -> int:
    """Start the ranks, then tell what they found; return 1 if any verdict was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--nondeterministic", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))  # no TemporaryDirectory: a fork's exit would remove it
    try:
        lines = scratch / "trials.jsonl"
        counts = [
            "--trials",
            str(args.trials),
            "--nondeterministic",
            str(args.nondeterministic),
            "--seed",
            str(args.seed),
        ]
        if not together(RANKS, partial(worker, args, lines), scratch):
            sys.stderr.write("\n".join(log.read_text()[-3000:] for log in sorted(scratch.glob("rank*.log"))))
            return 1
        trials = [json.loads(line) for line in lines.read_text().splitlines()]
    finally:
        shutil.rmtree(scratch)
    told = summary(trials)
    print(told)
    args.out.mkdir(parents=True, exist_ok=True)
    command = f"python bench/campaign.py {' '.join(counts)}"
    (args.out / "campaign.jsonl").write_text("\n".join(json.dumps(trial, default=str) for trial in trials) + "\n")
    (args.out / "campaign.md").write_text(f"# Faults on four ranks\n\n`{command}`\n\n{told}\n")
    return int(any(trial["result"] == "wrong" for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
