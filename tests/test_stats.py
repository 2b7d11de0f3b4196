import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitwitness import UsageError
from bitwitness.stats import bit_hash, exact_l2, exact_sketch, features_of, sketch, sketch_rows, stats_of

INTEGERS = [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
HALVES_AND_EIGHTHS = [
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def check_against_numpy(stats, x):
    """Compare with statistics of a float64 NumPy array."""
    finite = x[np.isfinite(x)]
    assert stats.count == x.size
    assert stats.nan == np.isnan(x).sum()
    assert (stats.pos_inf, stats.neg_inf) == (np.isposinf(x).sum(), np.isneginf(x).sum())
    assert stats.zeros == (x == 0).sum()
    if finite.size == 0:
        assert all(math.isnan(v) for v in (stats.min, stats.max, stats.mean, stats.absmax))
        assert stats.l2 == 0
        return
    assert (stats.min, stats.max, stats.absmax) == (finite.min(), finite.max(), np.abs(finite).max())
    scale = np.abs(finite).max() or 1.0
    assert stats.mean == pytest.approx(np.mean(finite / scale) * scale, rel=1e-9, abs=1e-13 * scale)
    with np.errstate(over="ignore"):
        assert stats.l2 == pytest.approx(np.linalg.norm(finite / scale) * scale, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_floats_agree_with_numpy_in_float64(dtype, data):
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    x = data.draw(hnp.arrays(dtype, shapes))
    check_against_numpy(stats_of(torch.from_numpy(x)), x.astype(np.float64))


@pytest.mark.parametrize("dtype", HALVES_AND_EIGHTHS)
def test_every_number_of_a_small_format_is_counted(dtype):
    size = dtype.itemsize
    codes = torch.arange(1 << (8 * size)).to(torch.uint8 if size == 1 else torch.uint16)
    x = codes.view(dtype)
    wide = x.to(torch.float64)
    check_against_numpy(stats_of(x), wide.numpy())
    finite = codes[wide.isfinite()].view(dtype)
    check_against_numpy(stats_of(finite), finite.to(torch.float64).numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_largest_values_do_not_overflow(dtype):
    largest = torch.finfo(dtype).max
    stats = stats_of(torch.full((1000,), largest, dtype=dtype))
    assert stats.mean == pytest.approx(largest)
    assert stats.absmax == stats.max == largest
    if dtype != torch.float64:
        assert stats.l2 == pytest.approx(largest * math.sqrt(1000))


def test_smallest_float64_values_do_not_vanish():
    assert stats_of(torch.tensor([3e-200, 4e-200], dtype=torch.float64)).l2 == pytest.approx(5e-200)


@pytest.mark.parametrize("dtype", INTEGERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_integers_are_exact(dtype, data):
    info = np.iinfo(str(dtype).removeprefix("torch."))
    numbers = data.draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=1, max_size=20))
    stats = stats_of(torch.from_numpy(np.array(numbers, dtype=info.dtype)))
    assert (stats.min, stats.max, stats.absmax) == (min(numbers), max(numbers), max(map(abs, numbers)))
    assert stats.mean == sum(numbers) / len(numbers)
    assert stats.zeros == numbers.count(0)
    assert stats.l2 == pytest.approx(math.sqrt(sum(n * n for n in numbers)), rel=1e-12)


def test_bool_and_complex_and_empty():
    stats = stats_of(torch.tensor([True, False, True, True]))
    assert (stats.count, stats.zeros, stats.min, stats.max, stats.mean) == (4, 1, 0, 1, 0.75)
    stats = stats_of(torch.tensor([3 + 4j, complex(math.nan, 0)]))
    assert (stats.count, stats.nan, stats.zeros, stats.max, stats.l2) == (4, 1, 1, 4, 5)
    assert stats_of(torch.empty(0, 4, dtype=torch.int32)).count == 0
    assert math.isnan(stats_of(torch.empty(0, 4, dtype=torch.int32)).mean)


def test_many_blocks_and_strides():
    x = torch.randn(600, 500, generator=torch.Generator().manual_seed(0))
    x[5, 7], x[500, 3], x[::50, 1] = math.nan, -math.inf, 0
    for view in (x, x.t(), x[::3, 1::2], x.to(torch.float64)):
        check_against_numpy(stats_of(view), view.to(torch.float64).numpy())
    clean = torch.nan_to_num(x, neginf=0.0)
    check_against_numpy(stats_of(clean), clean.to(torch.float64).numpy())


def test_hash_is_the_bit_hash_and_only_on_request():
    for x in (torch.randn(10), torch.arange(5), torch.empty(0)):
        assert stats_of(x, with_hash=True).hash == int(bit_hash(x))
        assert stats_of(x).hash is None
        assert stats_of(x, with_hash=True).count == x.numel()


def test_sparse_values_are_read():
    x = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, -3.0]), (4,), check_invariants=True)
    assert stats_of(x).count == 2
    assert stats_of(x).min == -3
    csr = torch.eye(3).to_sparse_coo()
    assert stats_of(csr).mean == 1


