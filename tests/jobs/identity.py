"""Every scenario with and without the guard, on all ranks; prints one line a scenario."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from scenarios import RANKS, train

from bitwitness import Guard

torch.set_num_threads(1)
dist.init_process_group("gloo")
failed = 0
only = sys.argv[1:]
for index, scenario in enumerate(RANKS):
    if only and str(index) not in only:
        continue
    plain = train(scenario)
    guards = []

    def guarded(model, optimizer, seen=guards):
        # every step is suspicious, so that every step is replayed here and on other ranks
        guard = Guard(model, optimizer, deep_every=2, trend={"z": 1e-9, "warmup": 1}, replay={"rest": False})
        seen.append(guard)
        return guard

    watched = train(scenario, guarded)
    table = guards[0].coverage()
    same = plain == watched
    failed += not same or table["failures"] != {} or bool(table["verdicts"])
    if dist.get_rank() == 0 or not same:
        where = (
            ""
            if same
            else f" from step {next(i for i, (a, b) in enumerate(zip(plain, watched, strict=True)) if a != b)}"
        )
        print(
            f"{'same' if same else 'DIFFERS' + where}: {scenario}: {table['suspicions']} questioned, "
            f"{table['dismissed']} dismissed, {table['verdicts']} {table['failures']}",
            flush=True,
        )
dist.destroy_process_group()
sys.exit(failed)
