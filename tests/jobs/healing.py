"""One transient fault in trainings of many kinds, on all ranks; prints what became of it, a JSON line a training."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from scenarios import Scenario, train

from bitwitness import Guard
from bitwitness.testing import FaultyDevice, from_mapping

ONCE = {"rank": 1, "steps": [5], "times": 1}
FLIP = {**ONCE, "kind": "exponent_msb"}
TRAININGS = [
    (Scenario("gpt", steps=7, ddp={"gradient_as_bucket_view": True}), {**FLIP, "site": "layers.1.mlp.up/mm:backward"}),
    (Scenario("gpt", steps=7, ddp={"static_graph": True}), {**FLIP, "site": "layers.1.mlp.up/mm:backward"}),
    (Scenario("gpt", steps=7, accumulate=3, clip=1.0), {**FLIP, "site": "layers.1.mlp.up/mm:backward"}),
    (
        Scenario("gpt", steps=7, autocast=torch.bfloat16, set_to_none=False),
        {**FLIP, "site": "layers.0.attention.qkv/mm:backward"},
    ),
    (
        Scenario("conv", steps=7, scaler=True, autocast=torch.float16),
        {**FLIP, "site": "body.4/convolution_backward:backward"},
    ),
    (Scenario("lstm", steps=7), {**FLIP, "site": "lstm/mkldnn_rnn_layer_backward:backward"}),
    (Scenario("hf", steps=7, accumulate=2), {**FLIP, "site": "transformer.h.0.mlp.c_fc/mm:backward"}),
    (
        Scenario("unused", steps=7, ddp={"find_unused_parameters": True}),
        {**FLIP, "site": "head/mm:backward"},
    ),
    (
        Scenario("conv", steps=7, optimizer="sgd"),
        {**ONCE, "site": "body.4/convolution:forward", "kind": "multiply", "factor": 1e6, "pattern": "all"},
    ),
]


def weights(line: str) -> str:
    """Return the part of a line of bits that follows the losses: weights, optimizer state, random states."""
    return line.split("]", 1)[1]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario, fault in TRAININGS:
        clean = train(scenario)
        guards: list[Guard] = []

        def guarded(model, optimizer, seen=guards):
            seen.append(Guard(model, optimizer, act="protect", trend={"warmup": 3}, deep_every=0))
            return seen[-1]

        with FaultyDevice(from_mapping({"fault": [fault]}), rank=dist.get_rank()) as device:
            lines = train(scenario, guarded)
        table = guards[0].coverage()
        same = torch.tensor([int(weights(lines[-1]) == weights(clean[-1])), len(device.fired)])
        dist.all_reduce(same)
        if dist.get_rank() == 0:
            told = {"verdicts": table["verdicts"], "failures": table["failures"]}
            print(
                json.dumps({"training": str(scenario), "same": int(same[0]), "struck": int(same[1]), **told}),
                flush=True,
            )
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


main()
