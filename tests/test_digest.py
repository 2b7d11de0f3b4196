import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bitwitness import UsageError
from bitwitness.stats import HashBatch, bit_hash, digest, hashmany
from bitwitness.stats.changed import change_of
from bitwitness.stats.digest import ROW_BYTES, flat_bits
from bitwitness.stats.hashmany import LARGEST, hash_together
from bitwitness.stats.reader import built

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def random_bits(shape, dtype, seed=0):
    """Any bits at all, NaN payloads included; bool only 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    *rest, last = shape
    return torch.randint(0, 256, (*rest, last * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)


def value(tensor):
    digest = bit_hash(tensor)
    assert digest.shape == ()
    assert digest.dtype == torch.int64
    return int(digest)


def as_bytes(tensor):
    if tensor.shape == (1,):
        tensor = tensor.as_strided((1,), (1,), tensor.storage_offset())  # one element is contiguous at any stride
    return tensor.view(torch.uint8)


dtypes = st.sampled_from(DTYPES)
lengths = st.one_of(st.integers(1, 40), st.integers(1, 9000))


@given(dtype=dtypes, length=lengths, seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_single_flipped_bit_changes_the_hash(dtype, length, seed, data):
    x = random_bits((length,), dtype, seed)
    before = value(x)
    byte = data.draw(st.integers(0, x.nbytes - 1))
    as_bytes(x)[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert value(x) != before


@given(dtype=dtypes, length=lengths, offset=st.integers(0, 9), stride=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_equal_bits_hash_alike_whatever_alignment_and_stride(dtype, length, offset, stride):
    x = random_bits((length,), dtype)
    storage = torch.zeros(offset + length * stride, dtype=torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)
    placed = storage[offset::stride][:length]
    placed.copy_(x)
    if dtype == torch.float4_e2m1fn_x2 or not torch.equal(as_bytes(placed.contiguous()), as_bytes(x)):
        assume(False)
    assert value(placed) == value(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposed_view_hashes_like_its_copy(dtype):
    x = random_bits((70, 130), dtype)
    flipped = torch.empty(130, 70, dtype=dtype)
    source, target = (t.view(torch.uint8).view(t.shape[0], t.shape[1], -1) for t in (x, flipped))
    target.copy_(source.transpose(0, 1))
    assert value(x.t()) == value(flipped)
    assert value(x.t()) != value(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_elements_counts(dtype):
    per_row = ROW_BYTES // dtype.itemsize
    lengths = [0, 1, 2, 3, 7, 8, per_row - 1, per_row, per_row + 1, per_row + 8, 2 * per_row, 2 * per_row + 9]
    zeros = torch.zeros(max(lengths) * dtype.itemsize, dtype=torch.uint8).view(dtype)
    assert len({value(zeros[:length]) for length in lengths}) == len(lengths)


@given(
    dtype=st.sampled_from([*FLOATS, torch.float8_e4m3fn, torch.int32, torch.int64]),
    rows=st.integers(2, 90),
    columns=st.sampled_from([2, 3, 33, 64, 255, 256, 320, 1021]),
    axis=st.integers(0, 1),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_swapped_or_duplicated_rows_and_columns_change_the_hash(dtype, rows, columns, axis, data):
    x = random_bits((rows, columns), dtype)
    bits = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    a, b = data.draw(st.lists(st.integers(0, x.shape[axis] - 1), min_size=2, max_size=2, unique=True), label="which")
    before, original = value(x), bits.clone()
    assume(not torch.equal(bits.select(axis, a), bits.select(axis, b)))
    bits.index_copy_(axis, torch.tensor([a, b]), original.index_select(axis, torch.tensor([b, a])))
    assert value(x) != before
    bits.index_copy_(axis, torch.tensor([b]), original.index_select(axis, torch.tensor([b])))
    assert value(x) != before


TILES = [
    ((0, 16), (0, 32)),
    ((0, 0), (16, 0)),
    ((16, 16), (48, 64)),
    ((32, 16), (32, 240)),
    ((64, 0), (192, 0)),
]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("width", [256, 320, 1024])
def test_damaged_16x16_tiles_change_the_hash(dtype, width):
    x = (
        torch.randint(-127, 128, (256, width), dtype=dtype, generator=torch.Generator().manual_seed(1))
        if dtype == torch.int8
        else torch.randn(256, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    )
    seen = {value(x)}
    for (r, c), (q, d) in TILES:
        one, other = x[r : r + 16, c : c + 16], x[q : q + 16, d : d + 16]
        for new_one, new_other in (
            (other, one),  # swapped
            (one, one),  # duplicated
            (torch.zeros_like(one), other),
            (-one, other),
            (-one, -other),
            (2 * one, other),
            (one.flip(0), other),
            (one.t(), other),
        ):
            y = x.clone()
            y[r : r + 16, c : c + 16], y[q : q + 16, d : d + 16] = new_one, new_other
            seen.add(value(y))
    # the duplicate is the same damage twice for no pair, so each damage has a hash of its own, the plain one included
    assert len(seen) == 1 + 8 * len(TILES)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 4, 8, 64])
def test_periodic_sign_changes_change_the_hash_of_zeros_too(dtype, start, step):
    for x in (torch.zeros(128, 512, dtype=dtype), torch.ones(128, 512, dtype=dtype)):
        y = x.clone()
        y[:, start::step] *= -1
        assert value(y) != value(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_permutation_matrices_hash_differently(dtype):
    generator = torch.Generator().manual_seed(0)
    eye = torch.eye(256).to(dtype)
    hashes = {value(eye)} | {value(eye[torch.randperm(256, generator=generator)]) for _ in range(50)}
    swapped = eye.clone()
    swapped[[3, 200]] = swapped[[200, 3]]
    assert len(hashes | {value(swapped)}) == 52


def test_no_collision_among_many_small_tensors():
    bits = torch.arange(20000, dtype=torch.int32)
    assert len({value(x) for x in bits.view(-1, 2)[:5000]}) == 5000


def test_number_of_threads_does_not_matter():
    x = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    code = (
        "import torch, sys; from bitwitness.stats import bit_hash; torch.set_num_threads(int(sys.argv[1]));"
        "print(int(bit_hash(torch.randn(700_001, generator=torch.Generator().manual_seed(0)))))"
    )
    out = subprocess.run([sys.executable, "-c", code, "2"], capture_output=True, text=True, check=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert int(out.stdout) == value(x)
    finally:
        torch.set_num_threads(before)


GOLDEN = [-1667598624438784202, -2188026607604444400, -8112481555738503721]


def test_the_hash_is_the_same_in_every_release():
    x = torch.arange(30000, dtype=torch.int32)
    assert [value(x), value(x[:100]), value(x[:0])] == GOLDEN


def without_compiled_code(monkeypatch):
    for module in ("fold", "digest"):
        monkeypatch.setattr(f"bitwitness.stats.{module}.built", lambda: None)


def test_blocks_do_not_show_in_the_hash(monkeypatch):
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    expected = value(x)
    without_compiled_code(monkeypatch)
    for rows, device_rows in ((1, 3), (7, 5), (64, 64)):
        monkeypatch.setattr("bitwitness.stats.fold._CPU_ROWS", rows)
        monkeypatch.setattr("bitwitness.stats.fold._DEVICE_ROWS", device_rows)
        assert value(x) == expected


@pytest.mark.parametrize("length", [2045, 16_335, 16_336, 16_337, 40_003])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_compiled_code_gives_the_hash_of_torchs_operators(length, start, monkeypatch):
    x = random_bits((length * 4 + 3,), torch.uint8)[start:]
    compiled = value(x)
    without_compiled_code(monkeypatch)
    assert value(x) == compiled


def test_a_tensor_of_a_third_of_a_gigabyte_has_a_hash():
    x = torch.zeros(80 << 20)
    before = value(x)
    x[-5_000_000] = 1e-30
    assert value(x) != before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_accelerator_gives_the_same_hash(dtype):
    x = random_bits((123_457,), dtype)
    assert value(x.cuda()) == value(x)
    assert value(x.cuda()[1:]) == value(x[1:])


def test_sparse_tensors_are_hashed_with_their_indices():
    values = torch.tensor([1.0, 2.0])
    x = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4,), check_invariants=True)
    y = torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values, (4,), check_invariants=True)
    assert value(x) == value(x.clone())
    assert value(x) != value(y)


def test_conjugate_views_are_hashed_by_what_they_stand_for():
    x = torch.randn(5, dtype=torch.complex64)
    assert value(x.conj()) == value(x.conj().resolve_conj())
    assert value(x.conj()) != value(x)


def test_parameters_and_grad_mode_are_left_alone():
    x = torch.nn.Parameter(torch.randn(5000))
    state = torch.get_rng_state()
    digest = bit_hash(x)
    assert not digest.requires_grad
    assert x.requires_grad
    assert torch.equal(state, torch.get_rng_state())
    (x * 2).sum().backward()
    assert value(x.grad) == value(torch.full((5000,), 2.0))


def test_meta_and_quantized_tensors_are_named():
    with pytest.raises(UsageError, match=r"shape \[3\] is on the meta device and holds no numbers; materialise"):
        bit_hash(torch.empty(3, device="meta"))


_LENGTHS = (0, 1, 3, 7, 8, 100, 1021, 2041, 2042, 2043, 2044, 4084, 8167, 8168, 8172, 70_000)
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64)


@given(
    st.lists(
        st.tuples(st.sampled_from(_LENGTHS) | st.integers(0, 40_000), st.sampled_from(_DTYPES)), min_size=1, max_size=12
    )
)
@settings(max_examples=40, deadline=None)
def test_tensors_that_are_hashed_together_have_the_hashes_that_they_have_alone(tensors) -> None:
    made = [(torch.randn(length) * 100).to(dtype) for length, dtype in tensors]
    alone = [int(bit_hash(x)) for x in made]
    for compiled in (True, False):  # as an accelerator hashes, too
        with mock.patch.object(hashmany, "built", built if compiled else lambda: None):
            flats = [flat for flat in map(flat_bits, made) if compiled or not ROW_BYTES < flat.nbytes < ROW_BYTES + 4]
            expected = [
                h for h, x in zip(alone, made, strict=True) if compiled or not ROW_BYTES < x.nbytes < ROW_BYTES + 4
            ]
            if flats:
                assert hash_together(flats).hashes.tolist() == expected


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_kept_of_tensors_that_are_read_together_tells_which_word_has_changed(compiled, monkeypatch) -> None:
    monkeypatch.setattr(digest, "can_be_together", lambda flat: flat.nbytes <= LARGEST)
    monkeypatch.setattr(hashmany, "built", built if compiled else lambda: None)
    made = [torch.randn(n) for n in (300, 5000, 20_000, 9, 2042)]
    for index, at in ((0, 17), (1, 4999), (2, 12_345), (3, 8), (4, 2041)):
        before, after = HashBatch(), HashBatch()
        before.add_all(made)
        made[index].view(torch.int32)[at] ^= 1 << 20
        after.add_all(made)
        assert [int(a == b) for a, b in zip(before.on_host(), after.on_host(), strict=True)].count(0) == 1
        change = change_of(before.kept(index), after.kept(index), flat_bits(made[index]))
        assert change.word is not None
        assert change.word.flipped == 1
        assert change.word.at // 4 == at // 2 * 2
