"""Every broken variant turns its own checkers red, and no other."""

from __future__ import annotations

import pytest
from result_counts import tally_controls

from holdfast.verify.checkers import CHECKERS
from proof.controls import CONTROLS, SEEDS, NegativeControl, turned_red
from proof.controls.jobs import JOB_CONTROLS
from proof.controls.replies import REPLY_CONTROLS
from proof.simulation import Parts


@pytest.mark.long
def test_each_control_turns_its_own_checkers_red_and_no_other() -> None:
    how, requirement = (
        "broken variants in the simulation",
        "each turns its checkers red, and no other",
    )
    tally_controls("negative controls", how, requirement, CONTROLS, SEEDS, turned_red)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_whole_parts_are_green_under_the_faults_of_each_control(control: NegativeControl) -> None:
    whole = NegativeControl(control.name, Parts(options=control.parts.options), frozenset())
    assert turned_red(whole, SEEDS[:2]) == set()


def test_every_checker_is_turned_red_by_some_control() -> None:
    controls = [*CONTROLS, *JOB_CONTROLS, *REPLY_CONTROLS]
    assert frozenset().union(*(control.red for control in controls)) == CHECKERS.keys()