def test_tensors_gradients_and_random_state_stay_as_they_were():
    for dtype in (torch.float64, torch.float32, torch.int64):
        x = (torch.randn(3000) * 100).to(dtype).requires_grad_(dtype.is_floating_point)
        copy, state = x.detach().clone(), torch.get_rng_state()
        stats_of(x, with_hash=True)
        features_of([x])
        assert torch.equal(x.detach(), copy)
        assert x.requires_grad == dtype.is_floating_point
        assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_read_is_named():
    with pytest.raises(UsageError, match=r"shape \[2, 3\] is on the meta device"):
        stats_of(torch.empty(2, 3, device="meta"))
    with pytest.raises(UsageError, match=r"no statistics of torch.float4_e2m1fn_x2.*unpack or cast"):
        stats_of(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        with pytest.raises(UsageError, match=r"is quantized \(torch.qint8\); pass its dequantize\(\)"):
            stats_of(quantized)


@pytest.mark.parametrize(
    ("numbers", "dtype", "expected"),
    [
        ([3e38, 3e38], torch.float32, 3e38 * math.sqrt(2)),
        ([3e300, 4e300], torch.float64, 5e300),
        ([60000.0] * 4, torch.float16, 120000.0),
        ([1.0, math.inf], torch.float32, math.inf),
        ([], torch.float32, 0.0),
    ],
)
def test_exact_l2(numbers, dtype, expected):
    norm = exact_l2(torch.tensor(numbers, dtype=dtype))
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(expected, rel=1e-3 if dtype == torch.float16 else 1e-7)


def test_exact_l2_keeps_a_nan():
    assert math.isnan(exact_l2(torch.tensor([1e300, math.nan, math.inf], dtype=torch.float64)))


def gradients():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (5000,), (), (0,), (17,), (90, 70), (17,), (1100, 1000), (2, 0, 3), (4096,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]
    for dtype in dtypes:
        for shape in shapes:
            yield torch.randn(shape, generator=generator).to(dtype)
    yield torch.randn(64, 80, generator=generator).t()
    yield torch.randn(9000, generator=generator)[1::2]
    yield torch.randn(30, dtype=torch.complex64, generator=generator)


def test_features_of_any_mixture_are_those_of_each_gradient_in_order():
    grads = list(gradients())
    features = features_of(grads)
    assert features.l2.dtype == features.absmax.dtype == torch.float32
    assert features.digest.dtype == torch.int64
    assert features.l2.shape == features.absmax.shape == features.digest.shape == (len(grads),)
    for index, grad in enumerate(grads):
        stats = stats_of(grad, with_hash=True)
        assert float(features.l2[index]) == pytest.approx(stats.l2, rel=1e-4)
        assert float(features.absmax[index]) == (float(np.float32(stats.absmax)) if grad.numel() else 0)
        assert int(features.digest[index]) == stats.hash


def test_features_without_gradients_or_digest():
    assert features_of([]).l2.shape == features_of([]).absmax.shape == features_of([]).digest.shape == (0,)


@pytest.mark.parametrize("shape", [(10,), (5000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_non_finite_values_show_in_the_features(shape, dtype):
    rows = []
    for bad in ([math.nan], [math.inf], [-math.inf], [math.inf, math.nan]):
        grad = torch.ones(shape, dtype=dtype)
        grad[: len(bad)] = torch.tensor(bad, dtype=dtype)
        rows.append(grad)
    features = features_of(rows)
    assert [str(v) for v in features.absmax.tolist()] == ["nan", "inf", "inf", "nan"]
    assert [str(v) for v in features.l2.tolist()] == ["nan", "inf", "inf", "nan"]


def test_a_norm_beyond_float32_is_infinite_and_the_exact_one_tells():
    grad = torch.full((100,), 3e38)
    features = features_of([grad])
    assert math.isinf(features.l2[0])
    assert float(features.absmax[0]) == pytest.approx(3e38)
    assert float(exact_l2(grad)) == pytest.approx(3e39)


def test_large_half_gradients_keep_float32_norms():
    grad = torch.full((50_000,), 600.0, dtype=torch.float16)
    assert float(features_of([grad]).l2[0]) == pytest.approx(600 * math.sqrt(50_000), rel=1e-4)


def test_sparse_gradients_are_read_by_their_values():
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    embedding(torch.tensor([3, 7])).sum().backward()
    grad = embedding.weight.grad
    features = features_of([torch.ones(4), grad])
    assert features.l2.tolist() == [2, 4]
    assert int(features.digest[1]) == int(bit_hash(grad))


def test_the_local_shard_of_a_dtensor_is_read(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.randn(40, 30)
        sharded = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert stats_of(sharded, with_hash=True) == stats_of(x, with_hash=True)
        features, expected = features_of([sharded, x]), features_of([x, x])
        assert torch.equal(features.digest, expected.digest)
        assert torch.equal(features.l2, expected.l2)
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerator_gives_the_same_features():
    grads = list(gradients())
    here, there = features_of(grads), features_of([grad.cuda() for grad in grads])
    assert torch.equal(here.digest, there.digest.cpu())
    torch.testing.assert_close(there.absmax.cpu(), here.absmax, rtol=0, atol=0)
    torch.testing.assert_close(
        there.l2.cpu(), here.l2, rtol=1e-4, atol=0
    )  # either sums a million numbers in its own order
    with_nan = torch.tensor([1.0, math.nan, math.inf], device="cuda")
    assert math.isnan(features_of([with_nan]).absmax[0])


@given(st.integers(1, 100_000), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_a_sketch_is_linear_and_estimates_the_norm_of_a_difference(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, dtype=torch.float64, generator=generator) for _ in range(2))
    assert float(sketch(x) - sketch(y)) == pytest.approx(float(sketch(x - y)), abs=1e-8 * count**0.5)
    assert abs(float(sketch(x))) <= 6 * float(x.norm()) + 1e-12


@pytest.mark.parametrize("count", [1, 32_767, 32_768, 32_769, 98_304, 131_073])
def test_a_sketch_is_a_sum_with_weights_of_splitmix64(count: int) -> None:
    def random(number: int) -> int:
        x = (number + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        return x ^ x >> 31

    def sign(number: int) -> int:
        return -1 if random(number) >> 63 else 1

    for place in {0, count // 2, count - 1}:
        values = torch.zeros(count)
        values[place] = 3.0
        block, at = place // 32_768, place % 32_768
        known_by = sign((1 << 40) + block) if count > 32_768 else 1
        size = ((random(at) >> 8) % 15_188 + 8_192) / 16_384
        assert float(sketch(values)) == 3.0 * sign(at) * size * known_by


def test_weights_have_a_mean_square_of_one() -> None:
    weights = torch.stack([sketch(row) for row in torch.eye(4096)])
    assert float(weights.square().mean()) == pytest.approx(1.0, abs=0.03)
    assert abs(float(weights.mean())) < 0.05


@pytest.mark.parametrize("kind", ["labels", "mask", "one-hot gradient"])
def test_few_equal_numbers_that_move_are_seen(kind: str) -> None:
    """With signs for weights, half of these came to the same sum elsewhere."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        if kind == "labels":
            x = torch.randint(0, 10, (8, 6), generator=generator)
            moved = x[torch.randperm(8, generator=generator)]
        elif kind == "mask":
            x = torch.rand(4, 12, generator=generator) < 0.5
            moved = x.roll(1, 1)
        else:
            x = torch.nn.functional.one_hot(torch.randint(0, 50, (4,), generator=generator), 50) / -4
            moved = torch.nn.functional.one_hot(torch.randint(0, 50, (4,), generator=generator), 50) / -4
        if not torch.equal(x, moved):
            assert abs(exact_sketch(x) - exact_sketch(moved)) > 1e-6


def test_a_sketch_tells_orders_apart_where_other_statistics_do_not() -> None:
    images = torch.rand(4, 3, 16, 16)
    flipped = images.flip(3).contiguous()
    assert abs(exact_sketch(images) - exact_sketch(flipped)) > 0.01 * float(images.norm())
    assert exact_sketch(torch.tensor([1.0, float("inf")])) is None
    assert exact_sketch(torch.zeros(0)) == 0.0


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 39), st.sampled_from([torch.float32, torch.float64]))
def test_a_rows_figures_depend_on_no_other_row(length: int, rows: int, at: int, dtype: torch.dtype) -> None:
    values = torch.randn(rows, length, generator=torch.Generator().manual_seed(length)).to(dtype)
    alone, one = values[at % rows].clone().view(1, -1), slice(at % rows, at % rows + 1)
    assert torch.equal(sketch_rows(values)[one], sketch_rows(alone))
    assert torch.equal(values.sum(1)[one], alone.sum(1))
    assert torch.equal(values.square().sum(1)[one], alone.square().sum(1))
