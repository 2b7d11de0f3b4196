"""Which module a script trains: one root for one training, whatever ran before it was put together."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest
import torch
from extent import chosen
from ranks import forked
from torch import nn

import bitwitness as bw
from bitwitness.capture.losstape import LossTape
from bitwitness.config import load_config
from bitwitness.guard.auto import AutoGuard
from bitwitness.session import roots
from bitwitness.session.roots import Blocks

JOBS = Path(__file__).parent / "jobs"


def auto(out: Path | None = None) -> AutoGuard:
    return AutoGuard(load_config(None, {"self_test": False, **({"out": str(out)} if out else {})}).config)


class Net(nn.Module):
    """Blocks that are walked by a method or by ``forward``."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))

    def encode(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x):
        return self.encode(x)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.inner(x))


def steps(call, parameters, count: int = 4, **how) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1, **how)
    for _ in range(count):
        call(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def models(found: AutoGuard) -> list[nn.Module]:
    return [guard.model for guard in found.entered]


class Sliced(nn.Module):
    """Runs slices of its layers, which are new modules each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        return self.layers[2:](self.layers[:2](x))


def test_modules_that_a_model_makes_of_its_own_parts_are_no_other_models() -> None:
    net = Sliced()
    with auto() as found:
        steps(net, net.parameters())
        assert models(found) == [net]
        assert found.entered[0].session.clock.ended == 4


def test_a_model_whose_methods_are_called_is_one_root() -> None:
    for call in ("encode", "forward", "__call__"):
        net = Net()
        with auto() as found:
            steps(getattr(net, call), net.parameters())
            assert models(found) == [net], call
        held = found.entered[0].watch
        assert held is not None
        assert len(held.reader.root.parameters) == 12


def test_the_part_that_is_called_is_the_root_where_it_holds_all_that_is_trained() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def training_step(self, x):
            return self.net(x)

    module = Module()
    with auto() as found:
        steps(module.training_step, module.parameters())
        assert models(found) == [module.net]
    assert found.entered[0].coverage()["steps"]["training_forwards"] == 4


def test_blocks_without_a_module_around_are_guarded_together_by_their_optimizer(tmp_path: Path) -> None:
    blocks = [nn.Linear(4, 4) for _ in range(9)]

    def walk(x):
        for block in blocks:
            x = block(x)
        return x

    with auto(tmp_path / "run") as found:
        steps(walk, [p for block in blocks for p in block.parameters()])
        (owner,) = models(found)
        assert isinstance(owner, Blocks)
        assert list(owner) == blocks
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]


def test_an_ensemble_with_an_optimizer_each_is_guarded_one_by_one() -> None:
    nets = [nn.Linear(4, 1) for _ in range(6)]
    with auto() as found:
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for _ in range(4):
            for net in nets:
                net(torch.ones(2, 4)).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert models(found) == nets
    assert all(guard.coverage()["steps"]["held"] >= 2 for guard in found.entered)


def test_two_models_of_one_training_keep_a_guard_each() -> None:
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    with auto() as found:
        steps(lambda x: judge(maker(x)), [*maker.parameters(), *judge.parameters()])
        assert models(found) == [maker, judge]


def test_a_generator_that_is_frozen_while_its_discriminator_trains_is_guarded_when_its_turn_comes(capsys) -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
    with auto() as found:
        for turn in (1, 0, 1, 0):
            for net in (generator, critic):
                net.requires_grad_(net is (generator, critic)[turn])
            critic(generator(torch.ones(2, 4))).mean().backward()
            optimizers[turn].step()
            optimizers[turn].zero_grad()
        assert models(found) == [critic, generator]
    said = capsys.readouterr().err
    assert "unguarded" not in said
    assert "bitwitness [rank 0] healthy: 4 of 4 parameters, 2 steps" in said
    assert "bitwitness [rank 0, Sequential, model 2] healthy: 2 of 2 parameters, 1 steps" in said


def test_copies_that_are_trained_for_a_few_steps_are_let_go_with_their_optimizers() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    most = 0
    with auto() as found:
        for _ in range(12):
            inner = copy.deepcopy(net)
            steps(inner, inner.parameters(), 3)
            most = max(most, len(found.entered))
    assert 1 <= most <= 2


def test_what_is_let_go_before_its_first_step_gives_its_folder_to_the_next(tmp_path: Path) -> None:
    """A parametrization is called, and guarded, as it is put on; and let go when the model that holds it is called."""
    torch.manual_seed(0)
    out = tmp_path / "run"
    with auto(out) as found:
        maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        critic = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 8)), nn.ReLU(), nn.Linear(8, 1))
        first, second = (torch.optim.Adam(net.parameters(), 0.01) for net in (maker, critic))
        for _ in range(3):
            made = maker(torch.randn(6, 4))
            second.zero_grad()
            (critic(torch.randn(6, 2)).mean() - critic(made).mean()).backward(retain_graph=True)
            second.step()
            first.zero_grad()
            critic(made).mean().backward()
            first.step()
        assert {guard.folder for guard in found.entered} == {str(out), f"{out}-2"}


def test_a_layer_that_is_put_in_later_is_watched(capsys) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with auto():
        for number in range(8):
            if number == 3:
                net.insert(2, nn.Linear(8, 8))
                optimizer.add_param_group({"params": net[2].parameters()})
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    said = capsys.readouterr().err
    assert "bitwitness [rank 0] healthy: 4 of 6 parameters, 4 steps" in said
    assert "model 2] healthy: 6 of 6 parameters, 4 steps" in said


def test_tapes_of_several_models_do_not_hear_one_anothers_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = 0
    called = LossTape.called

    def counted(*given):
        nonlocal heard
        heard += 1
        return called(*given)

    monkeypatch.setattr(LossTape, "called", counted)
    counts = []
    for number in (2, 4, 8):
        heard = 0
        nets = [nn.Linear(4, 1) for _ in range(number)]
        with contextlib.ExitStack() as guards:
            for net in nets:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                guards.enter_context(bw.Guard(net, optimizer, self_test=False))
            sum(net(torch.ones(2, 4)).square().mean().exp() for net in nets).backward()
        counts.append(heard / number)
    assert counts[2] <= 5 * counts[0], counts  # each of the calls is heard by each of the tapes, and no more


def test_a_module_that_runs_only_inside_a_backward_is_named_by_its_parameters(capsys) -> None:
    """As the adjoint method of ordinary differential equations does."""
    field = nn.Linear(4, 4)

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, *_parameters):
            ctx.save_for_backward(y)
            return field(y)

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            with torch.enable_grad():
                out = field(y.detach())
            return None, *torch.autograd.grad(out, list(field.parameters()), grad)

    with auto() as found:
        steps(lambda x: Adjoint.apply(x, *field.parameters()), field.parameters())
        assert found.entered == []
    assert "trained unguarded: 2 parameters that SGD steps: Linear.weight; Linear.bias" in capsys.readouterr().err


def test_parameters_that_no_module_holds_are_named(capsys: pytest.CaptureFixture) -> None:
    weight, net = nn.Parameter(torch.ones(4, 3)), nn.Linear(4, 4)
    with auto() as found:
        steps(lambda x: net(x) @ weight, [weight, *net.parameters()])
    assert models(found) == [net]
    line = "trained unguarded: 1 parameter that SGD steps: (4, 3) in no module that was called"
    assert capsys.readouterr().err.count(line) == 1
    with auto():
        steps(lambda x: x @ weight, [weight])
    told = capsys.readouterr().err
    assert line in told
    assert "no model was trained" not in told


def test_a_model_that_is_put_into_another_after_a_dry_run_is_guarded_with_it(tmp_path: Path, capsys) -> None:
    inner = Net()
    with auto(tmp_path / "run") as found:
        inner(torch.ones(2, 4))
        assert models(found) == [inner]
        net = Wrapper(inner)
        steps(net, net.parameters())
        assert models(found) == [net]
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]
    told = capsys.readouterr().err
    assert "14 of 14 parameters, 4 steps" in told
    assert told.count("parameters, ") == 1


def test_a_dry_run_in_a_constructor_finds_no_half_made_model() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 6)
            self.head = nn.Linear(self.body(torch.zeros(1, 4)).shape[1], 2)

        def forward(self, x):
            return self.head(self.body(x))

    with auto() as found:
        net = Sized()
        assert models(found) == []
        steps(net, net.parameters())
        assert models(found) == [net]
    assert found.entered[0].coverage()["steps"]["held"] == 4


def test_lazy_layers_are_guarded_once_they_are_made() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(5), nn.LazyLinear(1))
    with auto() as found:
        net(torch.ones(2, 4))
        assert models(found) == []
        steps(net, net.parameters())
        assert models(found) == [net]
    assert found.entered[0].coverage()["steps"]["held"] == 4


def rebuilt_by_layer(net):
    net[1] = nn.GroupNorm(2, 4)
    return net


def rebuilt_by_assignment(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    return net


def rebuilt_by_adapter(net):
    net[2] = Wrapper(net[2].requires_grad_(False))
    return net


def compiled(net):
    return torch.compile(net, backend="eager")


def compiled_in_place(net):
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    "change", [rebuilt_by_layer, rebuilt_by_assignment, rebuilt_by_adapter, compiled, compiled_in_place]
)
def test_a_model_that_is_rebuilt_after_a_dry_run_is_guarded_as_it_is_then(change, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    with auto(tmp_path / "run") as found:
        net(torch.ones(2, 4)).sum().backward()
        net.zero_grad()
        changed = change(net)
        steps(changed, [p for p in changed.parameters() if p.requires_grad])
        assert models(found) == [changed]
    (guard,) = found.entered
    assert guard.watch is not None
    now = {id(p) for p in net.parameters() if p.requires_grad}
    assert {id(p) for p in guard.watch.reader.root.parameters.values()} == now
    # What is compiled in place is found inside its first call, which goes by.
    assert guard.coverage()["steps"]["held"] >= (3 if change is compiled_in_place else 4)
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]


def test_steps_before_a_model_is_wrapped_are_reported_and_those_after_it_too(tmp_path: Path, capsys) -> None:
    inner = Net()
    with auto(tmp_path / "run") as found:
        steps(inner, inner.parameters(), count=3)
        net = Wrapper(inner)
        steps(net, net.parameters(), count=5)
        assert models(found) == [net]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["run", "run-2"]
    told = capsys.readouterr().err
    assert "12 of 12 parameters, 3 steps" in told
    assert "14 of 14 parameters, 5 steps" in told


def test_a_trained_model_whose_parameters_are_replaced_is_guarded_anew(tmp_path: Path) -> None:
    net = Net()
    with auto(tmp_path / "run") as found:
        steps(net, net.parameters(), count=3)
        rebuilt_by_assignment(net)
        steps(net, net.parameters(), count=4)
        (guard,) = found.entered
    assert guard.model is net
    assert guard.watch is not None
    assert {id(p) for p in guard.watch.reader.root.parameters.values()} == {id(p) for p in net.parameters()}
    assert guard.coverage()["steps"]["held"] == 3  # the new optimizer's first step shows it
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_that_the_script_guards_itself_is_left_to_it(capsys: pytest.CaptureFixture) -> None:
    net = Net()
    with auto() as found, bw.Guard(net):
        steps(net, net.parameters())
    assert models(found) == []
    told = capsys.readouterr().err
    assert "unguarded" not in told
    assert "no model was trained" not in told


def test_a_new_model_in_the_place_of_an_old_one_is_found() -> None:
    with auto() as found:
        for _ in range(4):
            net = nn.Linear(4, 1)
            steps(net, net.parameters(), count=2)
            assert models(found)[-1] is net
            del net


def test_a_failing_search_leaves_the_training_alone(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(_module):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("bitwitness.guard.auto.root_of", broken)
    net = Net()
    with auto():
        steps(net, net.parameters())
    told = capsys.readouterr().err
    assert told.count("no such luck") == 1
    assert "the training is untouched" in told


def test_the_search_walks_the_stack_once_for_each_root(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    original = roots.root_of
    monkeypatch.setattr("bitwitness.guard.auto.root_of", lambda module: asked.append(module) or original(module))
    net = Net(blocks=20)
    with auto():
        steps(net.encode, net.parameters(), count=6)
    assert len(asked) == 1


def test_nothing_stays_hooked_or_patched() -> None:
    from multiprocessing.process import BaseProcess

    from torch.nn.modules import module as nn_module

    before = BaseProcess.start, len(nn_module._global_forward_pre_hooks)
    with auto():
        net = Net()
        steps(net, net.parameters())
    assert (BaseProcess.start, len(nn_module._global_forward_pre_hooks)) == before
    assert not nn_module._global_module_registration_hooks


@pytest.mark.ranks
def test_the_wrapper_is_guarded_whatever_ran_before_it_was_made(tmp_path: Path) -> None:
    launched = forked(2, [str(JOBS / "wrapping.py"), str(tmp_path)], tmp_path / "logs")
    text = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, text[-4000:]
    told = [json.loads(line) for line in text.splitlines() if line.startswith('{"job"')]
    assert len(told) == 2 * 9, text[-3000:]
    for row in told:
        assert row["same"], row
        assert row["guarded"] == row["expected"], row
        assert row["alone"] is False, row
        if row["job"] != "trains before":
            assert row["folders"] in (["run"], []), row
    assert "no model was trained" not in text
    assert "failed in its" not in text


@pytest.mark.ranks
@pytest.mark.parametrize("trainer", ["lightning_methods", "transformers", "accelerate", *chosen(["lightning"], [])])
def test_trainers_are_guarded_at_their_wrapper(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip(trainer.partition("_")[0])
    launched = forked(2, [str(JOBS / "trainers.py"), trainer, str(tmp_path)], tmp_path / "logs")
    text = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, text[-4000:]
    told = [json.loads(line) for line in text.splitlines() if line.startswith('{"trainer"')]
    assert len(told) == 2, text[-3000:]
    for row in told:
        assert row["guarded"] == ["DistributedDataParallel"], row
        assert row["ranks"] == [2], row
        assert row["same"], row


def test_who_guards_a_model_that_is_wrapped_later_knows_it(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from bitwitness.ranks.process_groups import wrapped_later

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        net, other = Wrapper(Net()), nn.Linear(4, 1)
        with bw.Guard(net, self_test=False):
            assert not wrapped_later(net)
            part = DistributedDataParallel(net.inner)
            assert wrapped_later(net)
            assert wrapped_later(net.inner.blocks)
            assert not wrapped_later(net.head)
            assert not wrapped_later(other)
            assert not wrapped_later(part)
            whole = DistributedDataParallel(other)
            assert wrapped_later(other)
            assert not wrapped_later(whole)
    finally:
        dist.destroy_process_group()


def test_parameters_lent_by_functional_call_are_not_taken_for_the_models() -> None:
    net = Net()

    def call(x):
        slow = dict(net.named_parameters())
        inner = torch.func.functional_call(net, slow, (x,)).square().mean()
        grads = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), grads, strict=True)}
        return torch.func.functional_call(net, fast, (x,))

    with auto() as found:
        steps(call, net.parameters())
        (guard,) = found.entered
    assert guard.watch is None or [id(p) for p in guard.watch.reader.root.parameters.values()] == list(
        map(id, net.parameters())
    )
    assert guard.coverage()["steps"]["held"] == 4
