"""The TensorFlow side's settings: both spellings, every rule, and what they mean here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bitwitness import ConfigError
from bitwitness.config import DumpConfig, NPURunConfig, load_config


@pytest.mark.parametrize(
    ("mode", "ours"), [("aicore_overflow", "compute"), ("atomic_overflow", "accumulate"), ("all", "all")]
)
def test_keywords_carry_over(tmp_path: Path, mode: str, ours: str) -> None:
    dump = DumpConfig(enable_dump_debug=True, dump_path=str(tmp_path), dump_debug_mode=mode)
    run = NPURunConfig(dump_config=dump, session_config=object(), iterations_per_loop=10)
    expected = {"nonfinite.enabled": True, "nonfinite.mode": ours, "out": str(tmp_path)}
    assert run.to_settings() == dump.to_settings() == expected
    assert run.ignored == ("iterations_per_loop", "session_config")
    config = load_config(None, expected, {}).config
    assert (config.nonfinite.mode, config.out) == (ours, str(tmp_path))


def test_the_parameter_map_carries_over_as_protobuf_or_plain(tmp_path: Path) -> None:
    protobuf = {
        "use_off_line": SimpleNamespace(b=True, s=b"", i=0),
        "dump_path": SimpleNamespace(b=False, s=str(tmp_path).encode(), i=0),
        "enable_dump_debug": SimpleNamespace(b=True, s=b"", i=0),
        "dump_debug_mode": SimpleNamespace(b=False, s=b"aicore_overflow", i=0),
    }
    plain = {"use_off_line": True, "dump_path": str(tmp_path).encode(), "enable_dump_debug": True}
    assert DumpConfig.from_parameter_map(protobuf).to_settings()["nonfinite.mode"] == "compute"
    assert DumpConfig.from_parameter_map(plain).to_settings()["out"] == str(tmp_path)


def test_a_section_of_the_configuration_file_carries_over(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'budget = 0.02\n[dump_config]\nenable_dump_debug = true\ndump_path = "{tmp_path}"\n')
    loaded = load_config(file, environ={})
    assert (loaded.config.out, loaded.config.budget, loaded.warnings) == (str(tmp_path), 0.02, ())
    file.write_text(f'[dump_config]\nenable_dump = true\ndump_path = "{tmp_path}"\ndump_step = "0|5|10-20"\n')
    assert "the guard records no plain dumps" in load_config(file, environ={}).warnings[0]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"enable_dump": True, "enable_dump_debug": True}, "exclude each other"),
        ({"enable_dump_debug": True}, "dump_path = None: expected an existing folder"),
        ({"enable_dump": True, "dump_path": "/no/such/folder"}, "expected a folder that exists; create it first"),
        ({"enable_dump": "yes"}, "enable_dump = 'yes': expected True or False"),
        ({"dump_mode": "inputs"}, "expected one of input, output, all"),
        ({"dump_debug_mode": "aicore"}, "expected one of aicore_overflow, atomic_overflow, all"),
        ({"dump_step": "5-5"}, "(seen '5-5')"),
        ({"dump_step": "1||2"}, "(seen '')"),
        ({"dump_step": 3}, "expected numbers or ranges"),
        ({"dump_step": "|".join(["1"] * 101)}, "101 entries; expected at most 100"),
    ],
)
def test_what_is_not_allowed_is_said(keywords: dict, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        DumpConfig(**keywords)
    assert words in str(error.value)


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"the nearest known key is 'enable_dump_debug'"):
        DumpConfig.from_mapping({"enable_dump_debg": True})


def test_a_hundred_steps_are_allowed() -> None:
    assert DumpConfig(dump_step="|".join(["1-2"] * 100)).to_settings() == {}
