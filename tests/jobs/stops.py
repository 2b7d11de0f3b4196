"""Scripts that do not take a stop for an answer: ``stops.py CASE [guard|start|auto]``.

The stop comes at step 3, with code 16.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

atexit.register(lambda: print("registered before the guard was imported", flush=True))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import bitwitness as bw  # noqa: E402
from bitwitness.respond import process_exit  # noqa: E402

HOW = sys.argv[2] if len(sys.argv) > 2 else "guard"
BAD = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


MODEL, OPTIMIZER = build()
TAKEN: list[int] = []
OPTIMIZER.register_step_post_hook(lambda *_: TAKEN.append(1))


def guard(model=MODEL, optimizer=OPTIMIZER):
    if HOW == "auto":
        return nullcontext()
    made = bw.Guard(model, optimizer, act="stop", self_test=False)
    return made if HOW == "guard" else nullcontext(made.start())


def step(number: int, model=MODEL, optimizer=OPTIMIZER) -> None:
    x = torch.randn(5, 8) * (float("inf") if number >= BAD else 1.0)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(first: int = 0) -> None:
    with guard():
        for number in range(first, 8):
            step(number)


def retries_inside() -> None:
    with guard():
        for number in range(1000):
            try:
                step(number)
            except BaseException as error:
                print("caught", type(error).__name__, flush=True)


def retries_outside() -> None:
    for _ in range(1000):
        try:
            train()
        except BaseException as error:
            print("caught", type(error).__name__, flush=True)


def goes_on_unguarded() -> None:
    with suppress(SystemExit):
        train()
    for number in range(1000):  # not those that are bad: nothing but the stop itself speaks against them
        with suppress(SystemExit):
            step(-number)


def parts_are_refused() -> None:
    x = torch.randn(5, 8)
    before = MODEL(x).sum()
    with suppress(SystemExit):
        train()
    MODEL.eval()
    MODEL(x)
    MODEL.train()
    with torch.no_grad():
        MODEL(x)
    parts = {"forward": lambda: MODEL(x), "backward": before.backward, "step": OPTIMIZER.step, "guard": train}
    for name in sys.argv[3:]:
        try:
            parts[name]()
        except bw.TrainingStopped as stop:
            print("refused", name, stop.code, flush=True)


def caught_and_over() -> None:
    globals()["left_open"] = Path("open.txt").open("w")  # noqa: SIM115
    globals()["left_open"].write("python closes it last")
    atexit.register(lambda: print("registered by the script", flush=True))
    with suppress(SystemExit):
        train()
    sys.exit(0)


def another_error() -> None:
    try:
        train()
    except SystemExit as error:
        raise ValueError("no luck") from error


def saves_for_long() -> None:
    process_exit.GRACE_S = 0.5
    try:
        train()
    finally:
        time.sleep(2.0)
        print("saved", flush=True)


def thread() -> None:
    worker = threading.Thread(target=train)
    worker.start()
    worker.join()
    print("the main thread went on", flush=True)


def thread_and_main_waits_elsewhere() -> None:
    threading.Thread(target=train).start()
    try:
        threading.Event().wait()
    finally:
        print("cleaned up", flush=True)


def thread_and_main_catches() -> None:
    worker = threading.Thread(target=train)
    worker.start()
    try:
        worker.join()
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def thread_saves_and_main_catches() -> None:
    def work() -> None:
        try:
            train()
        finally:
            for _ in range(100):
                time.sleep(0.01)
                torch.randn(2000, 200).square().sum()
            print("the thread saved", flush=True)

    worker = threading.Thread(target=work)
    worker.start()
    with suppress(KeyboardInterrupt):
        worker.join()


def thread_and_main_stays() -> None:
    process_exit.GRACE_S = 1.0
    threading.Thread(target=train).start()
    while True:
        with suppress(BaseException):
            time.sleep(0.1)


def thread_that_catches() -> None:
    def work() -> None:
        while True:
            with suppress(BaseException):
                train()

    threading.Thread(target=work).start()
    while True:
        with suppress(BaseException):
            time.sleep(0.1)


def two_models() -> None:
    other = build()
    taken: list[int] = []
    with guard(), guard(*other):
        for number in range(8):
            with suppress(SystemExit):
                step(number)
            with suppress(SystemExit):
                step(-number, *other)
                taken.append(number)
                print("the other model's steps", taken, flush=True)


def child(*_: int) -> None:
    with suppress(SystemExit):
        train()


def children(method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=child)
    process.start()
    process.join()
    print(method, process.exitcode, flush=True)


def spawn() -> None:
    children("spawn")


def fork() -> None:
    children("fork")


def at_a_prompt() -> None:
    sys.ps1 = ">>> "
    retries_outside()
    print("still here", flush=True)


def ranks() -> None:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(MODEL)
    OPTIMIZER.register_step_post_hook(lambda *_: None)
    with bw.Guard(model, OPTIMIZER, act="stop", self_test=False), suppress(SystemExit):
        for number in range(8):
            step(number, model)
    print("caught", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    atexit.register(lambda: print("steps", len(TAKEN), flush=True))
    print("pid", os.getpid(), flush=True)
    globals()[sys.argv[1]]()
