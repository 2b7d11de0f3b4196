"""Configuration: defaults, files, environment, reference variables, and the messages for mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness import Config, ConfigError
from bitwitness.config import FeatureConfig, StrikesConfig, TrendConfig, load_config, to_dict

SEED_LINE = "enable:true,with_checksum:true,grad_sample_interval:1,cooldown:1,strikes_num:1"


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_documented_ones():
    config = load_config(environ={}).config
    assert (config.act, config.out, config.deep_every, config.self_test) == ("observe", None, None, True)
    assert config.budget == 0.01
    assert config.ranks.deadline_s == 120.0
    assert config.feature.schemes == ()
    assert (config.feature.upper_thresh, config.feature.sigma_thresh) == (
        (1_000_000, 10_000),
        (100_000, 5_000),
    )
    assert (config.feature.upper_thresh1, config.feature.upper_thresh2) == (1_000_000, 100)
    assert config.strikes == StrikesConfig(5.0, 3, 480.0, 180.0)


def test_precedence_is_keyword_environment_reference_file_default(tmp_path):
    file = toml(
        tmp_path,
        'act = "protect"\ndeep_every = 7\n[strikes]\nstrikes_num = 9\ncooldown = 9\nstrikes_window = 9\n',
    )
    environ = {
        "MS_NPU_ASD_CONFIG": "enable:true,strikes_num:8,cooldown:8,strikes_window:8",
        "BITWITNESS_STRIKES__STRIKES_NUM": "7",
        "BITWITNESS_STRIKES__COOLDOWN": "7.5",
    }
    config = load_config(file, {"strikes": {"strikes_num": 6}}, environ).config
    assert (config.act, config.deep_every) == ("protect", 7)
    assert config.strikes == StrikesConfig(7.5, 6, 8.0, 180.0)


def test_a_config_object_is_final_but_for_keywords():
    config = load_config(Config(act="protect"), {"deep_every": 3}, {"BITWITNESS_ACT": "stop"}).config
    assert (config.act, config.deep_every) == ("protect", 3)


def test_the_three_ways_to_write_a_section_as_a_keyword_agree():
    ways = [{"trend": {"z": 8}}, {"trend.z": 8.0}, {"trend": TrendConfig(z=8)}]
    assert len({load_config(None, way, {}).config for way in ways}) == 1


def test_the_environment_speaks_every_kind_of_value():
    environ = {
        "BITWITNESS_OUT": "run",
        "BITWITNESS_SELF_TEST": "no",
        "BITWITNESS_FEATURE__SCHEMES": "v1, combined",
        "BITWITNESS_FEATURE__UPPER_THRESH": "900,30",
        "BITWITNESS_INJECT": "faults.toml",
    }
    config = load_config(environ=environ).config
    assert (config.out, config.self_test) == ("run", False)
    assert config.feature.schemes == ("v1", "combined")
    assert config.feature.upper_thresh == (900, 30)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("deep_evry = 5", ["'deep_evry'", "5", "run.toml", "nearest known key is 'deep_every'"]),
        ("[trend]\nzz = 5", ["'trend.zz'", "5", "run.toml", "nearest known key is 'trend.z'"]),
        ("strikes_num = 5", ["'strikes_num'", "nearest known key is 'strikes.strikes_num'"]),
        ("act = 3", ["act = 3", "run.toml", "'observe', 'protect', 'stop'"]),
        ("self_test = 1", ["self_test = 1", "true or false"]),
        ("deep_every = true", ["deep_every = True", "an integer >= 0"]),
        ("[trend]\nz = 'high'", ["trend.z = 'high'", "a finite number > 0"]),
        ("[trend]\nz = nan", ["trend.z = nan", "a finite number > 0"]),
        ("[trend]\nz = 0", ["trend.z = 0", "a finite number > 0"]),
        ("trend = 5", ["trend = 5", "a section with the keys trend.enabled"]),
        ("[feature]\nschemes = ['v9']", ["feature.schemes = ['v9']", "'v1', 'v2', 'v3', 'combined'"]),
        ("[feature]\nupper_thresh = [5]", ["feature.upper_thresh = [5]", "2 values, each an integer >= 3"]),
        ("[feature]\nupper_thresh = [5, 9]", ["feature.upper_thresh = (5, 9)", "swap them"]),
        ("= 5", ["run.toml is not TOML", "key = value"]),
    ],
)
def test_a_mistake_in_a_file_names_key_value_place_and_what_was_expected(tmp_path, text, parts):
    with pytest.raises(ConfigError) as error:
        load_config(toml(tmp_path, text), environ={})
    for part in parts:
        assert part in str(error.value)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration: cannot read .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml", environ={})


def test_a_mistake_in_the_environment_names_the_variable():
    with pytest.raises(ConfigError, match="nearest known key is 'BITWITNESS_DEEP_EVERY'"):
        load_config(environ={"BITWITNESS_DEEP_EVRY": "5"})
    with pytest.raises(ConfigError, match="BITWITNESS_ACT = 'heal' in the environment: expected one of 'observe'"):
        load_config(environ={"BITWITNESS_ACT": "heal"})


def test_a_mistake_in_python_is_found_where_it_is_built():
    with pytest.raises(ConfigError, match=r"TrendConfig\.warmup = 0: expected an integer >= 1"):
        TrendConfig(warmup=0)
    with pytest.raises(ConfigError, match="expected a TrendConfig"):
        Config(trend=FeatureConfig())  # type: ignore[arg-type]


# -- the reference systems' variables


def test_the_first_seed_is_understood_unchanged():
    loaded = load_config(environ={"NPU_ASD_ENABLE": "1"})
    assert (loaded.config.act, loaded.config.feature.schemes, loaded.warnings) == ("stop", ("v1",), ())
    off = load_config(environ={"NPU_ASD_ENABLE": "0"})
    assert (off.config.act, off.config.feature.schemes) == ("observe", ())


def test_the_second_seed_is_understood_unchanged():
    loaded = load_config(environ={"MS_NPU_ASD_CONFIG": SEED_LINE})
    feature = loaded.config.feature
    assert loaded.warnings == ()
    assert (feature.schemes, feature.with_checksum, feature.grad_sample_interval) == (("combined",), True, 1)
    assert loaded.config.strikes == StrikesConfig(1.0, 1, 480.0, 180.0)


def test_both_seeds_at_once_turn_both_schemes_on():
    environ = {"NPU_ASD_ENABLE": "1", "MS_NPU_ASD_CONFIG": "enable:true"}
    assert load_config(environ=environ).config.feature.schemes == ("v1", "combined")


@pytest.mark.parametrize(("level", "act", "logs"), [("1", "observe", False), ("2", "stop", False), ("3", "stop", True)])
def test_later_releases_levels_hold_with_the_named_option_only(level, act, logs):
    environ = {"NPU_ASD_ENABLE": level, "BITWITNESS_FEATURE__LEVELS": "release"}
    config = load_config(environ=environ).config
    assert (config.act, config.feature.schemes, config.feature.log_values) == (act, ("v1",), logs)


def test_a_level_that_needs_the_option_is_off_and_says_so():
    loaded = load_config(environ={"NPU_ASD_ENABLE": "2"})
    assert loaded.config.feature.schemes == ()
    assert "NPU_ASD_ENABLE = '2': expected one of 0, 1" in loaded.warnings[0]
    assert "feature.levels = 'release'" in loaded.warnings[0]


@pytest.mark.parametrize(
    ("text", "holds", "warns"),
    [
        ("900, 30", (900, 30), None),
        ("900,1", (900, 3), "raised to 900,3"),
        ("30,900", (1_000_000, 10_000), "the default (1000000, 10000) holds"),
        ("2,1", (1_000_000, 10_000), "the default"),
        ("5", (1_000_000, 10_000), "the default"),
        ("1e6,5", (1_000_000, 10_000), "the default"),
        ("-9,5", (1_000_000, 10_000), "the default"),
    ],
)
def test_threshold_pairs_follow_the_reference_rules(text, holds, warns):
    loaded = load_config(environ={"NPU_ASD_UPPER_THRESH": text})
    assert loaded.config.feature.upper_thresh == holds
    assert bool(loaded.warnings) == bool(warns)
    if warns:
        assert f"NPU_ASD_UPPER_THRESH = {text!r}" in loaded.warnings[0]
        assert warns in loaded.warnings[0]


def test_pairs_may_use_equals_signs_and_spaces():
    config = load_config(environ={"MS_NPU_ASD_CONFIG": " enable = true , , upper_thresh2= 7 "}).config
    assert (config.feature.schemes, config.feature.upper_thresh2) == (("combined",), 7)


def test_torch_npu_samples_every_third_parameter_and_wins_over_mindspore():
    assert load_config(environ={"NPU_ASD_CONFIG": "enable:true"}).config.feature.grad_sample_interval == 3
    both = load_config(
        environ={
            "NPU_ASD_CONFIG": "enable:true,cooldown:2",
            "MS_NPU_ASD_CONFIG": "enable:false,cooldown:9,strikes_num:4",
        }
    )
    assert both.config.feature.schemes == ("combined",)
    assert (both.config.strikes.cooldown, both.config.strikes.strikes_num) == (2.0, 4)
    assert "both set" in both.warnings[0]


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        ("stirkes_num:2", ["unknown key 'stirkes_num'", "'2'", "nearest known key is 'strikes_num'"]),
        ("strikes_num:0", ["strikes_num = '0'", "an integer >= 1", "default holds"]),
        ("upper_thresh1:2", ["upper_thresh1 = '2'", "an integer >= 3"]),
        ("cooldown:1.5", ["cooldown = '1.5'", "an integer >= 1"]),
        ("cooldown:99999999999", ["cooldown", "an integer >= 1"]),
        ("with_checksum:yes", ["with_checksum = 'yes'", "true or false"]),
        ("lonely", ["'lonely' is not understood", "key:value"]),
    ],
)
def test_a_bad_pair_is_a_warning_and_the_default_holds(item, parts):
    loaded = load_config(environ={"MS_NPU_ASD_CONFIG": f"enable:true,{item}"})
    assert loaded.config.feature.schemes == ("combined",)
    assert loaded.config.strikes == StrikesConfig()
    assert len(loaded.warnings) == 1
    for part in ["MS_NPU_ASD_CONFIG", *parts]:
        assert part in loaded.warnings[0]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_no_text_in_a_reference_variable_breaks_a_training(pairs, enable, thresholds):
    environ = {
        "MS_NPU_ASD_CONFIG": pairs,
        "NPU_ASD_CONFIG": pairs,
        "NPU_ASD_ENABLE": enable,
        "NPU_ASD_UPPER_THRESH": thresholds,
        "NPU_ASD_SIGMA_THRESH": thresholds,
    }
    assert isinstance(load_config(environ=environ).config, Config)


@settings(max_examples=40, deadline=None)
@given(
    act=st.sampled_from(["observe", "protect", "stop"]),
    schemes=st.lists(st.sampled_from(["v1", "v2", "v3", "combined"]), max_size=3, unique=True),
    z=st.floats(0.001, 1e6),
    num=st.integers(1, 1000),
)
def test_what_is_written_to_the_run_folder_reads_back(act, schemes, z, num):
    overrides = {
        "act": act,
        "feature": {"schemes": schemes},
        "trend": {"z": z},
        "strikes": {"strikes_num": num},
    }
    config = load_config(None, overrides, {}).config
    again = load_config(None, json.loads(json.dumps(to_dict(config))), {}).config
    assert again == config


def test_configuration_needs_no_torch():
    code = "import sys, bitwitness.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
