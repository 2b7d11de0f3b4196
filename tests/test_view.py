"""``bitwitness view``: graphs of what was recorded, files for Model Explorer, a server that gives away nothing else."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from monitored_run import write_series
from torch import nn

import bitwitness as bw
from bitwitness.cli import main, view
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.finding import Severity
from bitwitness.store.answer import answer_of
from bitwitness.store.monitored import SCHEMA as SERIES
from bitwitness.store.opening import open_source
from bitwitness.store.rows import Measured, Row, to_table
from bitwitness.store.writer import RunWriter
from bitwitness.view.colours import LOOKS, State, worst
from bitwitness.view.graph import graph_of
from bitwitness.view.live import Live, _thinned
from bitwitness.view.nodedata import changes_json, graph_json, states_json
from bitwitness.view.page import pages_of
from bitwitness.view.scene import Scene, one_run, two_runs
from bitwitness.view.server import Server

EVIL = "<img src=x onerror=alert(1)>"


class Net(nn.Module):
    """A model with a module in a module, of which ``other`` computes otherwise."""

    def __init__(self, *, other: bool = False, first: str = "first") -> None:
        super().__init__()
        self.parts = nn.ModuleDict({first: nn.Sequential(nn.Linear(6, 8), nn.Tanh()), "second": nn.Linear(8, 8)})
        self.first, self.other = first, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts["second"](self.parts[self.first](x))
        return nn.functional.gelu(x, approximate="tanh" if self.other else "none")


def record(out: Path, *, other: bool = False, first: str = "first", nan: bool = False) -> Path:
    torch.manual_seed(0)
    net = Net(other=other, first=first)
    if nan:
        net.parts[first][0].weight.data.mul_(100)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Recorder(net, out=out, level="mix"):
        for _ in range(2):
            x = torch.full((4, 6), 3e38) if nan else torch.randn(4, 6)
            (net(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("view")
    return record(folder / "a"), record(folder / "b", other=True)


@pytest.fixture(scope="module")
def scene(runs: tuple[Path, Path]) -> Scene:
    return two_runs(*runs)


# -- the graph --------------------------------------------------------------------------------------------------------


def test_calls_are_nodes_in_groups_named_like_modules_and_edges_follow_values(runs: tuple[Path, Path]) -> None:
    source = open_source(runs[0])
    graph = graph_of("it", StepFrame(source.table(0, 0)), source.stacks(0))
    nodes = graph.by_id()
    gelu = nodes["op ./gelu#0:forward"]
    assert gelu.group == ("forward",)
    assert gelu.reads == [("op parts.second/addmm#0:forward", "0", "in0")]
    assert "test_view.py" in gelu.stack
    assert nodes["op parts.second/addmm#0:forward"].group == ("forward", "parts", "second")
    assert ("forward", "parts", "first") in graph.groups()
    assert len(nodes) == len(graph.nodes)
    assert [value.shape for value in gelu.outputs] == [(4, 8)]
    assert "l2" in gelu.outputs[0].stats


def test_who_made_a_difference_is_told_from_who_passed_it_on(scene: Scene) -> None:
    place = scene.places[0]
    assert scene.first == place
    assert "gelu" in scene.conclusion
    first, second = scene.sides(place)
    assert [one["id"] for one in scene.suspects(place)] == ["op ./gelu#0:forward", "op ./gelu_backward#0:backward"]
    for side in (first, second):
        assert side.found["op ./gelu#0:forward"].state is State.MADE_HERE
        assert side.found["op parts.second/addmm#0:forward"].state is State.EQUAL
        assert any(one.state is State.PASSED_ON for one in side.found.values())
    assert set(first.graph.by_id()) == set(second.graph.by_id())


def test_what_only_one_run_has_is_marked_and_renamed_modules_stand_in_one_place(tmp_path: Path) -> None:
    a, b = record(tmp_path / "a"), record(tmp_path / "b", first="renamed")
    scene = two_runs(a, b, modules={"parts.first*": "parts.renamed*"})
    first, second = scene.sides(scene.places[0])
    assert second.graph.by_id()["op parts.first.0/addmm#0:forward"].site == "parts.renamed.0/addmm#0:forward"
    assert second.found["op parts.first.0/addmm#0:forward"].other == "parts.first.0/addmm#0:forward"
    scene = two_runs(a, b, modules={})
    first, second = scene.sides(scene.places[0])
    states = {one.state for side in (first, second) for one in side.found.values()}
    assert State.UNMATCHED in states


def test_a_single_run_shows_who_made_the_first_inf(tmp_path: Path) -> None:
    scene = one_run(record(tmp_path / "run", nan=True))
    suspects = scene.suspects(scene.places[0])
    assert suspects
    assert "all that it reads is finite" in suspects[0]["text"]
    assert worst([State.EQUAL, State.MADE_HERE, State.PASSED_ON]) is State.MADE_HERE


def test_what_is_not_there_is_said(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(bw.UsageError, match=r"has nothing of --step 77; it has ranks \[0\], steps \[0, 1\]"):
        one_run(runs[0], step=77)
    assert main(["view", str(runs[0]), "--step", "77", "--no-browser"]) == 2
    assert main(["view", str(runs[0]), "--map", "x", "--no-browser"]) == 2
    assert "names modules of two runs" in capsys.readouterr().err


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_for_model_explorer(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["view", *map(str, runs), "--step", "0", "--export", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == [
        f"{side}-rank0-step0.{what}json" for side in "ab" for what in ("change.", "found.", "")
    ]
    graph = json.loads((out / "a-rank0-step0.json").read_text())
    ids = [node["id"] for node in graph["nodes"]]
    assert len(ids) == len(set(ids))
    assert all(edge["sourceNodeId"] in ids for node in graph["nodes"] for edge in node["incomingEdges"])
    data = json.loads((out / "a-rank0-step0.found.json").read_text())
    assert data[graph["id"]]["results"]["op ./gelu#0:forward"]["value"] == LOOKS[State.MADE_HERE].label
    assert main(["view", str(runs[0]), "--export", str(out)]) == 2
    assert "name a folder that is new or empty" in capsys.readouterr().err


def test_collapsed_groups_take_the_colour_of_the_worst_in_them(scene: Scene) -> None:
    side = scene.sides(scene.places[0])[0]
    made, *_ = graph_json(side.graph, side.found)["groupNodeConfigs"]
    assert re.fullmatch(made["namespaceRegex"], "forward")
    assert not re.fullmatch(made["namespaceRegex"], "forward/parts")
    changes = changes_json(side.graph, side.found)
    assert changes is not None
    assert 0 < changes[side.graph.name]["results"]["op ./gelu#0:forward"]["value"] < 1


def hostile_frame() -> StepFrame:
    rows, values = [], {}
    for number, module in enumerate((EVIL, "a/b.\x1b[31m", "../../etc", "", "\u202ea" * 5_000, "a..b")):
        place = (0, 0, number, number, "op", "forward", module, EVIL, 0, "out0", "float32", (1,))
        rows.append(Row(*place, None, None, number, number - 1, EVIL, EVIL, -1, None, recomputed=False))
        values[number] = Measured(1, 0, 0, 0, 0, float("nan"), float("inf"), 0.0, 0.0, 0.0, -1)
    return StepFrame(to_table(0, rows, values))


def test_hostile_names_and_values_are_text() -> None:
    graph = graph_of("it", hostile_frame())
    text = json.dumps([graph_json(graph, {}), states_json(graph, {})], allow_nan=False, ensure_ascii=False)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(graph.by_id()) == 6
    assert all("/" not in part and part for node in graph.nodes for part in node.group)
    assert max(len(node.id) for node in graph.nodes) < 320


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(scene: Scene, runs: tuple[Path, Path]) -> Iterator[Server]:
    with Server(pages_of(lambda: scene, Live(runs, answer_of))) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_and_its_data(server: Server) -> None:
    status, headers, body = ask(server, server.prefix)
    assert status == 200
    assert b"bitwitness view" in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not any(name.lower().startswith("access-control") for name in headers)
    status, _, body = ask(server, f"{server.prefix}data/place?place=0")
    assert (status, len(json.loads(body)["sides"])) == (200, 2)
    status, _, body = ask(server, f"{server.prefix}data/node?place=0&id=op+./gelu%230:forward")
    assert (status, len(json.loads(body))) == (200, 2)
    status, headers, body = ask(server, server.prefix, "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 100
    assert server.server_address[0] == "127.0.0.1"


WRONG = [
    ("GET", "/", {}, 403),
    ("GET", "/wrong-token/", {}, 403),
    ("GET", "/%00/data/scene", {}, 403),
    ("GET", "{prefix}../../../../etc/passwd", {}, 404),
    ("GET", "{prefix}%2e%2e/%2e%2e/etc/passwd", {}, 404),
    ("GET", "{prefix}explorer/../../../server.py", {}, 404),
    ("GET", "{prefix}explorer//etc/passwd", {}, 404),
    ("GET", "{prefix}page.py", {}, 404),
    ("GET", "{prefix}" + "a" * 10_000, {}, 414),
    ("GET", "{prefix}" + "a" * 70_000, {}, 414),
    ("POST", "{prefix}", {}, 405),
    ("PUT", "{prefix}data/scene", {}, 405),
    ("DELETE", "{prefix}data/scene", {}, 405),
    ("OPTIONS", "{prefix}", {}, 405),
    ("BREW", "{prefix}", {}, 405),
    ("GET", "{prefix}", {"Host": "evil.example"}, 403),
    ("GET", "{prefix}", {"Host": "evil.example:{port}"}, 403),
    ("GET", "{prefix}data/place", {}, 400),
    ("GET", "{prefix}data/place?place=-1", {}, 400),
    ("GET", "{prefix}data/place?place=9999999999999999999999", {}, 400),
    ("GET", "{prefix}data/place?place=²", {}, 400),
    ("GET", "{prefix}data/place?place=999", {}, 400),
    ("GET", "{prefix}data/place?&&&=%ff", {}, 400),
    ("GET", "{prefix}data/node?place=0&id=" + "x" * 2000, {}, 400),
    ("GET", "{prefix}data/live?after=all", {}, 400),
    ("GET", "http://[bad/{prefix}", {}, 400),
]


@pytest.mark.parametrize(("method", "path", "headers", "expected"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests_are_refused(
    server: Server, method: str, path: str, headers: dict[str, str], expected: int
) -> None:
    said = {name: value.replace("{port}", str(server.server_port)) for name, value in headers.items()}
    target = path.replace("{prefix}", server.prefix).encode().decode("latin-1")
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        host = said.get("Host", f"127.0.0.1:{server.server_port}")
        connection.sendall(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1"))
        line = connection.makefile("rb").readline()
    assert int(line.split()[1]) == expected


@pytest.mark.parametrize(
    "raw", [b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500]
)
def test_what_is_no_request_is_the_askers_fault(server: Server, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(raw)
        line = connection.makefile("rb").readline()
    assert 400 <= int(line.split()[1]) < 500


def test_a_port_that_is_taken_is_said(server: Server) -> None:
    with pytest.raises(bw.UsageError, match="expected a free port, or 0 for any"):
        Server(lambda _prefix: None, server.server_port)  # type: ignore[arg-type, return-value]
    with pytest.raises(bw.UsageError, match="--port 70000"):
        Server(lambda _prefix: None, 70_000)  # type: ignore[arg-type, return-value]


# -- live -------------------------------------------------------------------------------------------------------------


def series(run: Path, steps: range) -> None:
    empty = dict.fromkeys(SERIES.names)
    told = {"micro": -1, "kind": "training", "name": "."}
    rows = [
        empty | told | {"step": step, "metric": metric, "value": 1.0 / (step + 1)}
        for step in steps
        for metric in ("loss", "grad_norm")
    ]
    rows[0]["value"] = float("nan")
    write_series(run, 0, pa.Table.from_pylist(rows, schema=SERIES))


def test_a_run_that_goes_on_grows_and_its_status_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    writer = RunWriter(run, 0, 1)
    writer.describe()
    live = Live([run], answer_of)
    first = live.news(0)
    assert first["runs"][0]["state"] == "running"
    assert first["runs"][0]["series"] == {}
    writer.event(bw.Note(EVIL, severity=Severity.WARNING, step=3))
    series(run, range(3))
    second = live.news(first["next"])
    assert [event["message"] for event in second["events"]] == [EVIL]
    assert second["runs"][0]["series"]["loss"][0] == [0, None]
    series(run, range(3, 5))
    third = live.news(second["next"])
    assert third["events"] == []
    assert [step for step, _ in third["runs"][0]["series"]["grad_norm"]] == [0, 1, 2, 3, 4]
    capsys.readouterr()
    assert main(["status", str(run), "--json"]) == 1  # the first loss is NaN
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "running"
    assert told["sentence"].startswith(
        "NOT healthy: the series hold NaN or Inf, first at step 0, rank 0 in training/./loss"
    )
    writer.close()


def test_two_runs_without_a_recording_are_live_and_have_no_graph(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    watched = [tmp_path / name for name in "ab"]
    for run in watched:
        writer = RunWriter(run, 0, 1)
        writer.describe()
        series(run, range(3))
        writer.close()
    asked = argparse.Namespace(step=None, rank=None, map=None)
    assert view.scene_of(asked, watched)() is None
    with pytest.raises(bw.UsageError, match="holds no recorded rows"):
        view.scene_of(asked, [runs[0], watched[0]])


def test_a_spike_is_not_lost_where_a_long_line_is_thinned() -> None:
    points: list[list[float | None]] = [[step, 1.0 + 1e-3 * (step % 7)] for step in range(30_000)]
    points[12_345][1], points[23_456][1], points[777][1] = 900.0, -900.0, None
    kept = _thinned(points)
    assert len(kept) < 2_100
    assert all(points[place] in kept for place in (777, 12_345, 23_456, 29_999))
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
