"""The identity of a device: stable, complete, and never the reason that a training ends."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bitwitness.device import this_device
from bitwitness.finding import Device


def test_the_cpu_is_named_by_its_machine_and_the_ranks_place_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    device = this_device("cpu")
    assert (device.kind, device.index) == ("cpu", 3)
    assert device.host
    assert device.uuid
    assert str(device) == f"cpu:3 ({device.uuid}) on {device.host}"


def test_a_tensor_stands_for_its_device() -> None:
    assert this_device(torch.zeros(2)) == this_device(torch.device("cpu"))


def test_another_process_gives_the_same_identity() -> None:
    code = """
import json
from dataclasses import asdict
from bitwitness.device import this_device
print(json.dumps(asdict(this_device("cpu"))))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Device(**json.loads(told)) == this_device("cpu")


@pytest.mark.parametrize("text", ["", "none", "-1"])
def test_an_odd_local_rank_is_taken_for_0(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", text)
    assert this_device("cpu").index == 0


@pytest.mark.parametrize(("node", "expected"), [(0x02AABBCCDDEE, "mac-02aabbccddee"), (0x030000000001, None)])
def test_a_machine_without_a_machine_id_still_has_a_stable_name(node, expected, monkeypatch) -> None:
    monkeypatch.setattr("bitwitness.device._IDENTITIES", ("/no/such/file",))
    monkeypatch.setattr("uuid.getnode", lambda: node)
    device = this_device("cpu")
    assert device.uuid == (expected or device.host)  # a number made up anew in each process is no identity


def accelerator(**properties) -> SimpleNamespace:
    return SimpleNamespace(current_device=lambda: 5, get_device_properties=lambda index: SimpleNamespace(**properties))


@pytest.mark.parametrize(
    ("module", "where", "expected"),
    [
        (accelerator(name="H200", uuid="8f1c"), "cuda", (5, "8f1c", "cuda")),
        (accelerator(name="H200", uuid="8f1c"), "cuda:2", (2, "8f1c", "cuda")),
        (accelerator(name="Ascend910B", uuid=""), "xpu:1", (1, "Ascend910B#1", "xpu")),
        (SimpleNamespace(), "mps", (0, "mps#0", "mps")),
    ],
)
def test_an_accelerator_is_named_by_what_its_driver_tells(module, where, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = this_device(where)
    assert (device.index, device.uuid, device.kind) == expected


def test_where_a_launcher_chose_among_the_devices_the_index_is_the_devices_own(monkeypatch) -> None:
    monkeypatch.setenv("BITWITNESS_SLOTS", "0, 2,7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert this_device("cpu").index == 2
    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator(name="Ascend910B", uuid=""))
    seen = this_device("xpu:2")
    assert (seen.index, seen.uuid) == (7, "Ascend910B#7")
    monkeypatch.setenv("BITWITNESS_SLOTS", "0,two")
    assert this_device("cpu").index == 1


def test_a_device_without_any_module_is_named_by_its_kind() -> None:
    assert this_device(torch.empty(0, device="meta")).uuid == "meta#0"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_uuid_that_nvidia_smi_shows() -> None:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    device = this_device(torch.zeros(1, device="cuda"))
    assert device.uuid in listed
    assert this_device() == device
