"""Convolutions, LSTM layers and batch norms: a wrong channel, step or statistic is found, and a healthy one never suspected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from extent import chosen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from watching import found_in, suspected, watched

CONVOLUTIONS = {
    (1, False): nn.Conv1d, (2, False): nn.Conv2d, (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d, (2, True): nn.ConvTranspose2d, (3, True): nn.ConvTranspose3d,
}  # fmt: skip
SIZES = st.sampled_from([1.0, 1e-3, 30.0])
SEEDS = st.integers(0, 1 << 20)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(layer: nn.Module, x: Tensor, seed: int = 0) -> Callable[[], None]:
    """Return what runs a layer forward and backward on ``x``."""

    def run() -> None:
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        (y.float() * drawn(seed, *y.shape)).sum().backward()

    return run


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), st.integers(1, 3), st.booleans(),
    st.sampled_from([(3, 8, 1), (8, 16, 1), (8, 8, 8), (8, 4, 2), (1, 1, 1)]), st.sampled_from([1, 4, 9]),
    st.sampled_from([(1, 1, 0, 1), (3, 1, 1, 1), (3, 2, 1, 2), (5, 2, 2, 1)]), SIZES, st.sampled_from([0.0, 5.0]), SEEDS,
)  # fmt: skip
@settings(max_examples=chosen(200, 25), deadline=None)
def test_healthy_convolutions_are_never_suspected(
    dtype, dims, transposed, channels, samples, kernel, size, mean, seed
) -> None:
    width, stride, padding, dilation = kernel
    inner, outer, groups = channels
    torch.manual_seed(seed)
    layer = CONVOLUTIONS[dims, transposed](
        inner, outer, width, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bool(seed % 3)
    ).to(dtype)
    x = ((drawn(seed, samples, inner, *[11] * dims) + mean) * size).to(dtype).requires_grad_(seed % 4 != 0)
    assert not suspected(trained(layer, x, seed))


def test_channels_last_images_and_autocast_are_not_suspected() -> None:
    layer, x = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last), drawn(0, 6, 8, 12, 12).requires_grad_()
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            trained(nn.Sequential(layer, nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)), x)()
            trained(nn.LSTM(12, 8), x[:, 0])()

    assert not suspected(run)
    found, checked = watched(trained(layer, last))
    assert not found
    assert checked == {"convolution": 1, "convolution_backward": 1, "sum": 1, "mul": 1} or "convolution" in checked


@given(
    st.sampled_from([1, 2, 40, 200]), st.sampled_from([1, 5]), st.sampled_from([(1, 4), (16, 16), (24, 40)]),
    st.booleans(), st.booleans(), st.sampled_from([1.0, 0.1, 6.0]), st.sampled_from([1.0, 30.0, 0.0]),
    st.sampled_from(["all", "last", "cell"]), SEEDS,
)  # fmt: skip
@settings(max_examples=chosen(200, 20), deadline=None)
def test_healthy_lstm_layers_are_never_suspected(
    steps, sequences, widths, bias, both, weights, size, loss, seed
) -> None:
    torch.manual_seed(seed)
    layer = nn.LSTM(*widths, num_layers=1 + seed % 2, bias=bias, bidirectional=both)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(weights)
    x = (drawn(seed, steps, sequences, widths[0]) * size).requires_grad_()

    def run() -> None:
        y, (_, cell) = layer(x)
        {"all": y.square().sum, "last": y[-1].sum, "cell": (100 * cell).sum}[loss]().backward()

    assert not suspected(run)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), st.sampled_from([1, 2, 16]),
    st.sampled_from([(3, 3), (9, 9), (40,), (4, 4, 4)]), st.booleans(), st.booleans(), st.booleans(), SIZES,
    st.sampled_from([0.0, 5.0, 1000.0]), SEEDS,
)  # fmt: skip
@settings(max_examples=chosen(200, 25), deadline=None)
def test_healthy_batch_norms_are_never_suspected(
    dtype, samples, places, affine, mixed, training, size, mean, seed
) -> None:
    kind = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(places) - 1]
    layer = kind(5, affine=affine)
    if affine:
        nn.init.normal_(layer.weight, std=3.0), nn.init.normal_(layer.bias)
    x = ((drawn(seed, samples, 5, *places) * (seed % 4 != 0) + mean) * size).to(dtype)
    layer = layer if mixed and dtype != torch.float64 else layer.to(dtype)
    layer(x)
    assert not suspected(trained(layer.train(training), x.requires_grad_(), seed))


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), st.sampled_from([1, 2, 16]),
    st.sampled_from([(1, 1), (1, 6), (4, 1), (4, 3), (8, 2)]), st.sampled_from([(9, 9), (40,), (4, 4, 4)]), st.booleans(),
    st.booleans(), SIZES, st.sampled_from([0.0, 5.0, 1000.0]), SEEDS,
)  # fmt: skip
@settings(max_examples=chosen(200, 25), deadline=None)
def test_healthy_group_norms_are_never_suspected(
    dtype, samples, groups, places, affine, mixed, size, mean, seed
) -> None:
    layer = nn.GroupNorm(groups[0], groups[0] * groups[1], affine=affine)
    if affine:
        nn.init.normal_(layer.weight, std=3.0), nn.init.normal_(layer.bias)
    x = ((drawn(seed, samples, groups[0] * groups[1], *places) * (seed % 4 != 0) + mean) * size).to(dtype)
    layer = layer if mixed and dtype != torch.float64 else layer.to(dtype)
    assert not suspected(trained(layer, x.requires_grad_(), seed))


def test_a_channels_last_image_s_gradients_are_rounded_to_its_dtype_first() -> None:
    """torch's kernel adds the gradients of bfloat16 images up, and rounds them to bfloat16, though the weights are float32."""
    for seed in range(40):
        x = drawn(seed, 2, 12, 9, 9).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
        assert not suspected(trained(nn.BatchNorm2d(12), x, seed))


