import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness import UsageError
from bitwitness.numerics import error_metrics, ulp_distance, unit_roundoff

FARTHEST = torch.iinfo(torch.int64).max
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", FLOATS + FLOAT8)
def test_unit_roundoff_is_half_the_gap_after_one(dtype):
    # torch 2.13 gives e5m2fnuz an eps of 2^-3; with two stored mantissa bits the next number after 1 is 1.25
    gap = 0.25 if dtype is torch.float8_e5m2fnuz else torch.finfo(dtype).eps
    assert unit_roundoff(dtype) == gap / 2


def test_unit_roundoff_of_well_known_formats():
    assert unit_roundoff(torch.bfloat16) == 2**-8
    assert unit_roundoff(torch.float16) == 2**-11
    assert unit_roundoff(torch.float32) == unit_roundoff(torch.complex64) == 2**-24
    assert unit_roundoff(torch.float4_e2m1fn_x2) == 2**-2


def test_every_floating_dtype_of_torch_has_a_unit_roundoff():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        if dtype.is_floating_point or dtype.is_complex:
            assert 0 < unit_roundoff(dtype) <= 0.5


def test_integers_have_no_unit_roundoff():
    with pytest.raises(UsageError, match="torch.int32 has no unit roundoff; expected a floating-point"):
        unit_roundoff(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8])
def test_numbers_in_order_are_one_ulp_apart(dtype):
    size = dtype.itemsize
    codes = torch.arange(1 << (8 * size)).to(torch.uint8 if size == 1 else torch.uint16)
    numbers = codes.view(dtype)
    wide = numbers.to(torch.float64)
    numbers, wide = numbers[~wide.isnan()], wide[~wide.isnan()]
    values, order = wide.sort(stable=True)
    distance = ulp_distance(
        numbers.view(codes.dtype)[order[:-1]].view(dtype), numbers.view(codes.dtype)[order[1:]].view(dtype)
    )
    assert torch.equal(distance, (values[1:] != values[:-1]).to(torch.int64))  # +0 and -0 are one number


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(
    number=st.floats(width=32, allow_nan=False, allow_infinity=False),
    steps=st.integers(min_value=0, max_value=5),
)
@settings(max_examples=40, deadline=None)
def test_each_step_to_the_next_number_is_one_ulp(dtype, number, steps):
    start = torch.tensor(number, dtype=dtype)
    end = start
    for _ in range(steps):
        end = torch.nextafter(end, torch.tensor(math.inf, dtype=dtype))
    expected = steps if bool(end.isfinite()) else int(ulp_distance(start, end))
    assert int(ulp_distance(start, end)) == int(ulp_distance(end, start)) == expected


def test_ulp_distance_of_special_values():
    inf, nan = math.inf, math.nan
    a = torch.tensor([0.0, nan, nan, 1.0, inf, torch.finfo(torch.float32).max])
    b = torch.tensor([-0.0, nan, 1.0, nan, inf, inf])
    assert ulp_distance(a, b).tolist() == [0, 0, FARTHEST, FARTHEST, 0, 1]


def test_ulp_distance_saturates_where_int64_ends():
    largest = torch.finfo(torch.float64).max
    a = torch.tensor([largest, -largest, 1.5, 2.0], dtype=torch.float64)
    b = torch.tensor([-largest, largest, -1.5, -2.0], dtype=torch.float64)
    bits = a.view(torch.int64)
    expected = [FARTHEST, FARTHEST, 2 * int(bits[2]), FARTHEST]
    assert 2 * int(bits[3]) == FARTHEST + 1
    assert ulp_distance(a, b).tolist() == expected


def test_ulp_distance_takes_strided_empty_and_0d_tensors():
    x = torch.randn(4, 6)
    assert int(ulp_distance(x.t(), x.t().clone()).max()) == 0
    assert ulp_distance(torch.empty(0, 3), torch.empty(0, 3)).shape == (0, 3)
    assert ulp_distance(torch.tensor(1.0), torch.tensor(1.0)).shape == ()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            torch.ones(2),
            torch.ones(3),
            r"one dtype and shape, not torch.float32 \[2\] and torch.float32 \[3\]; cast",
        ),
        (torch.ones(2), torch.ones(2).half(), "not torch.float32 .* and torch.float16"),
        (torch.ones(2).int(), torch.ones(2).int(), "torch.int32 has no ULP; expected a floating dtype"),
    ],
)
def test_ulp_distance_says_what_it_cannot_compare(a, b, message):
    with pytest.raises(UsageError, match=message):
        ulp_distance(a, b)


