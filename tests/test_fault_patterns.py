"""Faults as they are declared: what one does to the bits, which element it strikes, and what a declaration may say."""

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import script

from bitwitness import ConfigError, UsageError
from bitwitness.inject import patterns
from bitwitness.inject.eod_mask import eod_mask_v2
from bitwitness.inject.faults import DEFAULT_PATTERN, PATTERNS
from bitwitness.testing import Fault, from_mapping, load_faults

DTYPES = list(patterns.FORMATS)
SHAPES = [(), (1,), (5,), (3, 40), (2, 17, 33)]


def bits(x):
    return x.detach().contiguous().view(patterns.FORMATS[x.dtype].raw)


def rng(seed=0):
    return np.random.default_rng(seed)


def sample(shape, dtype, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(torch.float32).to(dtype)


# -- what a fault does to the bits ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", DEFAULT_PATTERN)
def test_every_kind_changes_only_what_it_strikes_on_every_dtype(kind, dtype):
    x = sample((20, 40), dtype) if kind != "nullify" else torch.ones(20, 40).to(dtype)
    before = bits(x).clone()
    pattern = "row" if DEFAULT_PATTERN[kind] != "element" else None
    fault = Fault(kind=kind, element=45, pattern=pattern, factor=4.0, ulps=2)
    after = patterns.corrupt(x, fault, rng())
    assert torch.equal(bits(x), before)
    assert after.dtype is dtype
    assert after.shape == x.shape
    changed = torch.nonzero(bits(after).reshape(-1) != before.reshape(-1)).flatten().tolist()
    assert changed
    assert set(changed) <= ({45} if pattern is None else set(range(40, 80)))
    assert patterns.count_changed(x, after) == len(changed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_positions_count_from_the_sign(dtype):
    x = torch.ones(3).to(dtype)
    form = patterns.FORMATS[dtype]
    assert patterns.flip_bit(x, np.array([1]), form.width - 1).float().tolist() == [1.0, -1.0, 1.0]
    assert patterns.flip_bit(x, np.array([1]), form.mantissa - 1).float()[1] == 1.5  # the highest mantissa bit
    for bit in range(form.width):
        twice = patterns.flip_bit(patterns.flip_bit(x, None, bit), None, bit)
        assert torch.equal(bits(twice), bits(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_highest_zero_exponent_bit(dtype):
    x = torch.tensor([0.0, 1.0, 2.0, float("inf")], dtype=dtype)
    raised = patterns.raise_exponent(x, None).tolist()
    assert raised[:2] == [2.0, float("inf")]
    assert raised[2] == 2.0 * 2.0 ** (2 ** (patterns.FORMATS[dtype].exponent - 2))
    assert raised[3] == float("inf")


def test_a_lost_carry_runs_through_the_exponent_but_spares_the_sign():
    x = torch.tensor([1.0, -1.0, 2.0])
    up = torch.nextafter(x, torch.tensor([9.0, -9.0, 9.0]))
    assert torch.equal(patterns.add_ulps(x, None, 1), up)
    assert patterns.add_ulps(x, None, -1).tolist() == torch.nextafter(x, torch.zeros(3)).tolist()
    assert patterns.add_ulps(x, None, 2**23).tolist() == [2.0, -2.0, 4.0]
    assert patterns.add_ulps(torch.ones(1, dtype=torch.float64), None, -(2**52)).item() == 0.5


def test_stuck_bit_is_the_same_after_a_second_time():
    x = sample((7,), torch.float32)
    for value in (0, 1):
        once = patterns.force_bit(x, None, -1, value)
        assert torch.equal(torch.signbit(once), torch.full((7,), bool(value)))
        assert torch.equal(patterns.force_bit(once, None, 31, value), once)


def test_maximum_kinds():
    x = torch.tensor([1.0, -3.0, 2.0, 3.0])
    assert patterns.multiply_max(x, None).tolist() == [3.0, 3.0, 3.0, 3.0]
    assert patterns.multiply_max(x, np.array([0, 2])).tolist() == [3.0, -3.0, 3.0, 3.0]


def test_permuting_moves_values_and_invents_none():
    x = torch.arange(32.0 * 32).reshape(32, 32)
    after = patterns.corrupt(x, Fault(kind="permute", element=17 * 32 + 3), rng())
    assert not torch.equal(after, x)
    assert torch.equal(after[:16], x[:16])
    assert torch.equal(after[16:, 16:], x[16:, 16:])
    assert torch.equal(after[16:, :16].flatten().sort().values, x[16:, :16].flatten().sort().values)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("element", {(2, 17)}),
        ("row", {(2, c) for c in range(40)}),
        ("column", {(r, 17) for r in range(20)}),
        ("tile", {(r, c) for r in range(16) for c in range(16, 32)}),
        ("warp", {divmod(i, 40) for i in range(97 % 32, 800, 32)}),
        ("all", {(r, c) for r in range(20) for c in range(40)}),
    ],
)
def test_patterns_hold_the_given_element(pattern, expected):
    x = torch.ones(20, 40)
    after = patterns.corrupt(x, Fault(kind="nullify", pattern=pattern, element=97), rng())
    assert {tuple(place) for place in torch.nonzero(after == 0).tolist()} == expected


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 35), max_size=3),
    pattern=st.sampled_from(("element", "all", "row", "column", "tile", "warp")),
    kind=st.sampled_from(sorted(set(DEFAULT_PATTERN) - {"permute"})),
    dtype=st.sampled_from(DTYPES),
    flipped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_and_layout(shape, pattern, kind, dtype, flipped, seed):
    x = sample(shape, dtype, seed)
    if flipped:
        x = x.permute(tuple(reversed(range(x.dim()))))
    after = patterns.corrupt(x, Fault(kind=kind, pattern=pattern), rng(seed))
    if x.numel() == 0:
        assert after is None
        return
    assert after.stride() == x.clone().stride()
    dense = patterns.corrupt(x.contiguous(), Fault(kind=kind, pattern=pattern), rng(seed))
    assert torch.equal(bits(after), bits(dense))


