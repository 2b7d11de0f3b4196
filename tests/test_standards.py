"""Other people's standards say what they say there, blind spots included; and none of them lets a NaN pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness import UsageError
from bitwitness.trial.result import FAIL, NOT_JUDGED, PASS, WARN
from bitwitness.trial.standard import STANDARDS, standard
from bitwitness.trial.standards import judge_by
from bitwitness.trial.standards_msprobe import limits_of

NAMES = ["absolute", "allclose", "backendbench", "benchmark", "binary", "thousandths", "ulp"]
HALF = [torch.float16, torch.bfloat16]
FLOATS = [*HALF, torch.float32, torch.float64]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def verdict(name: str, actual: torch.Tensor, golden: torch.Tensor) -> str:
    return judge_by(name, actual, golden, benchmark=golden.to(actual.dtype)).verdict


def test_all_are_there() -> None:
    assert sorted(STANDARDS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_against_a_number_fails_and_nothing_is_not_judged(name: str, dtype: torch.dtype) -> None:
    golden = normal(10_000)
    actual = golden.to(dtype, copy=True)
    actual[77] = torch.nan
    assert verdict(name, actual, golden) == FAIL
    assert "NaN on one side" in judge_by(name, actual, golden, golden.to(dtype)).reason
    assert verdict(name, golden.to(dtype), golden.index_fill(0, torch.tensor([5]), torch.nan)) == FAIL
    assert verdict(name, torch.empty(0, 3, dtype=dtype), torch.empty(0, 3, dtype=torch.float64)) == NOT_JUDGED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_rounded_correctly_passes_but_for_msprobes_rule_of_bfloat16(name: str, dtype: torch.dtype) -> None:
    golden = normal(4096)
    expected = WARN if name == "thousandths" and dtype is torch.bfloat16 else PASS
    assert verdict(name, golden.to(dtype), golden) == expected


@pytest.mark.parametrize("name", NAMES)
def test_large_errors_other_shapes_and_wrong_integers_fail(name: str) -> None:
    golden = normal(100) + 3
    assert verdict(name, (golden * 2).float().neg(), golden) == FAIL
    assert judge_by(name, torch.zeros(3), golden, torch.zeros(3)).verdict == FAIL
    assert verdict(name, torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3])) == FAIL
    assert verdict(name, torch.tensor([True, False]), torch.tensor([True, True])) == FAIL
    assert verdict(name, torch.tensor([1, 2]), torch.tensor([1, 2])) == PASS
    assert verdict(name, golden.to(torch.complex64), golden.to(torch.complex128)) == PASS


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("thousandths", "benchmark")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_count_where_the_dtype_has_them(name: str, dtype: torch.dtype) -> None:
    golden = torch.tensor([1.0, torch.inf, -torch.inf], dtype=torch.float64)
    assert verdict(name, golden.to(dtype), golden) == PASS
    for wrong in (-golden, golden.nan_to_num(posinf=float(torch.finfo(dtype).max))):
        assert verdict(name, wrong.to(dtype), golden) == FAIL
    if dtype is torch.float16:  # 70000 has no place in it
        assert verdict(name, torch.tensor([torch.inf]).half(), torch.tensor([70000.0]).double()) == PASS


class TestThousandths:
    """The blind spots that shared/reference/msprobe.md lists, as they were measured with msprobe."""

    def test_small_data_may_be_anything(self) -> None:
        for size, factor in ((1e-4, 1.5), (1e-5, 10.0)):
            golden = normal(1000) * size
            assert verdict("thousandths", (golden * factor).float(), golden) == PASS
            assert verdict("ulp", (golden * factor).float(), golden) == FAIL

    def test_one_wrong_element_of_many_passes(self) -> None:
        golden = normal(20_000) + 3
        actual = golden.float()
        actual[5] *= 4
        assert verdict("thousandths", actual, golden) == PASS
        assert verdict("allclose", actual, golden) == FAIL
        actual[5] = torch.inf
        assert verdict("thousandths", actual, golden) == PASS

    def test_a_mask_of_infinities_is_an_error(self) -> None:
        golden = torch.zeros(64, 64, dtype=torch.float64).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
        assert verdict("thousandths", golden.float(), golden) == FAIL
        assert verdict("binary", golden.float(), golden) == PASS

    def test_the_shares_of_each_dtype(self) -> None:
        golden = normal(10_000).abs() + 1
        off = {4e-3: (PASS, FAIL), 5e-4: (PASS, WARN)}
        for error, (_, wide) in off.items():
            assert verdict("thousandths", (golden * (1 + error)).float(), golden) == wide
        assert verdict("thousandths", (golden * 1.004).half(), golden) == WARN
        assert verdict("thousandths", (golden * 1.02).half(), golden) == FAIL
        assert judge_by("thousandths", (golden * 1.02).half(), golden).figures["within_0.01"] < 0.01

    def test_the_cosine_comes_first(self) -> None:
        assert verdict("thousandths", -normal(100).float() * 1e-5, normal(100) * 1e-5) == FAIL
        assert "cosine" in judge_by("thousandths", torch.zeros(4), torch.full((4,), 1e-5).double()).reason


def test_a_benchmark_is_needed_and_has_the_results_shape() -> None:
    with pytest.raises(UsageError, match="needs a benchmark's result"):
        judge_by("benchmark", torch.ones(3), torch.ones(3).double())
    with pytest.raises(UsageError, match="one shape"):
        judge_by("benchmark", torch.ones(3), torch.ones(3).double(), torch.ones(4))


def test_a_device_may_be_so_much_worse_than_its_benchmark() -> None:
    golden = normal(10_000).abs() + 1
    noise = normal(10_000) * 1e-3
    benchmark = (golden + noise).float()
    actual = (golden + 1.4 * noise).float()
    assert judge_by("benchmark", actual, golden, benchmark).verdict == PASS
    assert judge_by("benchmark", actual, golden, benchmark, "nn.functional.embedding").verdict == PASS
    judged = judge_by("benchmark", actual, golden, benchmark, "aten::sum.dim_IntList")
    assert judged.verdict == FAIL
    assert (
        judged.reason
        == "rmse is 1.4 times the benchmark's, limit 1.2; mean_rel is 1.4 times the benchmark's, limit 1.2"
    )
    assert judged.figures["rmse_ratio"] == pytest.approx(1.4, rel=1e-3)
    assert judge_by("benchmark", (golden + 3 * noise).float(), golden, benchmark).verdict == FAIL
    exact = golden.float()
    assert judge_by("benchmark", exact * (1 + 2**-14), golden, exact).verdict == PASS  # its blind spot: 1024 ULP
    actual[3] = torch.inf
    assert judge_by("benchmark", actual, golden, benchmark).verdict == FAIL


def test_small_values_of_a_benchmark_have_a_share_of_their_own() -> None:
    golden = normal(1000) * 1e-8
    assert judge_by("benchmark", torch.zeros(1000), golden, golden.float()).verdict == FAIL


@pytest.mark.parametrize(
    ("operator", "largest"),
    [("torch.Tensor.scatter_", 5.0), ("nn.functional.scaled_dot_product_attention", 5.0), ("torch.matmul", 2.0),
     ("nn.functional.layer_norm[float32]", 2.0), ("exp", 10.0), ("", 10.0), ("summary", 10.0)],
)  # fmt: skip
def test_the_class_of_an_operator(operator: str, largest: float) -> None:
    assert limits_of(operator)[2] == largest


def test_units_in_the_last_place() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert verdict("ulp", torch.tensor([1 + 32 * 2.0**-23]), one) == PASS
    assert verdict("ulp", torch.tensor([1 + 33 * 2.0**-23]), one) == FAIL
    assert verdict("ulp", torch.tensor([1 + 2.0**-10]).half(), one) == PASS
    assert verdict("ulp", torch.tensor([1 + 2 * 2.0**-10]).half(), one) == FAIL


def test_binary_sees_the_sign_of_zero_and_every_bit() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    assert verdict("binary", -zero.float(), zero) == FAIL
    assert verdict("binary", torch.tensor([1 + 2.0**-23]), torch.ones(1).double()) == FAIL
    assert verdict("binary", torch.tensor([torch.nan]), torch.tensor([torch.nan]).double()) == PASS


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FLOATS), st.floats(-1e4, 1e4), st.floats(-0.03, 0.03), st.floats(-1e-4, 1e-4))
def test_allclose_and_backendbench_are_assert_close(dtype: torch.dtype, size: float, by: float, plus: float) -> None:
    golden = torch.tensor([size], dtype=torch.float64)
    actual = (golden * (1 + by) + plus).to(dtype)
    expected = golden.to(dtype)
    ratio = judge_by("allclose", actual, golden).figures["ratio"]
    if abs(ratio - 1) > 0.05:  # there, the comparison itself is rounded to the dtype
        assert verdict("allclose", actual, golden) == closes(actual, expected)
    ratio = judge_by("backendbench", actual, golden).figures["ratio"]
    if abs(ratio - 1) > 0.05:
        assert verdict("backendbench", actual, golden) == closes(expected, actual, rtol=1e-2, atol=1e-2)


def closes(actual: torch.Tensor, expected: torch.Tensor, **tolerances: float) -> str:
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True, **tolerances)
    except AssertionError:
        return FAIL
    return PASS


def test_backendbench_lets_integers_be_off_by_a_hundredth() -> None:
    assert verdict("backendbench", torch.tensor([1001]), torch.tensor([1000])) == PASS
    assert verdict("allclose", torch.tensor([1001]), torch.tensor([1000])) == FAIL


def test_a_name_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no standard 'thousandth'; did you mean thousandths\?"):
        judge_by("thousandth", torch.ones(1), torch.ones(1).double())
    with pytest.raises(UsageError, match="take one of these"):
        judge_by("\x1b[31m", torch.ones(1), torch.ones(1).double())


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="already is a standard 'ulp'"):
        standard("ulp")(lambda _: None)
    assert sorted(STANDARDS) == NAMES