def test_equal_tensors_have_no_error():
    x = torch.randn(100)
    metrics = error_metrics(x, x.clone())
    assert metrics.cosine == pytest.approx(1)
    assert (metrics.max_abs, metrics.max_rel, metrics.mean_rel, metrics.rmse, metrics.l2_relative) == (0,) * 5
    assert (metrics.ulp_max, metrics.nan_mismatch, metrics.inf_mismatch) == (0, 0, 0)
    assert (metrics.share_within_1e_3, metrics.share_within_5e_3) == (1, 1)


def test_metrics_of_a_known_error():
    golden = torch.tensor([1.0, 2.0, -4.0, 0.0], dtype=torch.float64)
    actual = torch.tensor([1.0, 2.004, -4.4, 0.0])
    metrics = error_metrics(actual, golden)
    assert metrics.max_abs == pytest.approx(0.4)
    assert metrics.max_rel == pytest.approx(0.1)
    assert metrics.mean_rel == pytest.approx((0.002 + 0.1) / 4, rel=1e-4)
    assert metrics.rmse == pytest.approx(math.hypot(0.004, 0.4) / 2, rel=1e-4)
    assert metrics.l2_relative == pytest.approx(math.hypot(0.004, 0.4) / math.sqrt(21), rel=1e-4)
    assert (metrics.share_within_1e_3, metrics.share_within_5e_3) == (0.5, 0.75)
    assert metrics.ulp_max == int(ulp_distance(actual, golden.float()).max())


def test_an_error_where_zero_is_expected_is_infinite_relative_to_it():
    metrics = error_metrics(torch.tensor([1.0, 1e-9]), torch.tensor([1.0, 0.0]))
    assert metrics.max_rel == math.inf
    assert metrics.mean_rel == 0
    assert metrics.share_within_5e_3 == 0.5


def test_equal_infinities_and_nans_are_no_error_and_others_are_counted():
    inf, nan = math.inf, math.nan
    golden = torch.tensor([inf, -inf, nan, inf, 1.0, nan, 2.0, 3.0])
    actual = torch.tensor([inf, -inf, nan, -inf, inf, 1.0, nan, 3.0])
    metrics = error_metrics(actual, golden)
    assert (metrics.nan_mismatch, metrics.inf_mismatch) == (2, 2)
    assert (metrics.max_abs, metrics.l2_relative) == (0, 0)
    assert metrics.share_within_1e_3 == metrics.share_within_5e_3 == 0.5
    assert metrics.ulp_max == FARTHEST


@pytest.mark.parametrize("scale", [1e-320, 1e300])
def test_float64_extremes_neither_overflow_nor_vanish(scale):
    golden = torch.tensor([scale, -scale], dtype=torch.float64)
    metrics = error_metrics(golden / 2, golden)
    assert metrics.cosine == pytest.approx(1)
    assert metrics.l2_relative == pytest.approx(0.5, rel=1e-2)
    assert metrics.rmse == pytest.approx(scale / 2, rel=1e-2)
    ends = torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)
    opposite = error_metrics(ends[:1], ends[1:])
    assert opposite.max_abs == opposite.rmse == math.inf


def test_cosine_of_zero_and_opposite_tensors():
    zero, one = torch.zeros(3), torch.ones(3)
    assert error_metrics(zero, zero).cosine == 1
    assert error_metrics(one, zero).cosine == 0
    assert error_metrics(-one, one).cosine == pytest.approx(-1)
    assert error_metrics(one, zero).l2_relative == math.inf


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_metrics_of_0d_and_empty_tensors(shape):
    metrics = error_metrics(torch.ones(shape), torch.ones(shape))
    assert (metrics.cosine, metrics.max_abs, metrics.ulp_max, metrics.share_within_1e_3) == (1, 0, 0, 1)


def test_metrics_of_integers_bool_complex_and_float8():
    assert error_metrics(torch.tensor([1, 5]), torch.tensor([1, 2])).ulp_max == 3
    assert error_metrics(torch.tensor([True]), torch.tensor([False])).max_abs == 1
    assert error_metrics(torch.tensor([1 + 2j]), torch.tensor([1 + 4j])).max_abs == 2
    eight = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert error_metrics(eight, torch.tensor([1.0, 2.25])).ulp_max == 1


def test_metrics_do_not_disturb_autograd():
    x = torch.ones(3, requires_grad=True)
    error_metrics(x * 2, x)
    assert x.grad is None
    assert x.requires_grad


def test_metrics_say_what_they_cannot_compare():
    with pytest.raises(UsageError, match=r"one shape, both real or both complex, not torch.float32 \[2\]"):
        error_metrics(torch.ones(2), torch.ones(2, 1))
    with pytest.raises(UsageError, match="both real or both complex"):
        error_metrics(torch.ones(2), torch.ones(2, dtype=torch.complex64))
