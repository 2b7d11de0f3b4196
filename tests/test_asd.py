"""Taps on gradients: norm layers and embeddings unasked, `watch_gradient` and the seed's operator."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwitness.ascend import ASDBase, watch_gradient
from bitwitness.capture.light import LightStep
from bitwitness.capture.norms import NormTap, first_weight
from bitwitness.config import FeatureConfig
from bitwitness.sense.feature import FeatureSensor
from bitwitness.tap.collector import GradientCollector, collecting
from bitwitness.tap.ownwork import replaying


class RootNorm(nn.Module):
    """A norm of the kind that users write: its input is used twice."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), RootNorm(size)
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.up(self.norm1(x))
        return x + self.down(F.gelu(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, size)
        self.blocks = nn.ModuleList([Block(size), Block(size)])
        self.head = nn.Linear(size, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(F.layer_norm(x, x.shape[-1:]))


def model_and_tokens() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.arange(22).reshape(2, 11) % 11


def train(model: nn.Module, tokens: torch.Tensor, steps: int = 5) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def hooks_of(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


# -- norm layers and embeddings


def test_every_norm_layer_and_the_embedding_is_tapped_with_the_gradient_that_reached_it():
    model, tokens = model_and_tokens()
    seen: dict[str, torch.Tensor] = {}

    def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].register_hook(lambda g: seen.__setitem__(str(id(module)), g))

    handles = [m.register_forward_pre_hook(keep) for b in model.blocks for m in (b.norm1, b.norm2)]
    with NormTap(model) as tap:
        model(tokens).square().mean().backward()
        sites, values = tap.drain()
        assert tap.unseen == []
    for handle in handles:
        handle.remove()
    found = dict(zip([site.short for site in sites], values.tolist(), strict=True))
    assert sorted(found) == [
        "./layer_norm#0:backward.grad_in0",
        "blocks.0.norm1/norm#0:backward.grad_in0",
        "blocks.0.norm2/norm#0:backward.grad_in0",
        "blocks.1.norm1/norm#0:backward.grad_in0",
        "blocks.1.norm2/norm#0:backward.grad_in0",
        "embed/weight#0:grad.local",
    ]
    assert found["embed/weight#0:grad.local"] == pytest.approx(float(model.embed.weight.grad.norm()))
    for i, block in enumerate(model.blocks):
        for name, module in (("norm1", block.norm1), ("norm2", block.norm2)):
            expected = float(seen[str(id(module))].norm())
            assert found[f"blocks.{i}.{name}/norm#0:backward.grad_in0"] == pytest.approx(expected)


def test_a_tapped_training_has_the_bits_of_an_untapped_one():
    model, tokens = model_and_tokens()
    twin = copy.deepcopy(model)
    before = torch.get_rng_state()
    with NormTap(twin) as tap:
        tapped = train(twin, tokens)
        assert len(tap.drain()[0]) == 5 * 6
    plain = train(model, tokens)
    assert all(torch.equal(a, b) for a, b in zip(plain, tapped, strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_llama_is_covered_without_a_word_from_the_user_and_keeps_its_bits():
    from transformers import LlamaConfig, LlamaForCausalLM  # here: each of pytest's workers imports each file

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    twin, tokens = copy.deepcopy(model), torch.arange(24).reshape(2, 12)
    with NormTap(twin) as tap:
        tapped = train(twin, tokens, 2)
        modules = {site.module for site in tap.drain()[0]}
    assert modules == {"model.embed_tokens", "model.norm"} | {
        f"model.layers.{i}.{name}" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm")
    }
    assert all(torch.equal(a, b) for a, b in zip(train(model, tokens, 2), tapped, strict=True))


def test_nothing_is_left_behind():
    model, tokens = model_and_tokens()
    functions = F.layer_norm, F.rms_norm
    with NormTap(model) as tap:
        output = model(tokens)
        assert hooks_of(model) > 0
        copied = copy.deepcopy(model)
    assert hooks_of(model) == 0
    assert (F.layer_norm, F.rms_norm) == functions
    output.sum().backward()  # a graph made under the tap
    copied(tokens).sum().backward()
    assert tap.drain()[0] == ()


def test_a_foreign_patch_on_top_of_ours_stays_and_works():
    model, tokens = model_and_tokens()
    original = F.layer_norm
    try:
        with NormTap(model):
            ours = F.layer_norm
            theirs = functools.partial(ours)
            F.layer_norm = theirs
        assert F.layer_norm is theirs
        model(tokens).sum().backward()
    finally:
        F.layer_norm = original


def test_what_only_looks_like_a_norm_is_left_alone():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))
    with NormTap(model) as tap:
        model(torch.randn(3, 4)).square().sum().backward()
        assert {site.module for site in tap.drain()[0]} == {"1", "2"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 1, 2, 1, 2, 1, 2, 3)])
