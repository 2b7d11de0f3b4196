"""Who made the first NaN: the answers of three tools to the same seven cases, and what each costs.

    python bench/nonfinite.py [--rounds 20] [--quick]

Answers: a GPT-2 of transformers (2 layers, loss inside) trains three steps; on the second something happens. An answer is right
if the report names the operator, the module, and the line of the model's code. Costs: interleaved A/B in one process, as in
``overhead.py``. A hit: a step that is struck and replayed, in ordinary step times.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from overhead import ratio
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.debug_utils import DebugUnderflowOverflow

import bitwitness as bw

MLP = "transformer.h.1.mlp"
STRUCK = 1


class Broken(torch.autograd.Function):
    """Passes its input on; its backward divides zero by zero, or is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        """Return a copy."""
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return what the case asks for."""
        zero = grad * 0
        return (zero / zero if ctx.how == "custom 0/0" else grad + float("inf")), None


class Act(nn.Module):
    """The second layer's activation, where the cases happen; ``how`` is empty on ordinary steps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the activation, and the case."""
        y: torch.Tensor = self.inner(x)
        if self.how == "sqrt(0) in backward":
            y = y + (y - y.detach()).abs().sqrt()
        if self.how.startswith("custom"):
            y = Broken.apply(y, self.how)
        if self.how == "fp16 overflow in a matmul":
            y = y * 20000
        return y


@dataclass(frozen=True)
class Case:
    """What the right answer names: one of ``ops`` and of ``modules``."""

    name: str
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    half: bool = False
    scale: float = 1.0


CASES = [
    Case("healthy, sdpa with its -inf mask"),
    Case("fp16 overflow in a matmul", ("addmm",), (f"{MLP}.c_proj",), half=True),
    Case("a NaN parameter", ("weight",), (f"{MLP}.c_fc",)),
    Case("sqrt(0) in backward", ("sqrt", "div"), (f"{MLP}.act",)),
    Case("custom 0/0", ("Broken", "div"), (f"{MLP}.act",)),
    Case("custom inf", ("Broken", "add"), (f"{MLP}.act",)),
    Case("loss scale 2^30", ("_to_copy", "mm", "mul"), ("lm_head", "loss"), half=True, scale=2.0**30),
]


