"""Every broken variant turns its own checkers red, and no other."""

from __future__ import annotations

import pytest
from result_counts import tally_controls

from holdfast.verify.checkers import CHECKERS
from proof.controls import CONTROLS, SEEDS, turned_red
from proof.controls.jobs import JOB_CONTROLS
from proof.controls.replies import REPLY_CONTROLS


@pytest.mark.long
def test_each_control_turns_its_own_checkers_red_and_no_other() -> None:
    how, requirement = (
        "broken variants in the simulation",
        "each turns its checkers red, and no other",
    )
    tally_controls("negative controls", how, requirement, CONTROLS, SEEDS, turned_red)


def test_every_checker_is_turned_red_by_some_control() -> None:
    controls = [*CONTROLS, *JOB_CONTROLS, *REPLY_CONTROLS]
    assert frozenset().union(*(control.red for control in controls)) == CHECKERS.keys()
