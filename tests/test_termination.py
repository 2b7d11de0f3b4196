"""SIGTERM ends a guarded process as it ends a plain one, wherever that is, and is the script's where the script handles it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TRAIN = """
    import asyncio, datetime, multiprocessing, os, signal, sys, time
    import torch, torch.distributed as dist

    def train(steps=6):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
NEVER = """
    train()
    store = dist.TCPStore("localhost", 0, 1, True, timeout=datetime.timedelta(seconds=300), wait_for_workers=False)
    print("READY", flush=True)
    store.get("never")
"""
HANDLED = """
    def handler(number, frame):
        print("HANDLED", flush=True)
        time.sleep(2)
        print("SAVED", flush=True)
        sys.exit(5)
    train()
    signal.signal(signal.SIGTERM, handler)
    print("READY", flush=True)
    time.sleep(60)
"""
CHAINED = """
    train()
    before = signal.getsignal(signal.SIGTERM)
    def handler(number, frame):
        print("SAVED", flush=True)
        before(number, frame) if callable(before) else os._exit(9)
    signal.signal(signal.SIGTERM, handler)
    print("READY", flush=True)
    time.sleep(60)
"""
CHILD = """
    def child():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
        time.sleep(60)
    train()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    time.sleep(1)
    process.terminate()
    process.join()
    train()
    time.sleep(1)
    print("CHILD", process.exitcode, flush=True)
    print("READY", flush=True)
    store = dist.TCPStore("localhost", 0, 1, True, timeout=datetime.timedelta(seconds=300), wait_for_workers=False)
    store.get("never")
"""
LOOP = """
    train()
    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "USR1")
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.5)
        print("READY", flush=True)
        await asyncio.sleep(60)
    asyncio.run(main())
"""


def ended(script: str, folder: Path) -> tuple[int, str]:
    """Return the exit status of a guarded script that gets SIGTERM when it is ready, and what it said."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(script))
    command = [sys.executable, "-m", "bitwitness", "run", "--out", str(folder / "run"), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
    )
    assert process.stdout is not None
    said = ""
    while "READY" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    try:
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, said + rest


@pytest.mark.parametrize(
    ("script", "status", "told"),
    [
        (NEVER, -signal.SIGTERM, "terminated (SIGTERM)"),
        (HANDLED, 5, "SAVED"),
        (CHAINED, -signal.SIGTERM, "SAVED"),
        (CHILD, -signal.SIGTERM, "CHILD 3"),
        (LOOP, -signal.SIGTERM, "USR1"),
    ],
    ids=["blocked in C", "the script's handler", "a chained handler", "a child's signal", "an event loop"],
)
def test_sigterm_ends_what_it_would_end(script: str, status: int, told: str, tmp_path: Path) -> None:
    found, said = ended(script, tmp_path)
    assert (found, told in said) == (status, True), said