def build() -> tuple[GPT2LMHeadModel, Act]:
    """Return the model and the place where the cases happen."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=64,
        vocab_size=96,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        loss_type="ForCausalLM",
    )
    model = GPT2LMHeadModel(config)
    model.transformer.h[1].mlp.act = act = Act(model.transformer.h[1].mlp.act)
    return model, act


def train(model: GPT2LMHeadModel, act: Act, case: Case, around: Callable[[], Any] = contextlib.nullcontext) -> None:
    """Train three steps, the second of which is struck."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        struck = step == STRUCK
        act.how = case.name if struck else ""
        if struck and case.name == "fp16 overflow in a matmul":
            with torch.no_grad():
                model.transformer.h[1].mlp.c_proj.weight.mul_(200)
        if struck and case.name == "a NaN parameter":
            with torch.no_grad():
                model.transformer.h[1].mlp.c_fc.weight[3, 5] = float("nan")
        tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(step))
        with around():
            with torch.autocast("cpu", torch.float16, enabled=case.half):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss * (case.scale if struck else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def judged(case: Case, report: str) -> str:
    """Tell what of the right answer a report names."""
    if not case.ops:
        return "–" if not report.strip() else "false alarm"
    if not report.strip():
        return "nothing"
    op = any(name.lower() in report.lower() for name in case.ops)
    module = any(name in report for name in case.modules)
    line = re.search(r"nonfinite\.py|modeling_gpt2\.py|pytorch_utils\.py|loss_utils\.py", report) is not None
    named = [name for name, right in (("operator", op), ("module", module), ("line", line)) if right]
    return ", ".join(named) or "wrong"


def ours(case: Case) -> str:
    """Return what bitwitness reports: its first finding."""
    model, act = build()
    with contextlib.redirect_stderr(io.StringIO()), bw.trace_nonfinite(model) as trace:
        train(model, act, case)
    found = trace.findings
    return f"{found[0].site.short} {found[0].message}" if found else ""


def anomaly(case: Case) -> str:
    """Return what torch's anomaly mode reports: its error, and the forward's traceback."""
    model, act = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(model, act, case, torch.autograd.detect_anomaly)
        except RuntimeError as error:
            traces = [str(w.message) for w in caught if "Traceback" in str(w.message)]
            return f"{error} " + " ".join(text.rstrip().splitlines()[-2] for text in traces)
    return ""


def hugging_face(case: Case) -> str:
    """Return what DebugUnderflowOverflow reports: its last frame."""
    model, act = build()
    watcher = DebugUnderflowOverflow(model)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            train(model, act, case)
    except ValueError:
        frames = output.getvalue().split("abs min  abs max  metadata")[-1]
        return frames[-600:]
    finally:
        del watcher
    return ""


TOOLS: dict[str, Callable[[Case], str]] = {
    "bitwitness": ours,
    "detect_anomaly": anomaly,
    "DebugUnderflowOverflow": hugging_face,
}


class Variant:
    """One way to train the benchmark's GPT."""

    def __init__(self, name: str, half: torch.dtype | None, *, inside: bool = True) -> None:
        torch.manual_seed(0)
        self.name = name
        self.half = half
        self.inside = inside
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.seconds: list[float] = []
        self.guard: Any = None
        if name.startswith("trace"):
            self.guard = bw.trace_nonfinite(self.model, self.optimizer, deep_every=0).start()
        elif name == "guard":
            self.guard = bw.Guard(self.model, self.optimizer, deep_every=0, replay={"calibrate": False}).start()
        elif name == "DebugUnderflowOverflow":
            DebugUnderflowOverflow(self.model)
        if self.guard is not None:
            self.guard.pause()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss, computed inside the model or outside."""
        if self.inside:
            return self.model(tokens[:, :-1], tokens[:, 1:])
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def step(self, tokens: torch.Tensor, *, count: bool) -> None:
        """Train one step and note its process-CPU seconds."""
        if self.guard is not None:
            self.guard.resume()
        anomaly_mode = torch.autograd.detect_anomaly() if self.name == "detect_anomaly" else contextlib.nullcontext()
        started = time.process_time()
        with anomaly_mode:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half is not None):
                loss = self.loss(tokens)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if count:
            self.seconds.append(time.process_time() - started)
        if self.guard is not None:
            self.guard.pause()


def costs(half: torch.dtype | None, rounds: int, tokens: int) -> list[str]:
    """Return the lines of the cost table at one precision."""
    names = ["plain", "trace_nonfinite", "guard", "detect_anomaly", "DebugUnderflowOverflow"]
    variants = [Variant(name, half) for name in names]
    variants += [Variant("plain", half, inside=False), Variant("trace_nonfinite", half, inside=False)]
    generator = torch.Generator().manual_seed(1)
    for number in range(rounds + 2):
        batch = torch.randint(0, 4096, (tokens // 128, 129), generator=generator)
        order = torch.randperm(len(variants), generator=generator).tolist()
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index in order:
                variants[index].step(batch, count=number >= 2)
    lines = []
    for variant in variants:
        base = variants[0 if variant.inside else 5]
        middle, low, high = ratio(variant.seconds, base.seconds)
        where = "inside" if variant.inside else "outside"
        lines.append(
            f"| {'bf16 autocast' if half else 'fp32'} | {where} | {variant.name} | "
            f"{1e3 * statistics.median(variant.seconds):.0f} | {middle:.3f} | {low:.3f} – {high:.3f} |"
        )
    lines.append("")
    lines.append(hit(half, tokens, statistics.median(variants[0].seconds)))
    return lines


def hit(half: torch.dtype | None, tokens: int, step: float) -> str:
    """Return what the replay of a struck step costs, in ordinary steps."""
    torch.manual_seed(0)
    model = GPT()
    seconds = []
    for _ in range(3):
        with contextlib.redirect_stderr(io.StringIO()), bw.trace_nonfinite(model, deep_every=0) as trace:
            for struck in (False, True):
                batch = torch.randint(0, 4096, (tokens // 128, 129))
                model.blocks[4].fc1.bias.data[7] = float("nan") if struck else 0.0
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half is not None):
                    loss = model(batch[:, :-1], batch[:, 1:])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                model.zero_grad()
        seconds += [finding.evidence["replay_s"] for finding in trace.findings]
    if not seconds:
        return "a hit: not measured"
    steps = statistics.median(seconds) / step
    return f"a hit at {'bf16 autocast' if half else 'fp32'}: the replay that finds the origin takes {steps:.2f} steps\n"


def ranges(steps: int) -> str:
    """Return how close clean float16 trainings come to the end of their dtype: what the threshold is chosen by."""
    found = []
    for name, model in (("GPT (11 million)", GPT()), ("GPT-2 (transformers)", build()[0])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with contextlib.redirect_stderr(io.StringIO()), bw.trace_nonfinite(model, optimizer, deep_every=10) as trace:
            for _ in range(steps):
                tokens = torch.randint(3, 96, (4, 33))
                with torch.autocast("cpu", torch.float16):
                    if isinstance(model, GPT):
                        loss = model(tokens[:, :-1], tokens[:, 1:])
                    else:
                        loss = model(input_ids=tokens[:, 1:], labels=tokens[:, 1:]).loss
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            table = trace.coverage()["ranges"]
        top = table[0]
        found.append(f"{name}: {top['share_of_maximum']:.2%} ({top['op']}), {len(trace.findings)} findings")
    return f"ranges of {steps} clean float16 steps, as a share of 65504: " + "; ".join(found)


def main() -> None:
    """Print both tables; write ``bench/results/nonfinite.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| case | " + " | ".join(TOOLS) + " |", "|---|" + "---|" * len(TOOLS)]
    for case in CASES:
        lines.append(f"| {case.name} | " + " | ".join(judged(case, tool(case)) for tool in TOOLS.values()) + " |")
        print(lines[-1], flush=True)
    lines += ["", "| precision | loss | variant | CPU ms/step | ratio | 95 % interval |", "|---|---|---|---|---|---|"]
    for half in (None, torch.bfloat16):
        lines += costs(half, 2 if args.quick else args.rounds, 256 if args.quick else args.tokens)
        print("\n".join(lines[-10:]), flush=True)
    lines.append(ranges(20 if args.quick else 60))
    print(lines[-1])
    if not args.quick:
        path = Path(__file__).parent / "results" / "nonfinite.md"
        command = f"python bench/nonfinite.py --rounds {args.rounds} --tokens {args.tokens}"
        head = f"# Who made the first NaN\n\n`{command}`, one thread.\n\n"
        path.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