def _convolution() -> None:
    torch.manual_seed(1)
    trained(nn.Conv2d(8, 16, 3, padding=1), drawn(2, 6, 8, 12, 12).requires_grad_())()


def _batch_norm() -> None:
    trained(nn.BatchNorm2d(6), drawn(2, 5, 6, 7, 7).requires_grad_())()


def _group_norm() -> None:
    trained(nn.GroupNorm(3, 6), drawn(2, 5, 6, 7, 7).requires_grad_())()


def _lstm() -> None:
    torch.manual_seed(1)
    trained(nn.LSTM(24, 32), drawn(2, 20, 3, 24).requires_grad_())()


LAYERS = [
    *[(_convolution, "convolution", 0), *((_convolution, "convolution_backward", slot) for slot in range(3))],
    *((_batch_norm, "native_batch_norm", slot) for slot in range(3)),
    *((_batch_norm, "native_batch_norm_backward", slot) for slot in range(3)),
    *((_group_norm, "native_group_norm", slot) for slot in range(3)),
    *((_group_norm, "native_group_norm_backward", slot) for slot in range(3)),
    *((_lstm, "mkldnn_rnn_layer", slot) for slot in range(3)),
    *((_lstm, "mkldnn_rnn_layer_backward", slot) for slot in range(7)),
]


@pytest.mark.parametrize(("run", "op", "slot"), LAYERS, ids=[f"{op}.out{slot}" for _, op, slot in LAYERS])
@pytest.mark.parametrize("factor", [-3.0, 64.0, float("nan")])
def test_a_wrong_element_of_any_result_is_found(run, op, slot, factor) -> None:
    def spoil(out: Tensor) -> None:
        flat = out.view(-1)
        flat[int(flat.abs().argmax())] *= factor

    assert "computed a wrong result" in found_in(run, op, slot, spoil).message


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 12, 3, groups=2), nn.ConvTranspose2d(8, 12, 3, groups=2, stride=2)])
@pytest.mark.parametrize(("op", "slot"), [("convolution", 0), ("convolution_backward", 0), ("convolution_backward", 1)])
def test_convolutions_of_one_sample_are_checked_by_channel(layer, op, slot) -> None:
    run = trained(layer, drawn(0, 1, 8, 9, 9).requires_grad_())
    assert not suspected(run)
    found_in(run, op, slot, lambda out: out.view(-1)[7:9].mul_(-30))


@pytest.mark.parametrize("x", [drawn(1, 64, 5), drawn(1, 8, 5, 6, 6).to(memory_format=torch.channels_last)])
def test_batch_norms_of_vectors_and_of_channels_last_images_are_checked(x) -> None:
    run = trained(nn.BatchNorm1d(5) if x.dim() == 2 else nn.BatchNorm2d(5), x.requires_grad_())
    assert not suspected(run)
    for op in ("native_batch_norm", "native_batch_norm_backward"):
        found_in(run, op, 0, lambda out: out[3:5].mul_(-3))


def test_lstm_layers_that_start_from_a_state_and_run_backwards_are_checked() -> None:
    layer, x = nn.LSTM(6, 8, batch_first=True, bidirectional=True), drawn(0, 3, 5, 6)
    state = tuple(drawn(1, 2, 3, 8).requires_grad_() for _ in range(2))

    def run() -> None:
        y, (h, c) = layer(x, state)
        (y.sum() + h.square().sum() + c.sum()).backward()

    found, checked = watched(run)
    assert not found
    assert (checked["mkldnn_rnn_layer"], checked["mkldnn_rnn_layer_backward"]) == (2, 2)


def test_every_layer_of_a_deep_lstm_is_checked() -> None:
    found, checked = watched(trained(nn.LSTM(6, 8, num_layers=3, dropout=0.2), drawn(0, 3, 5, 6).requires_grad_()))
    assert not found
    assert (checked["mkldnn_rnn_layer"], checked["mkldnn_rnn_layer_backward"]) == (3, 3)
