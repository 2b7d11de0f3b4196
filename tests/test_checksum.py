"""Wrong operators are found by their checksums, and healthy ones never are."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from extent import chosen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from bitwitness import Finding, UsageError
from bitwitness.finding import Severity
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
SHAPES = [(256, 64, 96), (32, 128, 4096)]


def call(func, *args, out=None, **kwargs) -> OpCall:
    result = func(*args, **kwargs) if out is None else out
    return OpCall(func, args, kwargs, result, func.overloadpacket.__name__, "net.fc", "forward", 0)


def look(*calls: OpCall, deferred: bool = True, scheme="signs") -> list[Finding]:
    sensor = ChecksumSensor(scheme, deferred=deferred)
    for one in calls:
        assert sensor.select(one.func)
        sensor(one)
    return sensor.drain(7, 3)


def factors(dtype, m, k, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=g).to(dtype), (torch.randn(k, n, generator=g) / k**0.5).to(dtype)


def flipped(x: torch.Tensor, at: int, bit: int) -> torch.Tensor:
    """Return a copy with one bit of one element flipped; bit 0 is the least significant."""
    bad = x.clone()
    bits = bad.view(torch.int32 if x.dtype is torch.float32 else torch.int16).view(-1)
    width = x.element_size() * 8
    bits[at] ^= (1 << bit) if bit < width - 1 else torch.iinfo(bits.dtype).min
    return bad


def share_of_flips_found(dtype, shape, bit, trials=20) -> float:
    a, b = factors(dtype, *shape)
    c = a @ b
    g = torch.Generator().manual_seed(bit)
    calls = [flipped(c, int(torch.randint(c.numel(), (), generator=g)), bit) for _ in range(trials)]
    return sum(bool(look(call(aten.mm.default, a, b, out=bad))) for bad in calls) / trials


# -- what is found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_top_exponent_bit_is_always_found(dtype, shape) -> None:
    assert share_of_flips_found(dtype, shape, MANTISSA[dtype] + (4 if dtype is torch.float16 else 7)) == 1


@pytest.mark.parametrize("bit", [24, 27, 29, 31])
def test_float32_exponent_and_sign_flips_are_found_at_4096_columns(bit) -> None:
    assert share_of_flips_found(torch.float32, (32, 128, 4096), bit) >= 0.9


@pytest.mark.parametrize("bit", [22, 21, 20, 19])
def test_float32_upper_mantissa_flips_are_found(bit) -> None:
    assert share_of_flips_found(torch.float32, (256, 64, 96), bit) >= 0.9


@pytest.mark.parametrize("bit", [9, 11, 13, 15])
def test_bfloat16_exponent_and_sign_flips_are_mostly_found(bit) -> None:
    assert share_of_flips_found(torch.bfloat16, (256, 64, 96), bit) >= 0.75
    assert share_of_flips_found(torch.bfloat16, (32, 128, 4096), bit) >= 0.4


@pytest.mark.parametrize("bit", [10, 12, 13, 15])
def test_float16_exponent_and_sign_flips_are_found(bit) -> None:
    assert share_of_flips_found(torch.float16, (256, 64, 96), bit) >= 0.85


def zeroed_tile(c):
    c[16:32, 16:32] = 0


def doubled_tile(c):
    c[16:32, 16:32] *= 2


def permuted_tiles(c):
    c[:16, :16], c[16:32, 16:32] = c[16:32, 16:32].clone(), c[:16, :16].clone()


def transposed_tile(c):
    c[:16, :16] = c[:16, :16].t().clone()


def swapped_columns(c):
    c[:, [3, 40]] = c[:, [40, 3]]


def swapped_rows(c):
    c[[3, 20]] = c[[20, 3]]


def zeroed_columns(c):
    c[:, 8:16] = 0


def zeroed_row(c):
    c[5] = 0


def stale_nan(c):
    c[9, 9] = math.nan


def stray_infinity(c):
    c[9, 9] = -math.inf


CORRUPTIONS = [
    zeroed_tile,
    doubled_tile,
    permuted_tiles,
    transposed_tile,
    swapped_columns,
    swapped_rows,
    zeroed_columns,
    zeroed_row,
    stale_nan,
    stray_infinity,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_corrupted_regions_are_found(dtype, shape, corrupt) -> None:
    a, b = factors(dtype, *shape)
    c = a @ b
    corrupt(c)
    assert look(call(aten.mm.default, a, b, out=c))


@pytest.mark.parametrize(
    "func", [aten.bmm.default, aten.baddbmm.default, aten.addmm.default, aten.mv.default, aten.addmv.default]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_product_is_checked(func, dtype) -> None:
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    args = {
        "bmm": (normal(3, 33, 17), normal(3, 17, 40)),
        "baddbmm": (normal(1, 40), normal(3, 33, 17), normal(3, 17, 40)),
        "addmm": (normal(40), normal(33, 17), normal(17, 40)),
        "mv": (normal(33, 17), normal(17)),
        "addmv": (normal(33), normal(33, 17), normal(17)),
    }[func.overloadpacket.__name__]
    scalars = {"alpha": 0.5, "beta": 3} if "add" in func.overloadpacket.__name__ else {}
    good = call(func, *args, **scalars)
    assert not look(good)
    bad = good.result.clone()
    bad.view(-1)[-3] += 8
    found = look(call(func, *args, out=bad, **scalars))
    assert len(found) == 1


# -- what a finding says -----------------------------------------------------------------------------------------


def test_a_finding_names_operator_row_and_numbers() -> None:
    a, b = factors(torch.float32, 20, 30, 40)
    c = a @ b
    right = float(c[11, 7])
    c[11, 7] = 123.0
    (found,) = look(call(aten.mm.default, a, b, out=c), deferred=False)
    assert found.sensor == "checksum"
    assert found.severity is Severity.ERROR
    assert str(found.site) == "net.fc/mm#0:forward.out0@r3.s7.m0"
    evidence = found.evidence
    assert (evidence["row"], evidence["column"], evidence["value"]) == (11, 7, 123.0)
    assert evidence["expected"] == pytest.approx(right, rel=1e-5)
    assert evidence["residual"] > evidence["threshold"] > 0
    assert evidence["ratio"] == pytest.approx(evidence["residual"] / evidence["threshold"], rel=1e-5)
    assert (evidence["dtype"], evidence["shape"], evidence["inner"]) == ("float32", [20, 40], 30)
    for part in ("net.fc/mm#0:forward.out0", "row 11", "element 7 is 123", "rounding explains", "recompute"):
        assert part in found.message


def test_a_batched_row_counts_over_the_batch() -> None:
    a, b = torch.randn(3, 5, 6), torch.randn(3, 6, 7)
    c = a @ b
    c[2, 4, 1] += 10
    (found,) = look(call(aten.bmm.default, a, b, out=c), deferred=False)
    assert (found.evidence["row"], found.evidence["column"]) == (14, 1)


def test_a_wide_bfloat16_product_names_the_right_row() -> None:
    a, b = factors(torch.bfloat16, 8, 32, 4096)
    c = a @ b
    c[6, 4000] = 50
    (found,) = look(call(aten.mm.default, a, b, out=c), deferred=False)
    assert (found.evidence["row"], found.evidence["column"]) == (6, 4000)


def test_drain_forgets_and_caps() -> None:
    a, b = factors(torch.float32, 4, 4, 4)
    sensor = ChecksumSensor()
    for _ in range(70):
        bad = a @ b
        bad[1, 2] += 10
        sensor(call(aten.mm.default, a, b, out=bad))
    assert len(sensor.drain(0, 0)) == 64
    assert sensor.coverage()["findings_dropped"] == 6
    assert sensor.drain(1, 0) == []


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(UsageError, match=r"checksum.scheme is 'weak'; expected 'signs' or 'reference'"):
        ChecksumSensor("weak")


# -- what is innocent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_inputs_make_an_operator_innocent_but_only_their_own_rows(dtype, value) -> None:
    a, b = factors(dtype, 32, 16, 24)
    a[3, 2] = value
    assert not look(call(aten.mm.default, a, b))
    bad = a @ b
    bad[4, 1] += 30
    assert look(call(aten.mm.default, a, b, out=bad))[0].evidence["row"] == 4
    c, d = factors(dtype, 32, 16, 24)
    d[3, 2] = value
    assert not look(call(aten.mm.default, c, d))


def test_a_nan_bias_counts_only_where_it_is_read() -> None:
    a, b = factors(torch.float32, 8, 8, 8)
    bias = torch.full((8,), math.nan)
    assert not look(call(aten.addmm.default, bias, a, b))
    ignored = call(aten.addmm.default, bias, a, b, beta=0)
    assert not look(ignored)
    bad = ignored.result.clone()
    bad[2, 2] = math.nan
    assert look(call(aten.addmm.default, bias, a, b, out=bad, beta=0))


def test_a_lawful_float16_overflow_is_told_but_not_suspected() -> None:
    a, b = torch.full((4, 64), 200.0, dtype=torch.float16), torch.full((64, 8), 200.0, dtype=torch.float16)
    overflow = call(aten.mm.default, a, b)
    assert overflow.result.isinf().all()
    for deferred in (False, True):
        (found,) = look(overflow, deferred=deferred)
        assert (found.sensor, found.severity, found.evidence["kind"]) == ("overflow", Severity.INFO, "overflow")
        assert "4 rows" in found.message
    small = call(aten.mm.default, a / 200, b / 200)
    small.result[1, 1] = math.inf
    (found,) = look(small)
    assert found.severity is Severity.ERROR


EMPTY = [((0, 3), (3, 4)), ((3, 0), (0, 4)), ((3, 4), (4, 0))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("left", "right"), EMPTY, ids=str)
def test_empty_products_are_innocent(dtype, left, right) -> None:
    assert not look(call(aten.mm.default, torch.ones(left, dtype=dtype), torch.ones(right, dtype=dtype)))
    a, b = torch.ones(2, *left, dtype=dtype), torch.ones(2, *right, dtype=dtype)
    assert not look(call(aten.bmm.default, a, b))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_views_of_any_stride_are_read_right(dtype) -> None:
    g = torch.Generator().manual_seed(3)
    big = torch.randn(640, 512, generator=g).to(dtype)
    row = torch.randn(1, 512, generator=g).to(dtype)
    pairs = [
        (big.t()[:, :512], big[:512]),
        (big[::2, ::2], big.t()[:256, ::3]),
        (row.expand(40, 512), big.t()),
        (big, row.t().expand(512, 256)),
        (big[:300, :200], big[:200]),
    ]
    for a, b in pairs:
        assert not look(call(aten.mm.default, a, b))
        bad = a @ b
        bad[7, 9] += 200
        assert look(call(aten.mm.default, a, b, out=bad))[0].evidence["row"] == 7


def kinds(m, k, n, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=g), torch.randn(k, n, generator=g)
    return {
        "normal": (a, b),
        "positive": (a.abs(), b.abs()),
        "constant": (torch.full((m, k), 1.1), torch.full((k, n), 0.7)),
        "relu": (a.relu(), b),
        "sparse": (a * (a > 2), b),
        "mean": (a + 10, b + 10),
        "low rank": (a[:, :1] @ b[:1, :1].expand(1, k), b[:, :1] @ a[:1, :1].expand(1, n)),
        "cancels": (torch.cat([a, -a], 1), torch.cat([b, b])),
        "nearly cancels": (torch.cat([a, -a], 1), torch.cat([b, b * 1.001])),
        "zero mean": (a - a.mean(1, keepdim=True), 1 + 1e-4 * b),
        "range": (a * torch.exp(2 * b[:1, :1]) * torch.exp(3 * torch.randn(m, 1, generator=g)), b),
        "tiny": (a * 1e-22, b * 1e-15),
        "huge": (a * 1e12, b * 1e12),
        "zero": (a * 0, b),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    st.sampled_from(sorted(kinds(1, 1, 1, 0))),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([1, 8, 300, 1500]),
    st.sampled_from([1, 7, 64, 1024]),
    st.integers(0, 2**20),
)
@example(kind="constant", m=1, k=1500, n=1, seed=0)  # summed serially: all roundings go the same way
@settings(max_examples=chosen(80, 40), deadline=None, derandomize=True)
def test_healthy_products_are_never_suspected(dtype, kind, m, k, n, seed) -> None:
    a, b = (t.to(dtype) for t in kinds(m, k, n, seed)[kind])
    found = look(call(aten.mm.default, a, b), call(aten.mm.default, b.t(), a.t()))
    assert [f for f in found if f.sensor == "checksum"] == []


# -- attention ---------------------------------------------------------------------------------------------------


def attend(dtype, *, mode="plain", heads=4, key_heads=4, length=40, size=1.0, mean=0.0, corrupt=None):
    """Run fused attention forward and backward under a deferred sensor; ``corrupt(call)`` may change what came out."""
    g = torch.Generator().manual_seed(length)
    shapes = [(2, length, heads, 32), (2, length, key_heads, 32), (2, length, key_heads, 32)]
    q, k, v = ((torch.randn(s, generator=g) * size).to(dtype).transpose(1, 2).requires_grad_() for s in shapes)
    options = {"plain": {}, "causal": {"is_causal": True}}.get(mode, {"enable_gqa": key_heads != heads})
    if "mask" in mode:
        mask = torch.rand(length, length, generator=g) < 0.7
        mask[3] = "dead" not in mode
        options["attn_mask"] = mask
    sensor = ChecksumSensor(deferred=True)

    def handle(one: OpCall) -> None:
        if corrupt is not None:
            corrupt(one)
        sensor(one)

    with OperatorTap(ModuleTracker(), handle, sensor.select):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        out.backward((torch.randn(out.shape, generator=g) + mean).to(dtype))
    assert all("attention" in op for op in sensor.coverage()["by_operator"])
    return sensor.drain(0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["plain", "causal", "mask", "dead mask", "grouped"])
def test_healthy_attention_is_never_suspected(dtype, mode) -> None:
    for length in (5, 40, 300):
        for size in (0.01, 1.0, 6.0):
            assert not attend(
                dtype, mode=mode, length=length, size=size, mean=1.0, key_heads=2 if mode == "grouped" else 4
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("slot", "invariant"), [(0, "<dQ, Q> = <dK, K>"), (1, "1^T dK = 0"), (2, "1^T dV = 1^T dO")])
def test_a_wrong_attention_gradient_is_found(dtype, slot, invariant) -> None:
    def corrupt(one: OpCall) -> None:
        if one.op.endswith("_backward"):
            one.result[slot][1, 2, 5] = 100

    found = attend(dtype, mode="causal", corrupt=corrupt)
    assert invariant in {f.evidence["invariant"] for f in found}
    assert all(f.severity is Severity.ERROR and f.site.op.endswith("_backward") for f in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_that_overflow_by_themselves_are_not_suspected(dtype) -> None:
    for size in (1e18, 1e19, 1e20, 1e22):
        assert not attend(dtype, size=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("value", [1e25, -1e33, 3e38])
def test_an_attention_gradient_whose_square_overflows_is_found(dtype, slot, value) -> None:
    def corrupt(one: OpCall) -> None:
        if one.op.endswith("_backward"):
            one.result[slot][1, 2, 5, 7] = value

    assert attend(dtype, mode="causal", corrupt=corrupt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_attention_output_is_found_in_the_forward_or_at_the_latest_in_the_backward(dtype) -> None:
    def far_out(one: OpCall) -> None:
        if "attention" in one.op and not one.op.endswith("_backward"):
            one.result[0][0, 1, 7, 3] = 60

    def inside_the_range(one: OpCall) -> None:
        if "attention" in one.op and not one.op.endswith("_backward"):
            one.result[0][0, 1] = one.result[0][0, 1].flip(0)

    def not_a_number(one: OpCall) -> None:
        if "attention" in one.op and not one.op.endswith("_backward"):
            one.result[0][0, 1, 7, 3] = math.nan

    assert "min V <= O <= max V" in {f.evidence["invariant"] for f in attend(dtype, corrupt=far_out)}
    assert "min V <= O <= max V" in {f.evidence["invariant"] for f in attend(dtype, corrupt=not_a_number)}
    assert "<dO, O> = <dV, V>" in {f.evidence["invariant"] for f in attend(dtype, corrupt=inside_the_range)}


# -- trainings ---------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A hand-unrolled LSTM, so that its products are visible, and a fused one."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 24)
        self.cell = nn.LSTMCell(24, 24)
        self.fused = nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, 32)

    def forward(self, tokens):
        x = self.tok(tokens)
        state = (torch.zeros(len(x), 24), torch.zeros(len(x), 24))
        outputs = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(state[0])
        return self.head(self.fused(torch.stack(outputs, 1).float())[0])


class Attentive(nn.Module):
    """One block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 32)
        self.ln = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.tok(tokens)
        q, k, v = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in self.qkv(self.ln(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.down(F.gelu(self.up(x))))


def train(build, steps, *, low=False, sensor=None):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tracker, losses, findings = ModuleTracker(), [], []
    for step in range(steps):
        tokens = (torch.arange(9) * 5 + torch.randint(32, (4, 1))) % 32
        with nullcontext() if sensor is None else OperatorTap(tracker, sensor, sensor.select):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        if sensor is not None:
            findings += sensor.drain(step, 0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, findings, [p.detach().clone() for p in model.parameters()], torch.random.get_rng_state()


@pytest.mark.parametrize(
    ("build", "low", "steps"),
    [(Attentive, False, chosen(200, 60)), (Attentive, True, chosen(200, 60)), (Recurrent, False, 60)],
)
def test_a_training_raises_no_alarm_and_keeps_its_bits(build, low, steps) -> None:
    sensor = ChecksumSensor(deferred=True)
    losses, findings, weights, rng = train(build, steps, low=low, sensor=sensor)
    assert findings == []
    assert losses[-1] < 0.9 * losses[0]
    assert 0 < sensor.coverage()["largest_ratio"] < 0.9
    plain = train(build, steps, low=low)
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, plain[2], strict=True))
    assert torch.equal(rng, plain[3])


