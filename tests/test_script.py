"""A script that runs inside our process does what it does under ``python``; no torch is needed to see that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import sys
from bitwitness.cli.script import Script, ScriptError
from bitwitness.errors import UsageError
try:
    name, *arguments = [part for part in sys.argv[1:]]
    module = name == "-m"
    script = Script(arguments.pop(0) if module else name, arguments, module=module)
    script.run()
except ScriptError as error:
    sys.exit(error.show())
except UsageError as error:
    sys.exit(f"usage: {error}")
"""


@pytest.fixture
def both(tmp_path: Path):
    """Return a function that runs a command line in ``tmp_path`` under python and under us."""
    driver = tmp_path.parent / f"{tmp_path.name}-driver.py"
    driver.write_text(DRIVER)

    def run(*line: str) -> tuple[subprocess.CompletedProcess, subprocess.CompletedProcess]:
        plain, ours = (
            subprocess.run([sys.executable, *prefix, *line], cwd=tmp_path, capture_output=True, text=True, check=False)
            for prefix in ([], [str(driver)])
        )
        return plain, ours

    return run


SCRIPTS = {
    "what it is called": "import sys; print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__)",
    "its folder may be left": "import os; from pathlib import Path; os.chdir('/'); print(Path(__file__).exists())",
    "itself as __main__": "import __main__\nclass A: pass\nprint(__main__.A is A)",
    "pickling as python ends": "import atexit, pickle\nclass A: pass\natexit.register(lambda: print(len(pickle.dumps(A()))))",
    "its own source": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "annotations as it wrote them": "def f(x: 1 + 1): pass\nprint(f.__annotations__)",
    "an encoding of its own": "# -*- coding: latin-1 -*-\nprint(len('\xe9'))",
    "an exit code": "import sys; sys.exit(5)",
    "an exit message": "import sys; sys.exit('no data')",
    "its neighbours": "import neighbour",
    "an error": "def f():\n    raise KeyError('mine')\nf()",
    "an error with a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e",
    "an error elsewhere": "import json\njson.loads('{')",
    "a mistake in its grammar": "x = 1\ndef f(:\n",
    "a hook for its errors": "import sys\nsys.excepthook = lambda kind, *_: print('caught', kind)\nraise KeyError",
    "processes of its own": "import multiprocessing as mp\ndef f(x): return x + 1\n"
    "if __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(f, [1, 2]))",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_cannot_tell_the_difference(what: str, both, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbour.py").write_text("print('here')")
    (tmp_path / "sub" / "train.py").write_bytes(SCRIPTS[what].encode("latin-1"))
    plain, ours = both("sub/train.py", "--lr", "3", "--", "-m", "x")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours.stderr
    assert ours.stderr == plain.stderr


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_cannot_tell_the_difference(name: str, both, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    code = "import sys; print(sys.argv, sys.path[0], __name__, __package__, __spec__.name)\nraise KeyError"
    for file in ("train", "__main__"):
        (tmp_path / "package" / f"{file}.py").write_text(code)
    (tmp_path / "package" / "__init__.py").touch()
    plain, ours = both("-m", name, "--lr", "3")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours.stderr
    assert plain.stderr.splitlines()[-2:] == ours.stderr.splitlines()[-2:]
    assert "bitwitness" not in ours.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["none.py"], "there is no script none.py; check the path (seen from "),
        (["."], ". is a folder; expected a Python script"),
        (["-m", "no_such"], "no module named 'no_such' can be found; check the name, or leave out -m for a file"),
        (["-m", "no_such.part"], "no module named 'no_such.part' can be found (No module named 'no_such')"),
        (["-m", "bare"], "'bare' is a package without a __main__; name the module in it that trains"),
    ],
)
def test_what_cannot_be_run_is_named(line: list[str], message: str, both, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "__init__.py").touch()
    _, ours = both(*line)
    assert ours.stderr.startswith(f"usage: {message}")


def test_an_isolated_python_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.path)")
    code = "import sys; from bitwitness.cli.script import Script; print(sys.path); Script('train.py', []).run()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ
    )
    before, seen = done.stdout.splitlines()
    assert seen == before
