"""Four ranks of which one computes wrongly, and the fleet's monitoring: a real Prometheus, node_exporter's files, receivers."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from extent import chosen
from prometheus_client.parser import text_string_to_metric_families
from ranks import forked
from receivers import answers, at_port, at_socket, takes

from bitwitness.cli import main
from bitwitness.cli.alerts import RULES
from bitwitness.demo.launch import torchrun

JOB = Path(__file__).parent / "jobs" / "fleet.py"
RANKS, ACCUSED = 4, 2
pytestmark = pytest.mark.ranks


def eventually(ask: Callable[[], Any], seconds: float = 90.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := ask()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    for first in range(21000, 29000, 10):
        probes = []
        try:
            probes = [socket.create_server(("127.0.0.1", first + more)) for more in range(count)]
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        if len(probes) == count:
            return first
    raise AssertionError("no free ports")


def page(port: int, path: str = "/metrics") -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return values by name and by cause (or what is covered)."""
    families = text_string_to_metric_families(text)
    return {
        (s.name.removeprefix("bitwitness_"), s.labels.get("cause") or s.labels.get("of", "")): s.value
        for family in families
        for s in family.samples
    }


@contextmanager
def prometheus(where: Path, port: int, first: int) -> Iterator[None]:
    where.mkdir()
    targets = ", ".join(f"'127.0.0.1:{first + rank}'" for rank in range(RANKS))
    (where / "rules.yml").write_text(RULES.read_text())
    (where / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\nscrape_configs:\n"
        f"  - job_name: training\n    static_configs: [{{targets: [{targets}]}}]\n"
    )
    command = [
        *("prometheus", f"--config.file={where / 'prometheus.yml'}", f"--storage.tsdb.path={where / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (where / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            yield
        finally:
            server.terminate()


def alerts(port: int, name: str) -> list[dict]:
    found = json.loads(page(port, "/api/v1/alerts") or '{"data": {"alerts": []}}')["data"]["alerts"]
    return [one for one in found if one["labels"]["alertname"] == name and one["state"] == "firing"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("fleet")
    (where / "prom").mkdir()
    first = free_ports(RANKS + 1)
    have = shutil.which("prometheus") is not None
    told: dict[str, Any] = {"where": where, "prometheus": have}
    ended: list[Any] = []
    with at_socket(where / "h", takes) as local, at_port(answers("204 No Content")) as (central, port):
        (where / "guard.toml").write_text(
            f'[alerts]\nprometheus = "127.0.0.1:{first}"\nprometheus_textfile = "{where / "prom"}"\n'
            f'health_socket = "{where / "h"}"\nhealth_url = "http://127.0.0.1:{port}/events"\nlog = ["stderr"]\n'
        )
        job = [str(JOB), str(where / "run"), str(where / "guard.toml"), str(where / "end")]
        logs = where / "logs"
        launch = chosen(lambda: torchrun(RANKS, job, logs, echo=False), lambda: forked(RANKS, job, logs))
        training = threading.Thread(target=lambda: ended.append(launch()))
        with prometheus(where / "p", first + RANKS, first) if have else contextmanager(lambda: iter([None]))():
            training.start()
            try:
                accused = first + ACCUSED
                eventually(lambda: samples(page(accused)).get(("device_status", "")) == 1.0)
                if have:
                    told["firing"] = eventually(lambda: alerts(first + RANKS, "BitwitnessDeviceWarning"))
                    told["verdicts"] = eventually(lambda: alerts(first + RANKS, "BitwitnessVerdict"), 20)
                eventually(lambda: samples(page(accused)).get(("steps_total", ""), 0) > 9)  # it struck in steps 6 and 7
                told["pages"] = [page(first + rank) for rank in range(RANKS)]
                told["files"] = eventually(lambda: len(list((where / "prom").glob("*.prom"))) == RANKS)
                told["texts"] = [file.read_text() for file in sorted((where / "prom").glob("*.prom"))]
                told["cleared"] = main(["alerts", "clear", str(where / "run"), "--device", f"rank {ACCUSED}", "-q"])
                told["after"] = samples(page(accused))
                if have:
                    told["over"] = eventually(lambda: not alerts(first + RANKS, "BitwitnessDeviceWarning"))
            finally:
                (where / "end").touch()
                training.join()
        told |= {"local": local.events, "central": central.events, "code": ended[0].code}
        told["said"] = "\n".join(log.read_text() for log in ended[0].logs)
    return told


def test_each_rank_serves_its_numbers_at_its_own_port(fleet) -> None:
    assert fleet["code"] == 0, fleet["said"][-3000:]
    ranks = []
    for text in fleet["pages"]:
        families = list(text_string_to_metric_families(text))
        labels = {
            tuple(sorted((k, v) for k, v in s.labels.items() if k not in ("cause", "of")))
            for f in families
            for s in f.samples
        }
        assert len(labels) == 1, "one rank, one set of labels"
        own = dict(labels.pop())
        assert own["run"] == str(fleet["where"] / "run")
        assert own["host"] == socket.gethostname()
        assert own["device"]
        ranks.append(int(own["rank"]))
        found = samples(text)
        assert found["steps_total", ""] > 6
        assert found["deep_steps_total", ""] >= 1
        assert found["suspicions_total", ""] >= 1
        assert 0 < found["cost_share", ""] < 1
        assert found["coverage_share", "parameters"] == 1.0
        assert abs(time.time() - found["last_step_timestamp_seconds", ""]) < 600
        assert found["lost_ranks", ""] == 0
    assert ranks == list(range(RANKS))


def test_only_the_accused_rank_counts_the_verdict_and_reads_warning(fleet) -> None:
    found = [samples(text) for text in fleet["pages"]]
    assert [one["device_status", ""] for one in found] == [0.0, 0.0, 1.0, 0.0]
    counted = [one["verdicts_total", "persistent_hardware"] for one in found]
    assert counted[ACCUSED] >= 1
    assert sum(counted) == counted[ACCUSED]


def test_a_real_prometheus_fires_the_shipped_alert_and_ends_it_when_the_device_is_cleared(fleet) -> None:
    if not fleet["prometheus"]:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    log = (fleet["where"] / "p" / "log").read_text()[-2000:]
    assert [one["labels"]["rank"] for one in fleet["firing"]] == [str(ACCUSED)], log
    labels = fleet["firing"][0]["labels"]
    assert (labels["severity"], labels["fault_code"]) == ("critical", "80818C00")
    assert [one["labels"]["cause"] for one in fleet["verdicts"]] == ["persistent_hardware"]
    assert fleet["over"]


def test_the_shipped_rules_are_what_promtool_takes(capsys) -> None:
    assert main(["alerts", "rules"]) == 0
    assert capsys.readouterr().out == RULES.read_text()
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_node_exporters_files_say_the_same(fleet) -> None:
    assert fleet["files"]
    assert "no metrics" not in fleet["said"]
    found = [samples(text) for text in fleet["texts"]]
    assert all(one["steps_total", ""] >= 0 for one in found)
    left = list((fleet["where"] / "prom").iterdir())
    assert len(left) <= 1, "a healthy rank takes its file away, and nothing half-written stays"


def test_the_accused_rank_alone_tells_both_receivers_once_a_verdict(fleet) -> None:
    faults = [one for one in fleet["local"] if one["event_type"] == "fault"]
    assert {one["bitwitness"]["rank"] for one in faults} == {ACCUSED}
    assert len({one["id"] for one in faults}) == len(faults)
    steps = [
        json.loads(line)["step"]
        for line in (fleet["where"] / "run" / "events.jsonl").read_text().splitlines()
        if '"verdict"' in line
    ]
    assert [one["bitwitness"]["step"] for one in faults] == steps
    assert {one["id"] for one in fleet["central"]} >= {one["id"] for one in faults}
    lines = [line for line in fleet["said"].splitlines() if line.startswith("bitwitness-event ")]
    assert {json.loads(line.partition(" ")[2])["id"] for line in lines} == {one["id"] for one in faults}


def test_whoever_was_told_of_the_fault_is_told_of_its_end(fleet) -> None:
    assert fleet["cleared"] == 0
    assert fleet["after"]["device_status", ""] == 0.0
    for taken in (fleet["local"], fleet["central"]):
        assert [one["health_status"] for one in taken if one["event_type"] == "recovery"] == ["OK"]


def test_status_says_since_when_and_who_cleared_it(fleet, capsys) -> None:
    assert main(["status", str(fleet["where"] / "run")]) == 1
    said = capsys.readouterr().out
    assert "(rank 2): " in said
    assert "OK, cleared at 20" in said
    assert "was Warning since step 6 (80818C00)" in said
