"""Who is convicted by what was seen, and who must not be: the rules, on counts that are made up."""

from __future__ import annotations

import torch

from bitwitness.stress import verdict
from bitwitness.stress.collectives import collective_workloads
from bitwitness.stress.conclude import concluded
from bitwitness.stress.difference import difference
from bitwitness.stress.golden import Golden
from bitwitness.stress.known import delivered, settled
from bitwitness.stress.tally import Seen, Slots, fingerprint_of
from bitwitness.stress.truth import Truths
from bitwitness.stress.verdict import Remark
from bitwitness.stress.vote import voted
from bitwitness.stress.workload import Workload
from bitwitness.trial.call import Call

GOOD = {"out0": torch.arange(64.0).view(8, 8)}
ROUNDED = Workload("matmul", "float32", "8x8 8x8", lambda _v, _r: Call(torch.mm, ()))


def spoilt(*places: tuple[int, int]) -> Slots:
    values = GOOD["out0"].clone()
    for place in places:
        values[place] = 1e3
    return {"out0": values}


def seen(runs: dict[int, list[str]], values: dict[str, Slots] | None = None, **within: bool | None) -> Seen:
    one = Seen(0, 0, values={"good": GOOD, **(values or {})}, within={"good": True, **within})
    for slot, of in runs.items():
        one.add(slot, of)
    return one


def convicted(one: Seen) -> list[tuple[int, str]]:
    return [(fault.slot, fault.proof) for fault in voted(one, ROUNDED, sorted(one.counts))[0]]


def kinds(one: Seen) -> list[str]:
    return [remark.kind for remark in voted(one, ROUNDED, sorted(one.counts))[1]]


def test_one_that_contradicts_itself_where_no_other_does_is_convicted() -> None:
    one = seen({0: ["good"] * 3, 1: ["good", "odd", "good"], 2: ["good"] * 3}, {"odd": spoilt((2, 3))}, odd=True)
    [fault], [] = voted(one, ROUNDED, [0, 1, 2])
    assert (fault.slot, fault.proof, fault.wrong, fault.runs, fault.first.run) == (1, "own runs", 1, 3, 2)
    assert fault.difference is not None
    assert (fault.difference.slot, fault.difference.at, fault.difference.seen) == ("out0", [[2, 3]], ["447a0000"])


def test_an_operator_that_most_do_not_repeat_convicts_nobody_within_its_allowance() -> None:
    runs = {0: ["good", "a"], 1: ["b", "c"], 2: ["d", "good"], 3: ["good", "good"]}
    one = seen(runs, a=True, b=True, c=True, d=True)
    assert convicted(one) == []
    assert kinds(one) == ["spread"]
    one.within["c"] = False
    assert convicted(one) == [(1, "float64")]


def test_what_torch_says_need_not_repeat_convicts_nobody() -> None:
    one = seen({0: ["good"] * 4, 1: ["good", "odd"], 2: ["good"] * 4}, odd=True)
    one.nondeterministic = "index_add does not have a deterministic implementation"
    assert convicted(one) == []
    assert kinds(one) == ["spread"]


def test_another_algorithm_on_one_device_is_no_fault() -> None:
    one = seen(
        {0: ["good"], 1: ["good"], 2: ["odd"], 3: ["good"]}, {"odd": {"out0": GOOD["out0"] * 1.0000002}}, odd=True
    )
    assert convicted(one) == []
    assert kinds(one) == ["undecided"]


def test_a_part_of_a_chip_that_always_differs_is_named_by_the_majority() -> None:
    one = seen({0: ["good"], 1: ["good"], 2: ["odd"], 3: ["good"]}, {"odd": spoilt((0, 0), (1, 0), (0, 1))}, odd=True)
    assert convicted(one) == [(2, "majority")]


def test_kernels_that_are_inaccurate_on_all_devices_convict_none() -> None:
    one = seen({0: ["bad"], 1: ["bad"], 2: ["bad"]}, bad=False)
    assert convicted(one) == []
    one = seen({0: ["bad"], 1: ["worse"]}, bad=False, worse=False)
    assert convicted(one) == []
    assert kinds(one) == ["software"]