@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6), lambda x: x.t()])
def test_views_keep_their_base(view):
    base = torch.ones(4, 6)
    after = patterns.nullify(view(base), np.array([1]))
    assert torch.equal(base, torch.ones(4, 6))
    assert after.flatten()[1] == 0
    assert int((after == 0).sum()) == 1


def test_impossible_strikes_are_named():
    with pytest.raises(
        UsageError, match=r"there is no bit 20 in bfloat16; expected 0 \(the lowest\) to 15 \(the sign\)"
    ):
        patterns.flip_bit(torch.ones(2, dtype=torch.bfloat16), None, 20)
    with pytest.raises(UsageError, match=r"element 9 is not in a tensor of shape \(2, 3\); expected one below 6"):
        patterns.choose("row", (2, 3), rng(), 9)
    with pytest.raises(UsageError, match=r"dtype int64 cannot be struck; expected float64, float32"):
        patterns.nullify(torch.ones(2, dtype=torch.int64), None)


# -- declarations --------------------------------------------------------------------------------------------


def test_a_file_of_faults(tmp_path):
    path = tmp_path / "faults.toml"
    path.write_text(
        '[[fault]]\nsite = "*/mm:backward"\nrank = 2\nsteps = [5, 8]\nkind = "bitflip_designed"\n'
        '[[fault]]\nkind = "multiply"\ncycle = 5\nstart = 2\nfactor = 3\npattern = "column"\n'
    )
    first, second = load_faults(path)
    assert (first.kind, first.rank, first.steps, first.pattern) == ("exponent_msb", 2, (5, 8), "element")
    assert (second.site, second.factor, second.times) == ("*", 3, None)
    assert [step for step in range(20) if first.due(step)] == [5, 8]
    assert [step for step in range(20) if second.due(step)] == [7, 12, 17]
    assert [step for step in range(5) if Fault(kind="carry", from_step=3).due(step)] == [3, 4]
    assert from_mapping({}) == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"kind": "bitflip", "ranc": 1}, r"fault 0: unknown key 'ranc'; did you mean 'rank'\?"),
        ({"kind": "bitflop"}, r"fault 0: unknown kind 'bitflop'; did you mean 'bitflip'\?"),
        ({}, "fault 0: no kind; expected one of bitflip"),
        ({"kind": "bitflip", "pattern": "rows"}, r"unknown pattern 'rows'; did you mean 'row'\?"),
        ({"kind": "bitflip", "site": "*/mm:backwards"}, r"phase 'backwards'; did you mean 'backward'\?"),
        ({"kind": "bitflip", "steps": 5}, "steps = 5, expected a list of steps"),
        ({"kind": "bitflip", "rank": True}, "rank = True, expected a rank"),
        ({"kind": "bitflip", "bit": 64}, "bit = 64, expected a bit position"),
        ({"kind": "bitflip", "probability": 1.5}, "probability = 1.5, expected a number from 0 to 1"),
        ({"kind": "bitflip", "steps": [1], "cycle": 2}, "steps and cycle are both given; keep one"),
        ({"kind": "bitflip", "start": 2}, "start = 2 without a cycle"),
        ({"kind": "bitflip", "element": 1, "element_probability": 0.5}, "leave pattern and element out"),
        ({"kind": "permute", "pattern": "element"}, "one element cannot be permuted"),
        ({"kind": 3}, "kind = 3, expected a word"),
        ({"kind": "multiply", "factor": 10**400}, "factor = 1000000.* characters.*, expected a number"),
        ({"kind": "multiply", "factor": 10**5000}, "factor = a number of more than .* digits, expected a number"),
        ({"kind": "bitflip", "element": 1 << 70}, "element = .*, expected a flat index"),
        ({"kind": "bitflip", "steps": []}, r"steps = \[\], expected a list of steps, one or more"),
        (
            {"kind": "multiply", "bit": 3},
            "bit says nothing of kind 'multiply'; it is read by bitflip and stuck_at. Leave it",
        ),
        ({"kind": "permute", "factor": 2.0}, "factor says nothing of kind 'permute'; it is read by multiply"),
        ({"kind": "exponent_msb", "ulps": 2}, "ulps says nothing of kind 'exponent_msb'; it is read by carry"),
    ],
)
def test_what_is_not_understood_is_named(row, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping({"fault": [row]})


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the faults: cannot read .*missing\.toml: No such file"):
        load_faults(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("[[fault")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML: .*expected \[\[fault\]\] tables"):
        load_faults(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text('[fault]\nkind = "carry"\n')
    with pytest.raises(ConfigError, match=r"bad\.toml: expected \[\[fault\]\] tables \(with two brackets\)"):
        load_faults(tmp_path / "bad.toml")
    for text in ("9" * 5000, "[" * 5000):
        (tmp_path / "bad.toml").write_text(f'[[fault]]\nkind = "multiply"\nfactor = {text}\n')
        with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
            load_faults(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="10000 faults are declared; expected at most 1000"):
        from_mapping({"fault": [{"kind": "carry"}] * 10_000})
    with pytest.raises(ConfigError, match="unknown key 'faults'"):
        from_mapping({"faults": []})


# -- GenerateEodMaskV2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_preset_as_the_documented_demo_uses_it(dtype):
    for step in range(12):
        x = torch.zeros(8, 8, dtype=dtype, requires_grad=True)
        y = eod_mask_v2(x, 0, step, 0, 0, 0, [5], "cycle", "bitflip_designed", 1.0, 0, 0.0)
        assert y[0, 0].item() == (2.0 if step in {5, 10} else 0.0)
        assert y.sum().item() == y[0, 0].item()
        y.backward(torch.full_like(y, 3.0))
        assert torch.equal(x.grad, torch.full_like(x, 3.0))
        healthy = eod_mask_v2(x, 0, step, 0, 0, 0, [5], "cycle", "multiply", 1.0, 0, 0.0)
        assert torch.equal(healthy, x)


def test_the_presets_modes():
    x = torch.tensor([[[0.1]], [[-0.2]]])
    common = {"error_mode": "cycle", "steps": [1], "cur_step": 3}
    assert eod_mask_v2(x, 0, flip_mode="bitflip", bit_pos=0, **common).tolist() == [
        [[-x[0].item()]],
        [[x[1].item()]],
    ]
    assert torch.equal(eod_mask_v2(x, [0, 1], flip_mode="bitflip", **common), -x)
    assert torch.equal(
        eod_mask_v2(x, torch.tensor(1), flip_mode="multiply", multiply_factor=2.0, **common)[1], 2 * x[1]
    )
    tops = eod_mask_v2(x, 0, flip_mode="multiply_max", multiply_factor=2.0, **common)
    assert torch.equal(tops, torch.full_like(x, x.abs().max().item()))
    assert torch.equal(eod_mask_v2(x, 0, flip_probability=1.0, **common), -x)


def test_the_presets_steps():
    x = torch.ones(1)
    fired = [s for s in range(12) if eod_mask_v2(x, 0, s, start=2, steps=[0, 4], error_mode="specific").item() < 0]
    assert fired == [2, 6]
    fired = [s for s in range(12) if eod_mask_v2(x, 0, torch.tensor(s), start=2, steps=4).item() < 0]
    assert fired == [6, 10]


def test_the_presets_probability_is_seeded():
    x = torch.ones(10_000)
    first = eod_mask_v2(x, 0, 1, seed=3, flip_probability=0.01)
    assert torch.equal(first, eod_mask_v2(x, 0, 1, seed=1, offset=2, flip_probability=0.01))
    assert 60 < int((first < 0).sum()) < 140


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flip_mode": "flip"}, "flip_mode = 'flip', expected one of bitflip, bitflip_designed"),
        ({"error_mode": "once"}, "error_mode = 'once', expected one of cycle, specific"),
        ({"steps": [0]}, "expected a first step of 1 or more"),
        ({"ele_pos": 4}, r"ele_pos = \[4\], but x has 4 elements"),
        ({"bit_pos": 32}, "there is no bit 32 in float32"),
        ({"x": torch.ones(2, dtype=torch.float64)}, "expected bfloat16, float16 or float32"),
    ],
)
def test_the_preset_names_bad_arguments(change, message):
    with pytest.raises(UsageError, match=message):
        eod_mask_v2(**{"x": torch.ones(4), "ele_pos": 0, "cur_step": 1} | change)


# -- docs/faults.md and the template -------------------------------------------------------------------------


def test_the_page_tells_every_key_and_kind_and_its_examples_load():
    page = (Path(__file__).parents[1] / "docs" / "faults.md").read_text()
    for word in [field.name for field in fields(Fault)] + [
        *DEFAULT_PATTERN,
        *PATTERNS,
        "forward",
        "backward",
        "comm",
        "param",
        "optim",
    ]:
        assert f"`{word}`" in page, word
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        assert len(from_mapping(tomllib.loads(example))) == 1


def test_the_template_is_printed_without_torch_and_strikes(tmp_path):
    code = "import sys; from bitwitness.cli import main; main(['demo', '--faults-template']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (tmp_path / "faults.toml").write_text(done.stdout)
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)\n"
        "for _ in range(60):\n"
        "    net(torch.randn(4, 8)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    told = script(
        ["-m", "bitwitness", "run", "--act", "protect", "train.py"],
        tmp_path,
        environment={"BITWITNESS_INJECT": "faults.toml"},
    )
    assert told.returncode == 17, told.stderr
    assert re.search(r"fault 0 \(bitflip at \*/\*mm:backward\) struck once, in step 20 at .*/mm#", told.stderr), (
        told.stderr
    )
    assert "fault 1 (multiply at */addmm:forward) struck" in told.stderr
