"""What went wrong in a guarded run, on a healthy device and on one that computes wrongly."""

from __future__ import annotations

import collections
import re
import zlib

from innocence.runs import CONVICTIONS, STOPPED, Run, acted, cause_of

PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "convolution", "convolution_backward", "mv", "_thnn_fused_gru_cell")
LOSSES = (
    "_log_softmax",
    "_log_softmax_backward_data",
    "nll_loss_forward",
    "nll_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "sum",
    "mean",
)
NEVER = re.compile(
    r"rand|normal_|bernoulli|empty|ones|zeros|full|arange|scalar|expand|squeeze|transpose|^t:|permute|view|detach|clone|copy_"
    r"|lift|slice|select|split|chunk|unbind|_foreach|fill_|zero_|item|alias"
)
"""Operators that compute nothing, or draw."""


def disturbed(plain: Run, guarded: Run) -> list[str]:
    """Return what went wrong in a guarded run without faults; empty if nothing did."""
    if guarded.hung:
        return ["hang"]
    wrong = []
    if guarded.code != plain.code:
        wrong.append(f"exit code {guarded.code} instead of {plain.code}")
        if guarded.code is not None and guarded.code < 0:
            wrong.append("crash")
    if guarded.bits is None and plain.bits is not None:
        wrong.append("no bits")
    elif guarded.bits != plain.bits:
        wrong.append("other bits")
    count = collections.Counter(cause for cause in guarded.causes if cause in CONVICTIONS)
    wrong += [f"{number} times {cause}" for cause, number in sorted(count.items())]
    return wrong


def misjudged(kind: str, operator: str, free: Run, unmended: Run, mended: Run) -> list[str]:
    """Return what went wrong in a guarded run on a faulty device; empty if it was right, or said that it cannot know."""
    if mended.hung:
        return ["hang"]
    wrong = []
    causes = set(mended.causes)
    healed = acted(mended, "healed") and not acted(mended, "skipped")
    stopped = mended.code == STOPPED
    if kind == "transient" and "persistent_hardware" in causes:
        wrong.append("a transient called persistent")
    if kind == "persistent" and "transient_hardware" in causes:
        wrong.append("a persistent fault called transient")
    if "corrupt_state" in causes:
        wrong.append("called corrupt state")
    if stopped and "persistent_hardware" not in causes:
        wrong.append("stopped without a conviction")
    if not stopped and mended.code not in {free.code, unmended.code}:
        wrong.append(f"exit code {mended.code}")
    if healed and not stopped and mended.weights != free.weights:
        wrong.append("healed, but not to the healthy weights")
    elif not stopped and not acted(mended, "skipped") and mended.weights not in {free.weights, unmended.weights}:
        wrong.append("weights of neither the healthy nor the faulty device")
    named = named_operators(mended)
    if named and operator not in named:
        wrong.append(f"named {', '.join(sorted(named))} instead of {operator}")
    return wrong


def named_operators(run: Run) -> set[str]:
    """Return the operators that a persistent verdict's message names."""
    found: set[str] = set()
    for verdict in run.verdicts:
        if cause_of(verdict) == "persistent_hardware":
            found.update(re.findall(r"/(\w+)#\d+:(?:forward|backward)", str(verdict.get("message"))))
    return found


IDLE = '[[fault]]\nsite = "*"\nkind = "multiply"\nfactor = 64.0\nfrom_step = 1000000000\n'
"""A fault that never strikes."""


def choose_fault(script: str, seed: int, kind: str, counted: Run, held: int) -> tuple[str, str] | None:
    """Return an operator that the script has and the TOML text of a fault in it; None if it has none to strike."""
    names = [name for name in counted.operators if not NEVER.search(name)]
    pools = [
        [name for name in names if name.split(":")[0] in PRODUCTS],
        [name for name in names if name.split(":")[0] in LOSSES],
        names,
    ]
    lot = zlib.crc32(f"{script} {kind} {seed}".encode())
    pool = pools[lot % 3] or pools[0] or names
    if not pool:
        return None
    site = sorted(pool)[(lot // 3) % len(pool)]
    operator = site.partition(":")[0]
    # By the fewer of the two: several guards together hold more steps than the script's process takes.
    first = max(4, int(0.6 * min(held or counted.steps, counted.steps or held)))
    once = "times = 1\n" if kind == "transient" else ""
    text = (
        f'[[fault]]\nsite = "*/{site}"\nkind = "multiply"\nfactor = 64.0\npattern = "all"\nfrom_step = {first}\n{once}'
    )
    return operator, text


def site_of(text: str) -> str:
    """Return where the fault of a TOML text strikes."""
    return text.partition('site = "')[2].partition('"')[0]


def outcome_of(free: Run, unmended: Run, mended: Run) -> str:
    """Say in a few words what became of a fault."""
    if mended.hung:
        return "hang"
    if not mended.verdicts:
        harmless = unmended.weights == free.weights and unmended.code == free.code
        return "no effect" if harmless else "no verdict"
    causes = "+".join(sorted(set(mended.causes)))
    if "persistent_hardware" in causes:
        return f"{causes}, {'operator named' if named_operators(mended) else 'no operator named'}"
    if acted(mended, "skipped"):
        return f"{causes}, the step skipped"
    return f"{causes}, {'the healthy weights' if mended.weights == free.weights else 'not the healthy weights'}"
