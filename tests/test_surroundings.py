"""A forward that found something else than a repeated one would: the training's bits stay, and nobody is accused."""

from __future__ import annotations

import contextlib
import csv
import io
import queue
import sys
from pathlib import Path

import pytest
import torch

import bitwitness as bw
from bitwitness.capture.heldstate import HeldState
from bitwitness.testing import EVERY_STEP

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

import switches

ALWAYS = EVERY_STEP
WAYS = {
    "scoped": switches.SCOPED,
    "consumed": switches.CONSUMED,
    "counted": switches.COUNTED,
    "overwritten": switches.OVERWRITTEN,
}
NEVER_REPEATED = {("counted", "generator"), ("counted", "zip")}
NAMED = {
    ("scoped", "attribute"): "the forward found Net.scale otherwise than a re-execution does",
    ("scoped", "attribute_object"): "the forward found Net.config.scale otherwise",
    ("scoped", "module_class"): "the forward found Flags.scale otherwise",
    ("scoped", "patched_torch"): "the forward found torch.nn.functional.gelu otherwise",
    ("scoped", "hook"): "the forward found a's hooks otherwise",
    ("scoped", "dispatch_mode"): "the script's _Dispatch was on in the forward or is on now",
    ("consumed", "module_dict"): "the forward found elsewhere.settings.scale otherwise",
    ("counted", "generator"): "(generator) does not tell whether it moves in the forward, and cannot be put back",
    ("counted", "cached_draw"): "a re-execution draws other random numbers than the forward did",
    ("overwritten", "plain_rebound"): "the forward found Net.plain otherwise",
}


@pytest.mark.parametrize(("way", "kind"), [(way, kind) for way, kinds in WAYS.items() for kind in kinds])
def test_nobody_is_accused_and_nothing_changes(way, kind, capsys) -> None:
    plain = switches.train(way, kind)
    guards = []

    @contextlib.contextmanager
    def guarded(net, optimizer):
        with bw.Guard(net, optimizer, act="protect", **ALWAYS) as guard:
            guards.append(guard)
            yield

    found = switches.train(way, kind, guarded)
    (guard,) = guards
    said = capsys.readouterr().err
    assert "VERDICT" not in said
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    repeated = 0 if (way, kind) in NEVER_REPEATED else 3 if kind == "cached_draw" else switches.FIRST - 2
    assert guard.coverage()["dismissed"] >= repeated, said  # the steps before the switch are repeated
    assert NAMED.get((way, kind), "") in said


def test_what_a_forward_prints_and_logs_comes_once(capsys, caplog) -> None:
    import logging

    class Talking(switches.Net):
        def forward(self, x):
            print("forward")
            logging.getLogger("talking").warning("forward")
            return super().forward(x)

    torch.manual_seed(0)
    net = Talking("")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with bw.Guard(net, optimizer, **ALWAYS) as guard:
        for _ in range(5):
            net(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.coverage()["dismissed"] >= 3
    assert capsys.readouterr().out.count("forward") == 5
    assert [record.message for record in caplog.records].count("forward") == 5


class Writing(switches.Net):
    """Writes a line for each of its forwards, as people do who watch an activation."""

    def __init__(self, file, how: str) -> None:
        super().__init__("none")
        self.out = {"csv": csv.writer, "appended": lambda open_one: Path(open_one.name)}.get(how, lambda it: it)(file)

    def forward(self, x):
        result = super().forward(x)
        line = [f"{float(result.detach().sum()):.6f}"]
        if isinstance(self.out, Path):
            with self.out.open("a") as file:
                file.write(line[0] + "\n")
            return result
        self.out.writerow(line) if hasattr(self.out, "writerow") else self.out.write(line[0] + "\n")
        return result


@pytest.mark.parametrize("how", ["csv", "text", "memory", "appended"])
def test_a_file_that_a_forward_writes_to_holds_each_line_once(how, tmp_path, capsys) -> None:
    def train(guarded) -> str:
        torch.manual_seed(0)
        with io.StringIO() if how == "memory" else (tmp_path / "log").open("w+") as file:
            net = Writing(file, how)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with guarded(net, optimizer):
                for _ in range(6):
                    net(torch.randn(4, 8)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            file.seek(0)
            return file.read()

    plain = train(lambda *_: contextlib.nullcontext())
    assert train(lambda *given: bw.Guard(*given, act="protect", **ALWAYS)) == plain
    said = capsys.readouterr().err
    assert "VERDICT" not in said
    assert ("changes in the forward, and cannot be put back" in said) == (how in ("csv", "text"))


@pytest.mark.timeout(60)
def test_a_forward_that_takes_its_batch_from_a_queue_gets_each_once(capsys) -> None:
    class Fed(switches.Net):
        def __init__(self) -> None:
            super().__init__("none")
            self.feed = queue.Queue()

        def forward(self):
            return super().forward(self.feed.get())

    net = Fed()
    for number in range(8):
        net.feed.put(torch.full((4, 8), float(number)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Guard(net, optimizer, act="protect", **ALWAYS):
        for _ in range(8):  # a second forward of a step would leave the last one waiting for ever
            net().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "Fed.feed (Queue) changes in the forward, and cannot be put back" in capsys.readouterr().err


def test_a_traced_part_is_guarded_like_any_other(capsys) -> None:
    net = switches.Net("none")
    net.a = torch.jit.trace(net.a, torch.randn(4, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Guard(net, optimizer, act="protect", **ALWAYS) as guard:
        for _ in range(4):
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    table = guard.coverage()
    assert table["failures"] == {}
    assert table["dismissed"] == table["suspicions"] >= 3, capsys.readouterr().err


def test_a_guard_that_begins_in_another_thread_meanwhile_changes_nothing_of_the_scripts(monkeypatch) -> None:
    """It puts functions of its own in torch's places, where a script's patch would end replays."""
    net = torch.nn.Linear(4, 4)
    held = HeldState(net)
    before = held.surroundings()
    with bw.Guard(torch.nn.Linear(2, 2), quiet=True):
        assert torch.load.__module__ != "torch.serialization"
        assert before.changed() == {}
    assert before.changed() == {}
    monkeypatch.setattr(torch, "load", lambda *_: None)
    assert "torch.load" in before.changed().values()
