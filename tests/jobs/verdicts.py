"""Faults of many kinds on real ranks; prints one JSON line a case with what was concluded and done."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from scenarios import Scenario, train

from bitwitness import Guard, TrainingStopped
from bitwitness.testing import FaultyDevice, contained, from_mapping

FAR = {"kind": "multiply", "factor": 1e4}

CASES = {
    "transient backward flip": {
        "site": "layers.1.mlp.up/mm:backward",
        "rank": 1,
        "steps": [4],
        "times": 1,
        "kind": "exponent_msb",
    },
    "transient forward tile": {
        "site": "layers.0.attention.qkv/addmm:forward",
        "rank": 2,
        "steps": [3],  # a deep one: four steps are too few for a history that sees it
        "times": 1,
        "pattern": "tile",
        **FAR,
    },
    "persistent forward column": {
        "site": "layers.1.mlp.up/addmm:forward",
        "rank": 2,
        "from_step": 4,
        "element": 5,
        "pattern": "column",
        **FAR,
    },
    "persistent backward row": {
        "site": "layers.0.mlp.down/mm:backward",
        "rank": 0,
        "from_step": 4,
        "element": 5,
        "pattern": "row",
        **FAR,
    },
    "persistent layer norm": {
        "site": "norm/native_layer_norm:forward",
        "rank": 1,
        "from_step": 4,
        "element": 5,
        "pattern": "warp",
        **FAR,
    },
    "intermittent": {
        "site": "layers.*/mm:backward",
        "rank": 1,
        "from_step": 3,
        "probability": 0.3,
        "pattern": "column",
        **FAR,
    },
    "weight": {
        "site": "layers.1.mlp.up.weight/weight:param",
        "rank": 1,
        "steps": [3],
        "times": 1,
        "kind": "exponent_msb",
    },
    "optimizer state": {
        "site": "layers.1.mlp.up.weight/exp_avg:optim",
        "rank": 1,
        "steps": [3],
        "times": 1,
        "kind": "exponent_msb",
    },
    "collective": {
        "site": "*/allreduce_:comm.out0",
        "rank": 1,
        "steps": [4],
        "times": 1,
        "kind": "exponent_msb",
    },
}


def run(name: str, fault: dict | None, scenario: Scenario, act: str) -> dict:
    rank = dist.get_rank()
    guards = []

    def guarded(model, optimizer):
        guards.append(Guard(model, optimizer, act=act, deep_every=4, trend={"warmup": 3}))
        return guards[-1]

    stopped, lines = None, []
    device = FaultyDevice(from_mapping({"fault": [] if fault is None else [fault]}), rank=rank, seed=rank)
    with device:
        try:
            lines = train(scenario, guarded)
        except TrainingStopped as stop:
            stopped = stop.code
    verdicts = guards[0].verdicts
    return {
        "case": name,
        "rank": rank,
        "struck": len(device.fired),
        "stopped": stopped,
        "verdicts": [[v.step, str(v.cause), list(v.ranks), str(v.action), str(v.site), v.message] for v in verdicts],
        "failures": guards[0].reporter.failures,
        "last": lines[-1] if lines else None,
    }


@contained()
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scenario = Scenario("gpt", clip=1.0, steps=6)
    only = sys.argv[1:]
    clean = run("clean", None, scenario, "protect")
    for name, fault in CASES.items():
        if only and name not in only:
            continue
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, run(name, fault, scenario, "protect"))
        if dist.get_rank() == 0:
            struck = {t["rank"]: t["struck"] for t in told if t["struck"]}
            same = all(t["last"] is not None and t["last"] == t2 for t, t2 in [(told[0], clean["last"])])
            print(json.dumps({"case": name, "struck": struck, "stopped": [t["stopped"] for t in told],
                              "verdicts": told[0]["verdicts"], "agree": all(t["verdicts"] == told[0]["verdicts"] for t in told),
                              "failures": told[0]["failures"], "weights_as_clean": same}), flush=True)  # fmt: skip
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


main()
