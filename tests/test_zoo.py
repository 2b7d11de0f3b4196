"""Trainings as other people write them: guarded, with every step questioned, they end as they end without the guard.

The harness is ``bench/innocent.py``; a short selection runs here, all of them if TEST_EVERYTHING is set.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extent import EVERYTHING
from ranks import script

ROOT = Path(__file__).parent.parent
ZOO = ROOT / "tests" / "zoo"
SELECTION = (
    "aux_vae_kl_attribute",
    "class_level_state_and_closure",
    "grad_dqn_clamp_data",
    "grad_sam_data",
    "inplace_logits_temperature_mask",
    "memory_moco_queue",
    "penalty_l1_from_step",
    "retry_on_runtime_error",
)
SCRIPTS = sorted(path.stem for path in ZOO.glob("*.py")) if EVERYTHING else SELECTION


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """What went wrong, by script."""
    folder = tmp_path_factory.mktemp("zoo")
    only = [] if EVERYTHING else [word for name in SELECTION for word in ("--only", name)]
    done = script(
        [
            ROOT / "bench" / "innocent.py",
            *only,
            *([] if EVERYTHING else ["--once"]),
            "--out",
            folder,
            "--json",
            folder / "wrong.json",
            "--timeout",
            "240",
        ],
        folder,
        timeout=3600,
    )
    assert (folder / "wrong.json").exists(), done.stderr
    found = json.loads((folder / "wrong.json").read_text())
    assert done.returncode == any(found.values()), done.stdout + done.stderr
    return found


@pytest.mark.timeout(3600 if EVERYTHING else 1200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_training_is_neither_disturbed_nor_misjudged(wrong, name):
    assert wrong[name] == []


def test_the_zoo_is_large_and_stands_alone():
    texts = {path.stem: path.read_text() for path in ZOO.glob("*.py")}
    assert len(texts) >= 65
    assert set(SELECTION) <= set(texts)
    for name, text in texts.items():
        assert "bitwitness" not in text, name
        assert text.count('print("BITS"') == 1, name
        assert 'os.environ.get("ZOO_SEED", "0")' in text, name