def test_every_dtype_of_the_reference_and_any_rank_is_read(dtype, shape):
    x = torch.full(shape, 2.0, dtype=dtype).requires_grad_()
    y = x * 1
    with collecting(GradientCollector()) as collector:
        watch_gradient(y, "y").sum().backward()
        _, values = collector.drain()
    assert values.dtype is torch.float32
    assert values.item() == pytest.approx(x.numel() ** 0.5, rel=1e-6)


def test_what_cannot_be_read_is_named_with_its_reason():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.LayerNorm(4)).double()
    mixed = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    with NormTap(model) as tap, NormTap(mixed) as other:
        model(torch.tensor([1])).sum().backward()
        mixed(torch.tensor([1])).sum().backward()
        assert "torch.float64" in tap.uncovered["1/norm#0:backward.grad_in0"]
        assert "torch.float64" in tap.uncovered["0/weight#0:grad.local"]
        assert "sparse" in other.uncovered["0/weight#0:grad.local"]


def test_a_norm_that_never_ran_is_named():
    model = nn.ModuleDict({"used": nn.LayerNorm(4), "idle": nn.LayerNorm(4)})
    with NormTap(model) as tap:
        model["used"](torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert tap.unseen == ["idle"]


def test_micro_batches_give_a_value_each_and_a_replay_none():
    model, tokens = model_and_tokens()
    with NormTap(model) as tap:
        for _ in range(3):
            model(tokens).sum().backward()
        with replaying():
            model(tokens).sum().backward()
        sites, values = tap.drain()
    assert len(values) == 18
    assert [site.module for site in sites].count("embed") == 3


def test_without_gradients_nothing_is_hooked():
    model, tokens = model_and_tokens()
    with NormTap(model) as tap, torch.no_grad():
        model(tokens)
        assert tap.drain()[0] == ()


def test_the_first_weight_is_found_through_wrappers():
    model, _ = model_and_tokens()
    assert first_weight(nn.DataParallel(model)) == "embed.weight"
    model.embed.weight.requires_grad = False
    assert first_weight(model) == "blocks.0.norm1.weight"
    assert first_weight(nn.ReLU()) is None


# -- at places of one's own choice


def test_watching_is_harmless_without_a_guard():
    x = torch.ones(3, requires_grad=True)
    assert watch_gradient(x, "x") is x
    assert not x._backward_hooks
    assert watch_gradient("no tensor", "x") == "no tensor"  # type: ignore[arg-type]


def test_watching_returns_the_tensor_itself_and_takes_its_whole_gradient():
    weight = torch.ones(4, requires_grad=True)
    with collecting(GradientCollector()) as collector:
        for _ in range(2):  # a leaf is hooked once, however often the line runs
            assert watch_gradient(weight, "a/b#1") is weight
        (weight * 2 + weight).sum().backward()
        sites, values = collector.drain()
        assert [site.module for site in sites] == ["a.b.1"]
        assert values.tolist() == [6.0]
    assert not weight._backward_hooks


def test_another_thread_is_not_watched():
    seen = []
    with collecting(GradientCollector()):
        thread = threading.Thread(target=lambda: seen.append(ASDBase(F.relu).enable_check))
        thread.start()
        thread.join()
        assert ASDBase(F.relu).enable_check
    assert seen == [False]
    assert not ASDBase(F.relu).enable_check


def test_guards_may_nest():
    with collecting(GradientCollector()) as outer:
        with collecting(GradientCollector()) as inner:
            watch_gradient(torch.ones(1, requires_grad=True) * 1, "in").backward()
            assert len(inner.drain()[0]) == 1
        watch_gradient(torch.ones(1, requires_grad=True) * 1, "out").backward()
        assert len(outer.drain()[0]) == 1


class GatherASD(ASDBase):
    """The seed's custom operator, with torch's embedding lookup in the place of ``P.Gather``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(F.embedding, *args, **kwargs)
        self.pre_val, self.min_val, self.max_val, self.cnt = self.generate_params()

    def __call__(self, input_params: torch.Tensor, input_indices: torch.Tensor) -> torch.Tensor:
        if self.enable_check:
            input_params = self.check_op(input_params, self.pre_val, self.min_val, self.max_val, self.cnt, None)
            self.cnt += 1
        return self.op(input_indices, input_params)


class LlamaEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.randn(11, 4))
        self.gather = GatherASD()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.gather(self.embedding_weight, input_ids)


def run_seed(scales: list[float]) -> tuple[list[tuple[int, str]], LlamaEmbedding]:
    """Train with the loss scaled by ``scales``; return (step, tap) of all findings."""
    torch.manual_seed(0)
    model, ids = LlamaEmbedding(), torch.arange(11)
    sensor = FeatureSensor(FeatureConfig(schemes=("v1",)), ["embedding_weight"])
    found = []
    with collecting(GradientCollector()) as collector:
        for number, scale in enumerate(scales):
            (model(ids).square().sum() * scale).backward()
            sites, values = collector.drain()
            norms = values.double().numpy()
            light = LightStep(number, 0, ("embedding_weight",), norms, norms)
            found += [(f.step, f.evidence["name"]) for f in sensor.look(light, sites, norms)]
    return found, model


def test_the_seed_operator_finds_an_exploding_gradient():
    found, model = run_seed([1.0, 1.001] * 5 + [1e6])
    assert [number for number, _ in found] == [10]
    assert found[0][1].startswith("GatherASD")
    assert int(model.gather.cnt) == 11


def test_the_seed_operator_is_silent_on_a_normal_training():
    assert run_seed([1.0, 1.01, 0.99, 1.02] * 10)[0] == []


def test_two_layers_of_the_seed_operator_have_histories_of_their_own():
    first, second = GatherASD(), GatherASD()
    weight, ids = torch.ones(3, 2, requires_grad=True), torch.arange(3)
    with collecting(GradientCollector()) as collector:
        (first(weight, ids).sum() + second(weight, ids).sum()).backward()
        assert len({site.module for site in collector.drain()[0]}) == 2


def test_an_operator_given_as_a_class_is_built_and_its_attributes_are_reachable():
    operator = ASDBase(nn.Linear, 3, 2)
    assert operator.op(torch.ones(1, 3)).shape == (1, 2)
    assert operator.in_features == 3
    assert "Linear" in repr(operator)
    assert copy.deepcopy(operator).out_features == 2
    scaled = ASDBase(torch.add, torch.ones(2))
    assert scaled.op(torch.ones(2)).tolist() == [2.0, 2.0]


def test_reentrant_checkpointing_is_seen_once():
    model, tokens = model_and_tokens()
    block = model.blocks[0]
    x = model.embed(tokens)
    with NormTap(block) as tap:
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True).sum().backward()
        names = [site.module for site in tap.drain()[0]]
    assert sorted(names) == ["norm1", "norm2"]


def test_a_compiled_region_keeps_working_and_is_named_as_unseen():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with NormTap(model) as tap:
        compiled = torch.compile(model, backend="aot_eager")
        compiled(torch.randn(2, 4)).sum().backward()
        assert tap.unseen == ["1"]
        assert tap.drain()[0] == ()
