"""Checkpoints of all kinds against one another: what differs is named, and what is equal is called equal."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from bitwitness import UsageError
from bitwitness.cli.checkpoints import run
from bitwitness.comparison.checkpoints import CheckpointReport, compare_checkpoints
from bitwitness.store.checkpoints import open_checkpoint

sys.path.insert(0, str(Path(__file__).parent / "jobs"))
from checkpoints import numbers

JOB = Path(__file__).parent / "jobs" / "checkpoints.py"


def compared(a: Path, b: Path) -> CheckpointReport:
    return compare_checkpoints(open_checkpoint(a), open_checkpoint(b))


def save_dcp(state: dict, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no ranks are there
        dcp.save(state, checkpoint_id=folder)
    return folder


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "up.weight": torch.randn(6, 4),
        "up.bias": torch.randn(6, dtype=torch.bfloat16),
        "scale": torch.tensor(2.0),
        "none": torch.empty(0, 3),
        "ids": torch.arange(5),
    }


def save_everywhere(folder: Path, state: dict[str, torch.Tensor]) -> list[Path]:
    save_file(state, folder / "one.safetensors")
    torch.save(state, folder / "one.pt")
    return [folder / "one.safetensors", folder / "one.pt", save_dcp(state, folder / "dcp")]


def test_every_kind_equals_every_other(tmp_path: Path) -> None:
    paths = save_everywhere(tmp_path, weights())
    for a in paths:
        opened = open_checkpoint(a)
        assert sorted(opened.names()) == sorted(weights())
        for name, tensor in weights().items():
            assert opened.describe(name) == (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(opened.tensor(name), tensor)
        for b in paths:
            report = compared(a, b)
            assert report.equal, report.conclusion
            assert report.conclusion.startswith("equal: all 5 parameters have the same bits")
            assert report.same_place == (a == b)
            assert ("same file" in report.conclusion) == (a == b)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["safetensors", "pt", "dcp"])
def test_one_changed_weight_is_named(kind: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    changed = weights()
    changed["up.weight"][4, 1] += 0.5
    changed["ids"][2] = 7
    a = save_everywhere(tmp_path / "a", weights())[0]
    b = save_everywhere(tmp_path / "b", changed)[kind]
    code = run(str(b), str(a), str(tmp_path / "o.json"), str(tmp_path / "o.csv"))
    assert code == 1
    told = capsys.readouterr().out
    assert "2 of 5 parameters differ; most: ids (relative L2 9.1e-01, largest error 5 at [2])" in told
    found = json.loads((tmp_path / "o.json").read_text())
    assert [(row["name"], row["result"]) for row in found["parameters"][:2]] == [
        ("ids", "differs"),
        ("up.weight", "differs"),
    ]
    second = found["parameters"][1]
    assert second["largest_error_at"] == [4, 1]
    assert second["max_abs"] == pytest.approx(0.5)
    assert found["counts"]["equal"] == 3
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    assert [row["name"] for row in rows][:2] == ["ids", "up.weight"]
    assert not list(tmp_path.glob("*.part"))


def test_dtypes_shapes_nan_and_what_one_side_lacks(tmp_path: Path) -> None:
    a, b = weights(), weights()
    b["up.weight"] = b["up.weight"][:, :3].contiguous()
    b["up.bias"] = b["up.bias"].float()
    a["scale"] = torch.tensor(float("nan"))
    del b["none"]
    b["extra"] = torch.ones(2)
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    report = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    results = {one.name: one.result for one in report.parameters}
    assert results == {"up.weight": "shapes differ", "up.bias": "same values", "scale": "differs", "ids": "equal"}
    assert (report.only_a, report.only_b) == (["none"], ["extra"])
    worst = report.parameters[0]
    assert (worst.name, worst.nan_a, worst.nan_b, worst.where) == ("scale", 1, 0, ())
    for text in (
        "1 of 4 parameters differs; most: scale",
        "1 have another shape",
        "1 only in A, such as none",
        "1 holds NaN",
    ):
        assert text in report.conclusion
    assert not report.equal
    json.dumps(report.to_dict(), allow_nan=False)


def test_values_alone_may_be_equal(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([0.0, 1.5])}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([-0.0, 1.5], dtype=torch.float16)}, tmp_path / "b.safetensors")
    report = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.conclusion.startswith("equal values: all 1 parameters have the same values")
    assert not report.equal


def test_large_whole_numbers_are_told_apart(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([0, 2**60])}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([0, 2**60 + 1])}, tmp_path / "b.safetensors")
    (found,) = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors").parameters
    assert (found.result, found.where) == ("differs", (1,))
    assert "float64" in str(found.why)


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("", "module.", "'module.' was stripped from 2 names of B"),
        ("module._orig_mod.", "", "'module.' and '_orig_mod.' was stripped from 2 names of A"),
        ("model.", "module.", "stripped"),
        ("module.", "module.", ""),
    ],
)
def test_prefixes_of_wrappers_are_stripped(a: str, b: str, told: str, tmp_path: Path) -> None:
    for file, prefix in (("a", a), ("b", b)):
        save_file({f"{prefix}{n}": torch.ones(2) for n in ("up.weight", "norm.bias")}, tmp_path / f"{file}.safetensors")
    report = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.equal, report.conclusion
    assert told in " ".join(report.stripped)
    assert bool(told) == bool(report.stripped)


def test_compiled_parts_have_a_prefix_within(tmp_path: Path) -> None:
    save_file({"layers.0._orig_mod.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"layers.0.weight": torch.ones(2)}, tmp_path / "b.safetensors")
    assert compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors").equal


def test_nothing_in_common(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"y": torch.ones(2)}, tmp_path / "b.safetensors")
    report = compared(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.conclusion == "not comparable: no name is in both (A has x, B has y)"
    assert not report.equal


def test_a_sharded_model_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    for name, size in (("whole", "1GB"), ("sharded", "20KB"), ("finer", "9KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert compared(tmp_path / "whole", tmp_path / "sharded").equal
    assert compared(tmp_path / "sharded", tmp_path / "finer").equal
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] *= 1.5
    model.save_pretrained(tmp_path / "other", max_shard_size="20KB")
    report = compared(tmp_path / "other", tmp_path / "whole")
    assert "most: model.layers.1.mlp.up_proj.weight" in report.conclusion
    assert report.parameters[0].where == (3, 5)
    inside = compared(save_dcp({"model": model.model.state_dict()}, tmp_path / "dcp"), tmp_path / "other")
    assert inside.only_b == ["lm_head.weight"]
    assert inside.count("equal") == len(inside.parameters) > 15


def test_the_files_of_a_folder_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    names = list(weights())
    for i, part in enumerate((names[:2], names[2:])):
        save_file({name: weights()[name] for name in part}, tmp_path / "parts" / f"model-{i}.safetensors")
    save_file(weights(), tmp_path / "one.safetensors")
    assert compared(tmp_path / "parts", tmp_path / "one.safetensors").equal
    save_file({"scale": torch.ones(1)}, tmp_path / "parts" / "again.safetensors")
    with pytest.raises(UsageError, match="'scale' is in 'again.safetensors' and in 'model-1.safetensors'"):
        open_checkpoint(tmp_path / "parts")


@pytest.mark.ranks
def test_ranks_that_saved_shards_equal_one_that_saved_all(tmp_path: Path) -> None:
    command = [sys.executable, str(JOB), str(tmp_path / "two"), str(tmp_path / "meeting")]  # faster than torchrun
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 2
    model = numbers()
    one = save_dcp({"model": model.state_dict(), "same": torch.arange(4.0), "step": 3}, tmp_path / "one")
    report = compared(tmp_path / "two", one)
    assert report.conclusion == "equal: all 7 parameters have the same bits"
    assert (report.ignored_a, report.ignored_b) == (1, 1)
    nn.init.constant_(model[1].bias, 0.25)
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    report = compared(tmp_path / "two", tmp_path / "plain.safetensors")
    assert [one.name for one in report.parameters if one.result == "differs"] == ["1.bias"]
    assert report.only_a == ["same"]
    lost = next((tmp_path / "two").glob("__1_*.distcp"))
    lost.rename(tmp_path / "elsewhere")
    report = compared(tmp_path / "two", one)
    assert report.count("unreadable") > 0
    assert not report.equal
    assert "__1_0.distcp" in report.problems[0]


def test_an_optimizers_state_is_flattened(tmp_path: Path) -> None:
    model = numbers()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": [torch.ones(1), 3]},
        tmp_path / "a.pt",
    )
    opened = open_checkpoint(tmp_path / "a.pt")
    # Numbers beside the tensors are compared as they are: a step count, a learning rate.
    numbers_there = {"list.1", "optimizer.param_groups.0.lr", "optimizer.param_groups.0.weight_decay"}
    assert {"model.0.weight", "optimizer.state.0.exp_avg", "list.0", *numbers_there} <= set(opened.names())
    assert float(opened.tensor("optimizer.param_groups.0.lr")) == 1e-3
    assert opened.ignored > 0
