"""What a guard tells a fleet, and that nobody it tells can harm the training."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from ranks import script
from receivers import answers, at_port, at_socket, closes, hangs, takes
from small_training import Training

from bitwitness import Cause, ConfigError, Guard, Run, UsageError, Verdict
from bitwitness.cli import main
from bitwitness.config import AlertsConfig, load_config
from bitwitness.device import this_device
from bitwitness.finding import Action, Device
from bitwitness.respond.alerts.delivery import Delivery
from bitwitness.respond.alerts.events import npu_name, verdict_event
from bitwitness.respond.alerts.serving import PageServer
from bitwitness.respond.alerts.targets import HttpAddress, Syslog, UnixSocket
from bitwitness.store.warned import read_clearances


def convicted(step: int = 2, cause: str = "persistent_hardware", code: str | None = "80818C00") -> Verdict:
    return Verdict(
        Cause(cause), step, (0,), (this_device("cpu"),), Action.REPORTED, "wrong every time", fault_code=code
    )


def train(steps: int = 3, verdicts: tuple[Verdict, ...] = (), **settings) -> tuple[list[torch.Tensor], Guard, float]:
    """Train under guard; return the bits, the guard, and how many seconds its end took."""
    training = Training()
    with Guard(training.net, training.optimizer, self_test=False, **settings) as guard:
        for _ in range(steps):
            training.step()
        for verdict in verdicts:
            guard.reporter.verdict(verdict, speak=False)
        began = time.monotonic()
    return training.bits(), guard, time.monotonic() - began


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(port: int, request: bytes = b"GET /metrics HTTP/1.1\r\n\r\n", seconds: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as to:
        to.sendall(request)
        found = b""
        while piece := to.recv(65536):
            found += piece
    return found


def values(text: str) -> dict[str, float]:
    return {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples if "cause" not in s.labels}


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("prometheus", "9500", "HOST:PORT"),
        ("prometheus", "127.0.0.1:0", "HOST:PORT"),
        ("prometheus", "metrics.example:9500", "an IP address"),
        ("prometheus", "::1:9500", "IPv6 in brackets"),
        ("prometheus", "127.0.0.1:99999", "HOST:PORT"),
        ("health_socket", "/" + "x" * 107, "at most 107 bytes"),
        ("health_socket", "", "a Unix socket"),
        ("health_url", "ftp://host/x", "http://HOST"),
        ("health_url", "http://user:secret@host/x", "without a user's name"),
        ("health_url", "http://host/a b", "http://HOST"),
        ("health_url", "http://host/\r\nX: y", "http://HOST"),
        ("health_url", "http://host:0x50/", "http://HOST"),
        ("prometheus_textfile", "", "a folder"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused_by_name(name, value, expected) -> None:
    with pytest.raises(ConfigError, match=rf"alerts\.{name} = .*{expected}"):
        load_config(None, {"alerts": {name: value}}, {})


def test_unknown_names_get_the_nearest_one_and_addresses_come_from_everywhere(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"alerts\.promethius.*the nearest known key is 'alerts\.prometheus'"):
        load_config(None, {"alerts": {"promethius": "x"}}, {})
    with pytest.raises(ConfigError, match="alerts.log"):
        load_config(None, {"alerts": {"log": ["journal"]}}, {})
    (tmp_path / "c.toml").write_text('[alerts]\nprometheus = "[::1]:9500"\nlog = ["syslog"]\n')
    found = load_config(tmp_path / "c.toml", {}, {"BITWITNESS_ALERTS__LOG": "stderr, syslog"}).config.alerts
    assert found == AlertsConfig(prometheus="[::1]:9500", log=("stderr", "syslog"))


def test_the_library_is_imported_only_where_metrics_are_asked_for_and_a_missing_one_is_named(
    tmp_path, monkeypatch
) -> None:
    code = (
        "import sys; from small_training import Training; from bitwitness import Guard\nt = Training()\n"
        "with Guard(t.net, t.optimizer, alerts={'log': ['stderr']}): t.step()\n"
        "assert 'prometheus_client' not in sys.modules"
    )
    (tmp_path / "job.py").write_text(f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n{code}")
    done = script([str(tmp_path / "job.py")], tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for setting in ({"prometheus": "127.0.0.1:9500"}, {"prometheus_textfile": "/tmp"}):
        with pytest.raises(UsageError, match=r"pip install 'bitwitness\[prometheus\]'"):
            train(alerts=setting)
    (tmp_path / "c.toml").write_text('[alerts]\nprometheus = "127.0.0.1:9500"\n')
    assert main(["run", "--config", str(tmp_path / "c.toml"), str(tmp_path / "job.py")]) == 2


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_a_guarded_training_serves_what_it_did_and_keeps_its_bits(tmp_path) -> None:
    plain, _, _ = train(steps=6)
    port, training = free_port(), Training()
    settings = {"prometheus": f"127.0.0.1:{port}", "prometheus_textfile": str(tmp_path), "log": ["stderr"]}
    with Guard(training.net, training.optimizer, self_test=False, alerts=settings, deep_every=2):
        pages = []
        for _ in range(6):
            training.step()
            pages.append(values(get(port).partition(b"\r\n\r\n")[2].decode()))
    assert [page["bitwitness_steps_total"] for page in pages] == [1, 2, 3, 4, 5, 6]
    assert pages[-1]["bitwitness_deep_steps_total"] >= 2
    assert "bitwitness_last_step_seconds" not in pages[0]
    assert pages[1]["bitwitness_last_step_seconds"] >= 0
    assert all(torch.equal(a, b) for a, b in zip(plain, training.bits(), strict=True))
    with pytest.raises(ConnectionRefusedError):
        get(port)
    assert list(tmp_path.iterdir()) == []


def test_a_busy_port_is_said_once_and_the_training_goes_on(tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        train(alerts={"prometheus": f"127.0.0.1:{port}"}, out=tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count(f"no metrics are served at 127.0.0.1:{port}: Address already in use") == 1
    assert "Address already in use" in (tmp_path / "run" / "rank00000" / "events.jsonl").read_text()


def test_two_models_of_a_process_share_its_port(tmp_path) -> None:
    port, one, other = free_port(), Training(), Training()
    settings = {"prometheus": f"127.0.0.1:{port}"}
    with Guard(one.net, one.optimizer, out=tmp_path / "a", alerts=settings, self_test=False):
        with Guard(other.net, other.optimizer, out=tmp_path / "b", alerts=settings, self_test=False):
            one.step()
            text = get(port).decode()
        alone = get(port).decode()
    assert f'run="{tmp_path / "a"}"' in text
    assert f'run="{tmp_path / "b"}"' in text
    assert f'run="{tmp_path / "b"}"' not in alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_serve_and_the_parent_goes_on() -> None:
    port, training = free_port(), Training()
    with Guard(training.net, training.optimizer, self_test=False, alerts={"prometheus": f"127.0.0.1:{port}"}):
        training.step()
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            names = [thread.name for thread in threading.enumerate()]
            held = {os.fspath(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
            rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            here = [row for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == "0A"]  # LISTEN
            serves = not here or any(f"socket:[{row[9]}]" in held for row in here)
            os.write(ready[1], b"bad" if serves or "bitwitness metrics" in names else b"ok")
            os.read(done[0], 1)
            os._exit(0)
        assert os.read(ready[0], 8) == b"ok"
        assert b"bitwitness_steps_total" in get(port)
        os.write(done[1], b"x")
        os.waitpid(child, 0)


def test_rude_clients_hold_up_nobody() -> None:
    port = free_port()
    server = PageServer("127.0.0.1", port, lambda: b"page\n", "text/plain")
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            server.poll(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        assert get(port).endswith(b"\r\n\r\npage\n")
        for garbage in (
            b"\x00\xff" * 6000,
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"PUT /metrics HTTP/1.1\r\n\r\n",
            b"A" * 10000,
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as to:
                to.sendall(garbage)
        assert b"404" in get(port, b"GET /../etc/passwd HTTP/1.1\r\n\r\n").partition(b"\n")[0]
        assert b"405" in get(port, b"POST /metrics HTTP/1.1\r\n\r\n").partition(b"\n")[0]
        assert get(port, b"HEAD /metrics HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
        assert get(port).endswith(b"page\n")
    finally:
        over.set()
        thread.join()
        server.close()
        for one in silent:
            one.close()


def test_a_file_of_a_convicted_device_stays_until_it_is_cleared(tmp_path, capsys) -> None:
    prom, run = tmp_path / "prom", tmp_path / "run"
    prom.mkdir()
    train(alerts={"prometheus_textfile": str(prom)}, out=run, verdicts=(convicted(),))
    assert "no metrics" not in capsys.readouterr().err
    (file,) = prom.iterdir()
    assert file.suffix == ".prom"
    assert file.stat().st_mode & 0o044 == 0o044, "node_exporter is another user"
    assert values(file.read_text())["bitwitness_device_status"] == 1.0
    assert main(["alerts", "clear", str(run), "-q"]) == 0
    assert list(prom.iterdir()) == []


def test_a_terminated_training_delivers_its_events_and_takes_its_file_away(tmp_path) -> None:
    (tmp_path / "prom").mkdir()
    (tmp_path / "job.py").write_text(
        f"import os, signal, sys, time; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from small_training import Training; from test_alerts import convicted; from bitwitness import Guard\n"
        "t, alerts = Training(), {'prometheus_textfile': 'prom', 'health_socket': 'h'}\n"
        "with Guard(t.net, t.optimizer, alerts=alerts, self_test=False) as guard:\n"
        "    t.step(); time.sleep(0.5); print(os.listdir('prom'), flush=True)\n"
        "    guard.reporter.verdict(convicted(cause='data', code=None), speak=False)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
    )
    with at_socket(tmp_path / "h", takes) as to:
        done = script([str(tmp_path / "job.py")], tmp_path)
        assert [event["event_type"] for event in to.wait(1)] == ["notice"]
    assert done.returncode == -15, done.stderr
    assert ".prom" in done.stdout
    assert list((tmp_path / "prom").iterdir()) == []


def test_a_folder_for_files_that_is_not_there_is_said_once(tmp_path, capsys) -> None:
    training = Training()
    with Guard(training.net, training.optimizer, alerts={"prometheus_textfile": str(tmp_path / "none")}):
        training.step()
        time.sleep(0.5)
    assert capsys.readouterr().err.count("no metrics are written into") == 1


# -- events ----------------------------------------------------------------------------------------------------------


def test_an_event_has_the_reference_alert_the_plugins_entry_and_ours() -> None:
    device = Device("node7", 1, "185011D4-21104518", "npu")
    event = verdict_event(convicted(40), 3, device, "/runs/a")
    assert {key: event[key] for key in ("health_status", "error_code", "node_type", "sensor_type", "event_state")} == {
        "health_status": "Warning",
        "error_code": "80818C00",
        "node_type": "SoC",
        "sensor_type": "Check Sensor",
        "event_state": "check fail",
    }
    assert (event["event_type"], event["fault_level"]) == ("fault", "minor")
    (entry,) = event["device_info"]["huawei.com/Ascend910-Fault"]
    since = entry.pop("fault_time_and_level_map")["80818C00"]
    assert abs(since["fault_time"] / 1000 - time.time()) < 60
    assert entry == {
        "fault_type": "CardUnhealthy",
        "npu_name": "Ascend910-1",
        "large_model_fault_level": "SeparateNPU",
        "fault_level": "SeparateNPU",
        "fault_handling": "SeparateNPU",
        "fault_code": "80818C00",
    }
    ours = event["bitwitness"]
    assert (ours["cause"], ours["rank"], ours["step"], ours["run"]) == ("persistent_hardware", 3, 40, "/runs/a")
    assert ours["device"] == {"host": "node7", "index": 1, "uuid": "185011D4-21104518", "kind": "npu"}
    assert npu_name(device, {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}) == "Ascend910-6"


def test_a_verdict_that_accuses_no_device_is_a_notice() -> None:
    verdict = Verdict(Cause.DATA, 5, (), (), Action.REPORTED, "the batch holds NaN")
    event = verdict_event(verdict, 0, None, "")
    assert (event["event_type"], event["health_status"], event["error_code"]) == ("notice", "OK", "")
    assert event["device_info"] == {"huawei.com/Ascend910-Fault": []}


def test_a_socket_an_address_and_the_log_get_each_verdict_once(tmp_path, capsys) -> None:
    with at_socket(tmp_path / "h", takes) as local, at_port(answers("202 Accepted")) as (central, port):
        alerts = {
            "health_socket": str(tmp_path / "h"),
            "health_url": f"http://127.0.0.1:{port}/e?token=x",
            "log": ["stderr"],
        }
        train(alerts=alerts, verdicts=(convicted(2), convicted(3)))
        for taken in (local.wait(2), central.wait(2)):
            assert [event["bitwitness"]["step"] for event in taken] == [2, 3]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bitwitness-event ")]
    first = json.loads(lines[0].partition(" ")[2])
    assert (len(lines), first["step"], first["error_code"], first["cause"]) == (2, 2, "80818C00", "persistent_hardware")


@pytest.mark.parametrize("rude", ["hangs", "closes", "500", "not HTTP", "drips", "nobody"])
def test_a_rude_receiver_harms_nothing_and_is_said_once(tmp_path, capsys, rude) -> None:
    behave = {
        "hangs": hangs,
        "closes": closes,
        "500": answers("500 No"),
        "not HTTP": lambda _, one: (one.sendall(b"220 mail\r\n"), one.close()),
        "drips": answers("200 OK", drip=0.3),
        "nobody": closes,
    }[rude]
    plain, _, _ = train()
    with at_socket(tmp_path / "h", behave), at_port(behave) as (_, port):
        path = tmp_path / ("none" if rude == "nobody" else "h")
        address = free_port() if rude == "nobody" else port
        many = tuple(convicted(step) for step in range(100))
        alerts = {"health_socket": str(path), "health_url": f"http://127.0.0.1:{address}/"}
        bits, guard, seconds = train(alerts=alerts, out=tmp_path / "run", verdicts=many)
    assert seconds < 1.5, "the end waits 0.8 s at the most, beside what it does anyway"
    assert all(torch.equal(a, b) for a, b in zip(plain, bits, strict=True))
    assert guard.reporter.failures == {}
    assert "not taken before the end; the run folder has all" in capsys.readouterr().err
    kept = (tmp_path / "run" / "events.jsonl").read_text()
    assert kept.count('"verdict"') == 100


@pytest.mark.parametrize("target", ["socket", "address", "slow address"])
def test_what_was_not_taken_is_tried_again_and_given_up_with_one_word(tmp_path, target) -> None:
    behave = {"socket": closes, "address": answers("503 Later"), "slow address": answers("200 OK", drip=0.05)}[target]
    said: list[str] = []
    with at_socket(tmp_path / "h", behave) as local, at_port(behave) as (central, port):
        to = (
            UnixSocket(str(tmp_path / "h"), 0.2)
            if target == "socket"
            else HttpAddress(f"http://127.0.0.1:{port}/", 0.2)
        )
        delivery = Delivery(to, said.append, (0.01, 0.01))
        for step in (1, 2):
            delivery.put(verdict_event(convicted(step), 0, this_device("cpu"), ""))
        assert delivery.close(time.monotonic() + 10) == 0
        assert delivery.undelivered == 2
        assert (local if target == "socket" else central).asked == 6
    assert len(said) == 1
    assert "did not take an event in 3 tries" in said[0]


def test_a_receiver_that_comes_back_gets_what_waits(tmp_path) -> None:
    delivery = Delivery(UnixSocket(str(tmp_path / "h")), pytest.fail, (1.0, 1.0))
    delivery.put(verdict_event(convicted(), 0, this_device("cpu"), ""))
    time.sleep(0.1)
    with at_socket(tmp_path / "h", takes) as to:
        assert delivery.close(time.monotonic() + 10) == 0
        assert len(to.wait(1)) == 1


def test_syslog_gets_one_datagram_a_verdict(tmp_path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(str(tmp_path / "log"))
        Syslog(str(tmp_path / "log")).deliver(verdict_event(convicted(), 0, this_device("cpu"), "r" * 9000))
        text = daemon.recv(65536).decode()
    assert text.startswith(f"<27>bitwitness[{os.getpid()}]: bitwitness-event {{")
    assert len(text) <= 4096


def test_another_ranks_verdict_is_another_ranks_to_tell(tmp_path) -> None:
    elsewhere = Verdict(
        Cause.PERSISTENT_HARDWARE, 2, (5,), (Device("b", 5, "u"),), Action.REPORTED, "wrong", fault_code="80818C00"
    )
    with at_socket(tmp_path / "h", takes) as to:
        train(alerts={"health_socket": str(tmp_path / "h")}, verdicts=(elsewhere, convicted(3)))
        assert [event["bitwitness"]["step"] for event in to.wait(1)] == [3]


# -- Warning until cleared -------------------------------------------------------------------------------------------


def test_a_device_reads_warning_until_it_is_cleared_and_again_when_it_strikes_again(tmp_path, capsys) -> None:
    run, training = tmp_path / "run", Training()
    with Guard(training.net, training.optimizer, out=run, self_test=False) as guard:
        training.step()
        tell = guard.reporter.verdict
        tell(convicted(0), speak=False)
        tell(convicted(4), speak=False)
        assert status(run, capsys) == ["Warning since step 0 (80818C00)"]
        assert main(["alerts", "clear", str(run), "--device", "rank 0", "--reason", "T-17"]) == 0
        assert "cleared at 20" in capsys.readouterr().out
        (now,) = status(run, capsys)
        assert now.startswith("OK, cleared at 20")
        assert now.endswith(": T-17; was Warning since step 0 (80818C00)")
        assert main(["alerts", "clear", str(run)]) == 0
        assert "no device reads Warning; nothing was changed" in capsys.readouterr().out
        tell(convicted(9), speak=False)
        assert status(run, capsys) == ["Warning since step 9 (80818C00)"]
    assert main(["status", str(run), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    assert (told["health_status"], told["error_code"], told["since_step"]) == ("Warning", "80818C00", 9)


def status(run: Path, capsys) -> list[str]:
    main(["status", str(run)])
    return [
        line.partition("(rank 0): ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("device ")
    ]


def test_an_unknown_device_is_an_error_that_names_those_there(tmp_path, capsys) -> None:
    train(out=tmp_path / "run", verdicts=(convicted(),))
    assert main(["alerts", "clear", str(tmp_path / "run"), "--device", "cuda:7"]) == 2
    said = capsys.readouterr().err
    assert "--device 'cuda:7': no convicted device" in said
    assert f"{this_device('cpu')}, rank 0" in said
    assert not (tmp_path / "run" / "cleared.jsonl").exists()
    assert main(["alerts", "clear", str(tmp_path / "nowhere")]) == 2


def test_a_damaged_clearance_clears_nothing_and_is_named(tmp_path, capsys) -> None:
    run = tmp_path / "run"
    train(out=run, verdicts=(convicted(),))
    assert main(["alerts", "clear", str(run), "-q"]) == 0
    file = run / "cleared.jsonl"
    file.write_text(file.read_text().replace('"rank": 0', '"rank": 1'))
    assert status(run, capsys) == ["Warning since step 2 (80818C00)"]
    assert main(["status", "-v", str(run)]) == 3
    assert "cleared.jsonl:1: damaged" in capsys.readouterr().out
    file.write_text('{"half')
    assert main(["alerts", "clear", str(run), "-q"]) == 0
    assert status(run, capsys)[0].startswith("OK, cleared at")


def test_clearances_at_the_same_time_are_all_kept_in_order(tmp_path) -> None:
    run = tmp_path / "run"
    train(out=run, verdicts=(convicted(),))
    verdicts = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert verdicts
    from bitwitness.store.warned import clear, warned_of

    known = warned_of(Run(run).verdicts(), [])
    threads = [threading.Thread(target=clear, args=(run, known, f"by {number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, problems = read_clearances(run)
    assert (len(found), problems) == (8, [])
    assert all(a.time <= b.time for a, b in pairwise(found))


def test_a_failure_of_ours_is_said_and_the_training_goes_on(monkeypatch, capsys) -> None:
    from bitwitness.guard.alerting import Alerting

    def breaks(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Alerting, "_verdict", breaks)
    plain, _, _ = train()
    bits, guard, _ = train(alerts={"log": ["stderr"]}, verdicts=(convicted(), convicted()))
    assert all(torch.equal(a, b) for a, b in zip(plain, bits, strict=True))
    assert list(guard.reporter.failures) == ["alerts"]
    assert capsys.readouterr().err.count("the guard failed in its alerts") == 1
