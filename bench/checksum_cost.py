"""The checksum sensor in figures: clean ratios to the threshold, detection by flipped bit, and the cost of a deep step.

Run as ``OMP_NUM_THREADS=1 python bench/checksum_cost.py [clean] [detection] [cost]``; all three by default. Times are the
process's CPU time on one thread, plain and deep steps interleaved, medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from gpt import GPT

from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((256, 64, 64), (256, 320, 1280), (512, 1280, 320), (128, 4096, 320), (128, 256, 8192), (64, 4096, 4096))
INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def matrices(m: int, k: int, n: int, g: torch.Generator) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield named pairs of factors, float32 [m, k'] and [k', n], ordinary and unkind."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    a, b = normal(m, k), normal(k, n)
    yield "normal", a, b
    yield "positive", a.abs(), b.abs()
    yield "relu", a.relu(), b
    yield "constant", torch.full((m, k), 1.1), torch.full((k, n), 0.7)
    yield "mean shift", a + 10, b + 10
    yield "low rank", normal(m, 2) @ normal(2, k), normal(k, 2) @ normal(2, n)
    yield "cancels to nothing", torch.cat([a, -a], 1), torch.cat([b, b])
    yield "nearly cancels", torch.cat([a, -a], 1), torch.cat([b, b * 1.001])
    yield "zero-mean rows", a - a.mean(1, keepdim=True), 1 + 1e-4 * b
    yield "huge range", a * torch.exp(4 * normal(m, 1)) * torch.exp(normal(1, k)), b * torch.exp(2 * normal(k, 1))
    yield "outlier channels", a * torch.exp(2 * normal(1, k)), b * torch.exp(2 * normal(1, n))


def call_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> OpCall:
    """Return a product's call as the tap would show it."""
    return OpCall(aten.mm.default, (a, b), {}, out, "mm", ".", "forward", 0)


def clean() -> None:
    """Print the largest residual over threshold of healthy products, by dtype and kind of data."""
    g = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        largest: dict[str, float] = {}
        failed = 0
        for m, k, n in SHAPES:
            for name, *factors in matrices(m, k, n, g):
                a, b = (t.clamp(-1e3, 1e3).to(dtype) if dtype is torch.float16 else t.to(dtype) for t in factors)
                sensor = ChecksumSensor(deferred=True)  # no confirmation: the ratio itself
                sensor(call_of(a, b, a @ b))
                failed += len([f for f in sensor.drain(0, 0) if f.evidence["kind"] == "residual"])
                largest[name] = max(largest.get(name, 0.0), sensor.largest_ratio)
        print(f"clean {dtype}: {failed} false, largest ratio {max(largest.values()):.2f}")
        print("   " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in largest.items()))


def detection(trials: int = 60) -> None:
    """Print the share of flips of one element found, by bit and dtype, ours and the reference's."""
    g = torch.Generator().manual_seed(2)
    for dtype in DTYPES:
        for m, k, n in ((256, 320, 1280), (64, 4096, 4096)):
            a, b = torch.randn(m, k, generator=g).to(dtype), (torch.randn(k, n, generator=g) / k**0.5).to(dtype)
            c = a @ b
            ours, reference = ChecksumSensor(deferred=True), ChecksumSensor("reference", deferred=True)
            width = c.element_size() * 8
            for bit in range(width - 1, MANTISSA[dtype] - 9 if dtype is torch.float32 else MANTISSA[dtype] - 4, -1):
                hits = [0, 0]
                for _ in range(trials):
                    bad = c.clone()
                    bits = bad.view(INTEGER[dtype]).view(-1)
                    at = int(torch.randint(bits.numel(), (), generator=g))
                    bits[at] ^= 1 << bit if bit < width - 1 else torch.iinfo(bits.dtype).min
                    for i, sensor in enumerate((ours, reference)):
                        sensor(call_of(a, b, bad))
                        hits[i] += any(f.evidence["kind"] == "residual" for f in sensor.drain(0, 0))
                part = (
                    "sign"
                    if bit == width - 1
                    else f"exponent {bit - MANTISSA[dtype]}"
                    if bit >= MANTISSA[dtype]
                    else "mantissa"
                )
                print(
                    f"flip {dtype} N={n} bit {bit:2} ({part}): {hits[0] / trials:.0%}, reference {hits[1] / trials:.0%}"
                )


def cost(rounds: int = 5) -> None:
    """Print the CPU time of a deep step over that of a plain one."""
    torch.manual_seed(0)
    model = GPT()
    tokens = torch.randint(4096, (32, 128))
    tracker = ModuleTracker()
    tracker.name_tree(model)

    def step(sensor: ChecksumSensor | None, *, low: bool) -> float:
        model.zero_grad()
        started = time.process_time()
        with nullcontext() if sensor is None else OperatorTap(tracker, sensor, sensor.select):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = model(tokens, tokens)
            loss.backward()
        if sensor is not None and sensor.drain(0, 0):
            print("a false alarm")
        return time.process_time() - started

    print(f"GPT of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {tokens.numel()} tokens a step")
    for low in (False, True):
        sensor = ChecksumSensor()
        step(sensor, low=low)
        times = [(step(None, low=low), step(sensor, low=low)) for _ in range(rounds)]
        plain, deep = (statistics.median(column) for column in zip(*times, strict=True))
        covered = sensor.coverage()
        print(
            f"{'bf16 autocast' if low else 'fp32'}: plain {plain:.3f} s, deep {deep:.3f} s, ratio {deep / plain:.3f}; "
            f"{covered['share_checked']:.1%} of FLOPs checked, largest ratio {covered['largest_ratio']:.2f}"
        )


def attention() -> None:
    """Print the largest ratio of healthy fused attention, by dtype."""
    g = torch.Generator().manual_seed(3)
    for dtype in DTYPES:
        sensor = ChecksumSensor(deferred=True)
        failed = 0
        for length in (7, 64, 300, 1024):
            for size in (0.01, 1.0, 4.0, 15.0):
                for causal in (False, True):
                    for shift in (0.0, 1.0):
                        q, k, v = (torch.randn(2, length, 4, 32, generator=g) * s for s in (size, size, 1))
                        q, k, v = (t.to(dtype).transpose(1, 2).requires_grad_() for t in (q, k, v))
                        with OperatorTap(ModuleTracker(), sensor, sensor.select):
                            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                            out.backward((torch.randn(out.shape, generator=g) + shift).to(dtype))
                        failed += len(sensor.drain(0, 0))
        print(f"clean attention {dtype}: {failed} false, largest ratio {sensor.largest_ratio:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {"clean": (clean, attention), "detection": (detection,), "cost": (cost,)}
    for name in sys.argv[1:] or parts:
        for part in parts[name]:
            part()
