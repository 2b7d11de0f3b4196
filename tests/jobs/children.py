"""A script that starts processes of every kind."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(count: int = 4, batches=None) -> float:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _, x in zip(range(count), batches or [torch.ones(2, 3)] * count, strict=True):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(net.weight.detach().sum())


def nothing(*_: object) -> None:
    with torch.no_grad():
        nn.Linear(2, 2)(torch.ones(1, 2))


def leave(code: int) -> None:
    train()
    sys.exit(code)


def fail() -> None:
    train()
    os._exit(9)


def nested(method: str) -> None:
    target(method)


class Trainer(multiprocessing.get_context(sys.argv[-1]).Process):
    def run(self) -> None:
        train()


class Stubborn(multiprocessing.get_context("spawn").Process):
    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "run"}

    def run(self) -> None:
        train()


def ended(process, code: int = 0) -> None:
    process.start()
    process.join()
    assert process.exitcode == code, process.exitcode
    assert "run" not in vars(process)


def target(method: str, function=train, arguments=(), code: int = 0) -> None:
    ended(multiprocessing.get_context(method).Process(target=function, args=arguments), code)


def subclass(_method: str) -> None:
    ended(Trainer())


def pool(method: str) -> None:
    with multiprocessing.get_context(method).Pool(1) as workers:
        workers.apply(train)
        workers.close()
        workers.join()


def executor(method: str) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as workers:
        workers.submit(train).result()


def both(method: str) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        net(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            target(method)


def os_fork(_method: str) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        net(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and (child := os.fork()) == 0:
            train()
            sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def idle(method: str) -> None:
    target(method, nothing)
    with multiprocessing.get_context(method).Pool(1) as workers:
        workers.map(nothing, [1, 2])
        workers.close()
        workers.join()


def loader(method: str) -> None:
    data = TensorDataset(torch.ones(8, 3))
    train(4, (x for (x,) in DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method)))


def manager(method: str) -> None:
    with multiprocessing.get_context(method).Manager() as shared:
        shared.list([1]).append(2)


def stubborn(_method: str) -> None:
    ended(Stubborn(name="stubborn"))


def grandchild(method: str) -> None:
    target(method, nested, (method,))


def rank(number: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=number, world_size=2, store=dist.FileStore(store, 2))
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        net(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def ranks(method: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context(method)
        workers = [context.Process(target=rank, args=(number, f"{folder}/store")) for number in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0]


def codes(method: str) -> None:
    target(method, leave, (5,), 5)
    target(method, fail, (), 9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](sys.argv[2])
