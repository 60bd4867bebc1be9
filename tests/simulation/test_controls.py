"""Every broken variant turns its own checkers red, and no other."""

from __future__ import annotations

import time

import pytest
from tally import tally

from holdfast.verify.checkers import CHECKERS
from holdfast.verify.controls import CONTROLS, SEEDS, turned_red
from holdfast.verify.controls.jobs import JOB_CONTROLS
from holdfast.verify.results import Row


@pytest.mark.long
def test_each_control_turns_its_own_checkers_red_and_no_other() -> None:
    began = time.perf_counter()
    found = {control.name: turned_red(control) for control in CONTROLS}
    wrong = {c.name: (sorted(found[c.name]), sorted(c.red)) for c in CONTROLS if found[c.name] != c.red}
    print("control: (turned red, ought to)", wrong)
    tally(
        Row(
            name="negative controls",
            how="broken variants in the simulation",
            runs=len(CONTROLS),
            failures=len(wrong),
            requirement="each turns its checkers red, and no other",
            seed=f"{SEEDS[0]}..{SEEDS[-1]} each",
            seconds=time.perf_counter() - began,
        )
    )


def test_every_checker_is_turned_red_by_some_control() -> None:
    assert frozenset().union(*(control.red for control in [*CONTROLS, *JOB_CONTROLS])) == CHECKERS.keys()