# -- coverage ----------------------------------------------------------------------------------------------------


def test_unchecked_operators_are_named_with_their_share() -> None:
    sensor, layer = ChecksumSensor(), nn.LSTM(24, 24).to(torch.bfloat16)
    with OperatorTap(ModuleTracker(), sensor, sensor.select):
        layer(torch.ones(8, 4, 24, dtype=torch.bfloat16))[0].sum().backward()
        torch.ones(32, 24) @ torch.ones(24, 24)
    coverage = sensor.coverage()
    assert set(coverage["unchecked"]) == {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
    assert coverage["share_checked"] + sum(coverage["unchecked"].values()) == pytest.approx(1)
    weights = 2 * 4 * 24 * 24
    assert coverage["by_operator"]["mkldnn_rnn_layer"] == {"seen": 2 * 4 * 8 * weights, "checked": 0}


def test_in_place_products_count_as_unchecked() -> None:
    sensor = ChecksumSensor()
    conv, linear = nn.Conv1d(3, 5, 3), nn.Linear(6, 5)
    with OperatorTap(ModuleTracker(), sensor, sensor.select):
        linear(conv(torch.ones(2, 3, 8)))
        torch.zeros(4, 4).addmm_(torch.ones(4, 4), torch.ones(4, 4))
    by_operator = sensor.coverage()["by_operator"]
    assert by_operator["convolution"] == {"seen": 2 * 2 * 5 * 6 * 3 * 3, "checked": 2 * 2 * 5 * 6 * 3 * 3}
    assert by_operator["addmm_"] == {"seen": 128, "checked": 0}
    assert by_operator["addmm"] == {"seen": 2 * 10 * 6 * 5, "checked": 2 * 10 * 6 * 5}


def test_integer_products_are_seen_but_not_checked() -> None:
    sensor = ChecksumSensor()
    sensor(call(aten.mm.default, torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)))
    assert sensor.coverage()["share_checked"] == 0


# -- the reference's scheme --------------------------------------------------------------------------------------


def test_the_reference_finds_the_top_exponent_bit_and_nan_but_misses_tiles() -> None:
    a, b = factors(torch.bfloat16, 64, 128, 4096)
    c = a @ b
    assert not look(call(aten.mm.default, a, b, out=c), scheme="reference")
    assert look(call(aten.mm.default, a, b, out=flipped(c, 700, 14)), scheme="reference")
    missing = c.clone()
    missing[3, 3] = math.nan
    assert look(call(aten.mm.default, a, b, out=missing), scheme="reference")
    lost = c.clone()
    lost[:16, :16] = 0
    assert not look(call(aten.mm.default, a, b, out=lost), scheme="reference")
    assert look(call(aten.mm.default, a, b, out=lost))


def test_the_reference_reads_only_bfloat16_products() -> None:
    sensor = ChecksumSensor("reference")
    a, b = factors(torch.float32, 8, 8, 8)
    sensor(call(aten.mm.default, a, b))
    assert sensor.coverage()["share_checked"] == 0
