"""Other people's trainers under ``bitwitness run``, every step questioned: the same bits, the same logs, faults found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extent import EVERYTHING
from ranks import forked

JOB = Path(__file__).parent / "jobs" / "followed.py"
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

SITES = {
    "lightning": "*second/addmm:forward",
    "accelerate": "*second/addmm:forward",
    "transformers": "*mlp.up_proj/mm:forward",
}
WHEN = {"transient": "steps = [3]\ntimes = 1", "persistent": "from_step = 3"}
CONFIG = """act = "protect"
self_test = false
out = "{out}"
[trend]
z = 1e-9
warmup = 1
[replay]
rest = false
"""


def run(trainer: str, ranks: int, folder: Path, fault: str | None = None, *, guarded: bool = True):
    """Train; return the exit code, what the ranks have and logged at the end, and all that was printed."""
    folder.mkdir(parents=True)
    arguments, environment = [str(JOB), trainer, str(folder / "files")], {}
    if guarded:
        (folder / "bitwitness.toml").write_text(CONFIG.format(out=folder / "run"))
        arguments = ["-m", "bitwitness", "run", "--config", str(folder / "bitwitness.toml"), *arguments]
    if fault is not None:
        text = f'[[fault]]\nsite = "{SITES[trainer]}"\nrank = {ranks - 1}\n{WHEN[fault]}\n'
        text += 'kind = "multiply"\nfactor = 1e4\npattern = "column"\nelement = 1\n'
        (folder / "faults.toml").write_text(text)
        environment["BITWITNESS_INJECT"] = str(folder / "faults.toml")
    launched = forked(ranks, arguments, folder / "logs", environment=environment)
    said = "\n".join(log.read_text() for log in launched.logs)
    rows = sorted((json.loads(line) for line in said.splitlines() if line.startswith('{"trainer"')), key=json.dumps)
    return launched.code, rows, said


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [(trainer, ranks) for trainer in SITES for ranks in (1, 2, 3)]
    if EVERYTHING
    else [("lightning", 1), ("accelerate", 2)],
)
def test_the_same_bits_and_the_same_logs_and_faults_found(trainer: str, ranks: int, tmp_path: Path) -> None:
    _, plain, _ = run(trainer, ranks, tmp_path / "plain", guarded=False)
    code, guarded, said = run(trainer, ranks, tmp_path / "clean")
    assert (code, guarded) == (0, plain), said[-3000:]
    assert len(plain) == ranks
    assert "VERDICT" not in said
    code, healed, said = run(trainer, ranks, tmp_path / "transient", "transient")
    assert code == 0
    assert [row["values"] for row in healed] == [row["values"] for row in plain], said[-3000:]
    assert "transient_hardware, action healed" in said
    if not EVERYTHING:
        return
    _, _, said = run(trainer, ranks, tmp_path / "persistent", "persistent")
    assert "persistent_hardware, action stopped" in said, said[-3000:]
    assert SITES[trainer].strip("*").partition(":")[0] in said