def test_a_single_device_that_varies_within_its_allowance_is_left_open() -> None:
    one = seen({0: ["good", "odd"]}, odd=True)
    assert convicted(one) == []
    assert kinds(one) == ["undecided"]
    one.within["odd"] = False
    assert convicted(one) == [(0, "float64")]


def test_rounded_results_are_compared_among_devices_of_one_model() -> None:
    one = seen({0: ["good"], 1: ["good"], 2: ["other"], 3: ["other"], 4: ["other"]}, other=True)
    models = {slot: {"model": "A" if slot < 2 else "B"} for slot in range(5)}
    faults, remarks = concluded([one], [ROUNDED], models, Truths([ROUNDED], 5).due)
    assert (faults, remarks) == ([], [])


def test_a_golden_file_that_fits_nothing_convicts_nobody() -> None:
    all_seen = [Seen(number, 0) for number in range(4)]
    workloads = [Workload(f"op{n}", "float32", "8", ROUNDED.call) for n in range(4)]
    for one in all_seen:
        one.add(0, ["here"])
    golden = Golden({}, {f"op{n} float32 8 #0": "there" for n in range(4)})
    faults, [remark] = concluded(all_seen, workloads, {0: {}}, Truths(workloads, 1).due, golden)
    assert not faults
    assert "other bits than the golden device in 4 of 4 comparisons: rather another driver" in remark.text
    golden = Golden({}, {f"op{n} float32 8 #0": "there" if n == 1 else "here" for n in range(4)})
    [fault], [] = concluded(all_seen, workloads, {0: {}}, Truths(workloads, 1).due, golden)
    assert (fault.workload.name, fault.proof) == ("op1", "golden")


def received(name: str, wrong: dict[int, list[int]], ranks: int = 4) -> tuple[list[verdict.Fault], list[Remark]]:
    """Return what is said of a collective; ``wrong``: by receiver, the places (of the first dimension) that are not as due."""
    workloads = list(collective_workloads(torch.float32, large=False, ranks=ranks))
    [index] = [i for i, one in enumerate(workloads) if one.name == name and one.shape.endswith("1021")]
    truths, one = Truths(workloads, ranks), Seen(index, 1)
    for slot in range(ranks):
        values = truths.due(one, slot)[1]()
        for place in wrong.get(slot, []):
            values["out0"][place].flatten()[5] += 64
        fingerprint = fingerprint_of(values)
        one.add(slot, [fingerprint])
        one.values[fingerprint] = values
    faults, suspicions = delivered(one, workloads[index], truths.due)
    more, remarks = settled(suspicions, {fault.slot for fault in faults})
    return [*faults, *more], remarks


def test_a_contribution_that_came_wrongly_to_all_is_the_senders() -> None:
    faults, _ = received("all_gather", {0: [2], 1: [2], 3: [2]})
    assert [fault.slot for fault in faults] == [2]
    faults, _ = received("broadcast", {0: [0], 2: [0], 3: [3]})
    assert [fault.slot for fault in faults] == [1], "the root of this input"


def test_what_came_wrongly_to_one_is_the_receivers() -> None:
    assert [fault.slot for fault in received("all_gather", {3: [0, 1]})[0]] == [3]
    assert [fault.slot for fault in received("all_reduce", {2: [0]})[0]] == [2]


def test_a_wrong_sum_names_nobody_by_itself() -> None:
    faults, [remark] = received("all_reduce", {slot: [1] for slot in range(4)})
    assert not faults
    assert (remark.kind, remark.slots) == ("wrong", (0, 1, 2, 3))
    faults, [remark] = received("all_to_all", {0: [3]})
    assert not faults
    assert remark.slots == (0, 3)


def test_the_first_difference_is_told_with_its_bits() -> None:
    one = difference({"out0": torch.zeros(3, 4, dtype=torch.bfloat16)}, {"out0": torch.eye(3, 4, dtype=torch.bfloat16)})
    assert one is not None
    assert str(one) == "out0[0, 0]: 0x3f80 (1), expected 0x0000 (0), and 2 more of 12"
    assert difference(GOOD, GOOD) is None
