"""The compiled reader of tensors: it finds what torch finds, takes nothing that it would misread, and may be absent."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.stats import Moving, figures_of, reader
from bitwitness.stats.products import pairs, products, several

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "src" / "bitwitness" / "stats" / "native"
needs_it = pytest.mark.skipif(reader.built() is None, reason="needs a C compiler where the package was built")


def compiled() -> reader.Reader:
    found = reader.built()
    assert found is not None
    return found


@needs_it
def test_every_half_is_widened_rightly() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        for low in range(0, 1 << 16, 4096):  # by one exponent, so that sums hide nothing
            part = every[low : low + 4096]
            found, wide = compiled().read(part, zeros=True), part.double()
            if not wide.isfinite().all():
                assert not math.isfinite(found.squares)
                continue
            assert (found.low, found.high) == (wide.min(), wide.max())
            assert found.there == (wide != 0).sum()
            assert found.total == pytest.approx(float(wide.sum()), rel=1e-6)
        for one in every[:: 97 if dtype == torch.bfloat16 else 31]:
            assert compiled().read(one).total == pytest.approx(float(one), rel=0, nan_ok=True)


@needs_it
@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf, 1e-20, 3e4]),
    st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_many_at_once_are_read_as_torch_reads_them(
    counts: list[int], dtype: torch.dtype, odd: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(count, generator=generator).to(dtype) for count in counts]
    tensors[0][:1] = odd
    quick = figures_of(tensors, zeros=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "built", lambda: None)
        slow = figures_of(tensors, zeros=True)
    np.testing.assert_allclose(quick[:, [0, 1, 2, 3, 4]], slow[:, [0, 1, 2, 3, 4]], rtol=0)
    np.testing.assert_allclose(quick[:, 6], slow[:, 6], rtol=3e-6)
    assert ((quick[:, 5] - slow[:, 5]).abs() <= 1e-5 * slow[:, 6] * 100).logical_or(quick[:, 5].isnan()).all()


@needs_it
def test_what_it_would_misread_it_does_not_take() -> None:
    turned = torch.view_as_complex(torch.randn(8, 2)).conj().imag  # its sign is a mark, not in memory
    assert turned.is_neg()
    for values in (
        turned,
        torch.randn(4, 4).t(),
        torch._efficientzerotensor(3),
        torch.arange(4),
        torch.empty(0),
        torch.randn(4, device="meta"),
        torch.zeros(4, dtype=torch.float8_e4m3fn),
    ):
        assert not compiled().takes(values)
        if not values.is_meta:
            exact = values.to(torch.float64)
            assert figures_of([values])[0, 5] == pytest.approx(float(exact.sum()), abs=1e-6)


@needs_it
@pytest.mark.parametrize("way", ["compiled", "torch"])
def test_what_moved_is_told_and_kept(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        monkeypatch.setattr(reader, "built", lambda: None)
    weights = {"long": torch.randn(70_001), "short": torch.randn(3), "half": torch.ones(500, dtype=torch.bfloat16)}
    weights |= {"turned": torch.randn(30, 40).t(), "still": torch.randn(9000), "zero": torch.zeros(5)}
    moving = Moving()
    for step in range(3):
        moving.keep(weights)
        before = {name: value.clone().double() for name, value in weights.items()}
        for name, value in weights.items():
            if name != "still":
                value.add_(0.5 * (step + 1))
        ratios, rows = moving.moved(weights, figures=True)
        assert rows is not None
        for ratio, row, (name, value) in zip(ratios, rows, weights.items(), strict=True):
            change, size = (value.double() - before[name]).norm(), before[name].norm()
            assert float(ratio) == pytest.approx(float(change / size) if size else 1.0, rel=1e-4), (name, step)
            assert float(row[6]) == pytest.approx(float(value.double().norm()), rel=1e-5)


@needs_it
def test_the_bits_are_those_of_every_processor(tmp_path: Path) -> None:
    """As for a processor without wide registers, and with other optimisation."""
    plain = tmp_path / "plain.so"
    source = (NATIVE / "reader.c").read_text()
    source = source.replace('#include "', f'#include "{NATIVE}/')
    narrow = tmp_path / "reader.c"
    narrow.write_text(source.replace('target_clones("avx512f", "avx2", "default")', "noinline"))
    flags = ["-std=c11", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(["cc", *flags, str(narrow), "-o", str(plain)], check=True)
    other = reader.Reader(plain)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for count in (1, 17, 1024, 33_000, 200_003):
            values = torch.randn(count).to(dtype)
            assert other.read(values, signed=True, zeros=True) == compiled().read(values, signed=True, zeros=True)
            assert other.sketch(values) == compiled().sketch(values)
        matrix = torch.randn(1, 37, 531).to(dtype)
        for x in (matrix, matrix.mT):
            v = torch.randn(x.shape[-1], dtype=torch.float64 if dtype is torch.float64 else torch.float32)
            ours, theirs = v.new_empty(2, 1, x.shape[1]), v.new_empty(2, 1, x.shape[1])
            compiled().products(x, v, *ours)
            other.products(x, v, *theirs)
            assert torch.equal(ours, theirs)
        for x, groups in ((matrix[0], 2), (matrix[0], 4), (matrix[0], 8), (matrix[0].t(), 2), (matrix[0].t(), 4)):
            if dtype in (torch.bfloat16, torch.float32):
                some = torch.randn(x.shape[1], groups)
                ours, theirs = (torch.cat([sums.reshape(-1), squares]) for sums, squares in (
                    _several(one, x, some) for one in (compiled(), other)))  # fmt: skip
                assert torch.equal(ours, theirs)
        ours, theirs = v.new_empty(3, 1, 1, 37), v.new_empty(3, 1, 1, 37)
        compiled().pairs(matrix[None], matrix.flip(-1)[None], ours)
        other.pairs(matrix[None], matrix.flip(-1)[None], theirs)
        assert torch.equal(ours, theirs)


def _several(one: reader.Reader, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    by_rows = x.stride(1) == 1
    sums = torch.empty(x.shape[0], v.shape[1]) if by_rows else torch.empty(v.shape[1], x.shape[0])
    squares = torch.empty(x.shape[0])
    one.many(x, v.t().contiguous() if by_rows else v, sums, squares)
    return sums, squares


@needs_it
@given(st.integers(1, 70), st.integers(1, 150), st.sampled_from([2, 4, 8]), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_products_with_several_vectors(
    rows: int, width: int, groups: int, half: bool, turned: bool, part: bool
) -> None:
    torch.manual_seed(rows * 1000 + width)
    x = torch.randn(rows, width + 5 * part).to(torch.bfloat16 if half else torch.float32)[
        :, 2 * part : width + 2 * part
    ]
    x = x.t() if turned else x
    v = torch.randn(x.shape[1], groups)
    found = several(x, v)
    if found is None:
        assert groups == 8
        assert turned
        return
    wide = x.double()
    size = wide.norm(dim=1, keepdim=True) * v.double().norm(dim=0)
    assert bool(((found[0].double() - wide @ v.double()).abs() <= 1e-6 * x.shape[1] ** 0.5 * size + 1e-12).all())
    assert torch.allclose(found[1].double(), wide.square().sum(1), rtol=1e-5, atol=1e-12)


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (None, b"no library", b""):
        path = tmp_path / "reader.so"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setattr(reader, "LIBRARY", path)
        reader.built.cache_clear()
        assert reader.built() is None
    monkeypatch.undo()
    reader.built.cache_clear()


@needs_it
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_VERSION", -1)
    reader.built.cache_clear()
    assert reader.built() is None
    monkeypatch.undo()
    reader.built.cache_clear()


def test_without_a_compiler_the_package_is_built_and_says_what_it_lacks(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and path.suffix in {".py", ".c", ".h"}:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    env = {**os.environ, "CC": "no-such-compiler"}
    without = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    assert without.returncode == 0, without.stderr
    assert "built without its compiled reader" in without.stdout + without.stderr
    assert [path.name.endswith("-none-any.whl") for path in (copy / "dist").glob("*.whl")] == [True]
    if reader.built() is not None:
        quick = {**os.environ, "CFLAGS": "-O0"}
        with_it = subprocess.run(command, cwd=copy, env=quick, capture_output=True, text=True, check=False)
        assert with_it.returncode == 0, with_it.stderr
        assert len([path for path in (copy / "dist").glob("*.whl") if "linux" in path.name]) == 1


@needs_it
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(1, 70), st.integers(1, 1100), st.integers(0, 3), st.sampled_from(["rows", "columns", "a part", "shared"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_products_and_squares_of_rows_in_one_reading(dtype: torch.dtype, m: int, k: int, batch: int, kind: str) -> None:
    g = torch.Generator().manual_seed(m * k)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    size = (batch, m, k) if batch else (m, k)
    x = torch.randn(size, generator=g).to(dtype)
    if kind == "columns":
        x = torch.randn((*size[:-2], k, m), generator=g).to(dtype).mT
    elif kind == "a part":
        x = torch.randn((*size[:-1], k + 5), generator=g).to(dtype)[..., 3 : 3 + k]
    v = torch.randn((batch, k) if batch and kind != "shared" else (k,), generator=g).to(wide)
    found = products(x, v)
    assert found is not None
    exact = (x.double() * (v.double()[:, None] if v.dim() == 2 else v.double())).sum(-1)
    squares = x.double().square().sum(-1)
    assert torch.allclose(found[1].double(), squares, rtol=1e-5)
    assert (
        (found[0].double() - exact).abs() <= 1e-5 * squares.sqrt() * v.double().norm(dim=-1, keepdim=True) + 1e-30
    ).all()


@needs_it
def test_what_is_not_finite_shows_in_the_row_that_holds_it() -> None:
    for x in (torch.ones(40, 300), torch.ones(300, 40).t()):
        x[7, 250] = float("inf")
        x[9, 0] = float("nan")
        sums, squares = products(x, torch.ones(300)) or ()
        assert sums[7] == float("inf")
        assert sums[9].isnan()
        assert [i for i in range(40) if not squares[i].isfinite()] == [7, 9]


@needs_it
def test_pairs_of_rows_in_any_order_of_heads() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for width in (1, 15, 16, 24, 63, 64, 128, 131, 1023, 1024, 2100):
            x = torch.randn(2, 5, 3, width).to(dtype).transpose(1, 2)
            y = torch.randn(2, 3, 5, width).to(dtype)
            dots, xx, yy = pairs(x, y) or ()
            for found, exact in ((dots, x.double() * y.double()), (xx, x.double().square()), (yy, y.double().square())):
                assert torch.allclose(found.double(), exact.sum(-1), rtol=1e-4, atol=1e-3)


def test_matrices_that_the_reader_does_not_take_are_left_to_torch() -> None:
    v = torch.ones(6)
    odd = [
        torch.ones(4, 6, dtype=torch.int32),
        torch.ones(8, 12)[::2, ::2],
        torch.ones(6),
        torch.ones(4, 6, device="meta"),
    ]
    assert [products(x, v) for x in odd] == [None] * 4
    assert products(torch.ones(4, 6), v.double()) is None
    assert pairs(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4).double()) is None
    assert pairs(torch.ones(1, 2, 4, 3).mT, torch.ones(1, 2, 3, 4)) is None
