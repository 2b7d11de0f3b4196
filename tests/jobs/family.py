"""Parents and children of which one is stopped: ``family.py CASE METHOD``. The stop comes at step 3, with code 16."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn

from bitwitness.guard import childstops
from bitwitness.respond import process_exit

BAD = 3
childstops.PATIENCE_S, process_exit.GRACE_S = 1.0, 4.0
_AT_LEISURE_S = 120.0  # for who notices by itself, and on a busy machine takes its time


def train(bad: int = BAD) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(8):
        x = torch.randn(5, 8) * (float("inf") if number >= bad else 1.0)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trains_and_answers(queue) -> None:
    train()
    queue.put("trained")


def idles(queue) -> None:
    queue.get()


def waits_for_an_answer(context) -> None:
    queue = context.Queue()
    context.Process(target=trains_and_answers, args=(queue,)).start()
    try:
        queue.get()
    finally:
        print("cleaned up", flush=True)


def waits_for_a_pool(context) -> None:
    with context.Pool(1) as pool:
        pool.apply(train)


def waits_for_an_executor(context) -> None:
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        executor.submit(train).result()


def notices(context) -> None:
    childstops.PATIENCE_S = process_exit.GRACE_S = _AT_LEISURE_S
    process = context.Process(target=train)
    process.start()
    process.join()
    print("child", process.exitcode, flush=True)


def stays(context) -> None:
    context.Process(target=train).start()
    while True:
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:
            print("stays", flush=True)


def is_stopped_beside_a_child(context) -> None:
    queue = context.Queue()
    context.Process(target=idles, args=(queue,), name="idler").start()
    train()


def one_of_two(context) -> None:
    queue = context.Queue()
    context.Process(target=idles, args=(queue,), name="idler").start()
    child = context.Process(target=train)
    child.start()
    child.join()


def a_child_of_a_child(context) -> None:
    process = context.Process(target=waits_for_an_answer, args=(context,))
    process.start()
    process.join()


def forks_quietly(context) -> None:
    warnings.simplefilter("error", DeprecationWarning)  # python's warning of threads in a process that forks
    queue = context.Queue()
    children = [context.Process(target=idles, args=(queue,)) for _ in range(4)]
    for process in children:
        process.start()
        time.sleep(0.05)
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    print("forked", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    for _ in children:
        queue.put(None)
    for process in children:
        process.join()


def all_is_well(context) -> None:
    process = context.Process(target=train, args=(100,))
    process.start()  # python waits for it


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](multiprocessing.get_context(sys.argv[2]))
