"""A group of some of a job's ranks: verdicts call each by the number that the job gives it."""

from bitwitness import Cause, Verdict
from bitwitness.finding import Action
from bitwitness.judge.verdict import numbered_in_job

VERDICT = Verdict(
    Cause.PERSISTENT_HARDWARE,
    12,
    (0,),
    (),
    Action.STOPPED,
    "rank 0: cpu:2 computes step 12 wrongly; ranks 0, 1 were asked",
    evidence={"rank 0": {"whose": "rank 1's step"}, "steps": [12, "rank 0"]},
)


def test_a_group_in_the_middle_of_the_job():
    told = numbered_in_job(VERDICT, (2, 5))
    assert told.ranks == (2,)
    assert told.message == "rank 2: cpu:2 computes step 12 wrongly; ranks 2, 5 were asked"
    assert told.evidence == {"rank 2": {"whose": "rank 5's step"}, "steps": [12, "rank 2"]}


def test_the_whole_job_and_a_process_alone_keep_what_they_said():
    assert numbered_in_job(VERDICT, (0, 1)) is VERDICT
    assert numbered_in_job(VERDICT, ()) is VERDICT
