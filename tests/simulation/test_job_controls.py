"""Checker 11 on workers with one defect each: every one turns it red and no other, and
what is whole stays green.
"""

from __future__ import annotations

from result_counts import tally_controls

from holdfast.verify.checkers import check, red
from holdfast.verify.checkers.jobs import job_effects_once
from holdfast.verify.history import decode, encode
from proof.controls.jobs import JOB_CONTROLS, SEEDS, WHOLE, JobControl, play_jobs


def test_correct_worker_keeps_every_promise_among_zombies_and_kills() -> None:
    for seed in SEEDS:
        verdict = job_effects_once(play_jobs(seed, WHOLE))
        assert verdict.ok, f"seed {seed}\n{verdict}"
        assert verdict.examined > 100


def test_each_broken_worker_turns_its_checker_red_and_no_other() -> None:
    def turned_red(control: JobControl) -> set[int]:
        return set[int]().union(*(red(check(play_jobs(seed, control))) for seed in SEEDS))

    how = "broken variants of the embedded store and of handlers"
    requirement = "each turns checker 11 red, and no other"
    tally_controls("negative controls of jobs", how, requirement, JOB_CONTROLS, SEEDS, turned_red)


def test_saved_history_of_jobs_gets_the_same_verdict() -> None:
    history = play_jobs(1, JOB_CONTROLS[0])
    again = decode(encode(history.events))
    assert str(job_effects_once(again)) == str(job_effects_once(history))
